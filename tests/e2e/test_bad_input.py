"""Bad input at the command line: the message names the place, the exit code is 2, and no folder is left.

The mistakes below go through ``manyhands train`` up to the launch, in this process. Others are read by tests nearer to
them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from tests.e2e.runs import Place

GOOD = {"prompt": "alpha", "completion": "beta"}
LONG = {"prompt": "alpha", "completion": "x" * 400}


@pytest.fixture
def refuse(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``refuse(*arguments)``: the message of ``manyhands train``, which must end with 2 and leave no run."""
    monkeypatch.chdir(place.folder)

    def train(*arguments: str) -> str:
        runs = tmp_path / "runs"
        result = CliRunner().invoke(
            app, ["train", "run.yaml", "name=bad", f"output.dir={runs}", f"data.cache={tmp_path}/cache", *arguments]
        )
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
        assert not (runs / "bad").exists()
        return result.stderr

    return train


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f"data.train={path}"


def test_broken_lines_are_listed_with_file_and_line(refuse, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = refuse(write(path, GOOD, '{"prompt": ', GOOD, "[1]", GOOD))
    assert "2 lines cannot be read" in text
    assert f"{path}:2: broken JSON" in text and f"{path}:4: a row must be an object" in text


def test_a_row_without_a_trained_token_is_named(refuse, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    user, assistant = {"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}
    text = refuse(write(path, {"messages": [user, assistant]}, {"messages": [user]}, {"messages": [user, assistant]}))
    assert f"{path}:2: no loss token" in text or (f"{path}:2" in text and "assistant" in text), text
    assert f"{path}:1" not in text and f"{path}:3" not in text


def test_too_long_rows_are_refused_with_their_length(refuse, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = refuse(write(path, GOOD, LONG, GOOD), "data.max_length=100")
    assert f"{path}:2" in text and "100" in text and "truncate" in text


def test_conversations_are_not_split(refuse, tmp_path: Path) -> None:
    text = refuse(write(tmp_path / "rows.jsonl", GOOD, LONG), "data.too_long=split")
    assert "data.too_long" in text and "task" in text and "truncate" in text


@pytest.mark.parametrize(("rows", "words"), [((), "empty"), (("", " "), "no rows")])
def test_empty_data(refuse, tmp_path: Path, rows: tuple[str, ...], words: str) -> None:
    assert words in refuse(write(tmp_path / "rows.jsonl", *rows))


def test_a_missing_file_and_an_unknown_key(refuse) -> None:
    text = refuse("data.train=none.jsonl")
    assert "no such data file" in text and "none.jsonl" in text
    text = refuse("optimizer.learning_rat=1")
    assert "optimizer.learning_rat" in text and "learning_rate" in text


def test_a_model_folder_without_weights(refuse, place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.folder / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    text = refuse(f"model.name={model}")
    assert "the model folder has no weights" in text and str(model) in text and "model.safetensors" in text


def test_a_missing_chat_template(refuse, place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.folder / "model", model)
    for path in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        else:
            fields = json.loads(path.read_text())
            fields.pop("chat_template", None)
            path.write_text(json.dumps(fields))
    row = {"messages": [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]}
    text = refuse(f"model.name={model}", write(tmp_path / "rows.jsonl", row, row, row))
    assert "no chat template" in text and "model.chat_template" in text


def test_a_batch_that_does_not_divide_names_the_nearest(refuse) -> None:
    text = refuse(
        "data.packing=false", "batch.micro_tokens=auto", "batch.samples=10", "batch.micro_samples=2", "--gpus", "2"
    )
    assert "10" in text and "8" in text and "12" in text and "batch.samples" in text


def test_too_long_rows_are_cut_or_split_where_that_is_asked(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    # the process that builds the model for a dry run: tests/launch/test_rehearsal.py
    monkeypatch.setattr("manyhands.launch.run.prepare.rehearse", lambda config, plan: None)
    common = [
        "train",
        "run.yaml",
        "--dry-run",
        f"output.dir={tmp_path}",
        "data.max_length=100",
        "batch.micro_tokens=128",
        "batch.samples=2",
    ]
    data = write(tmp_path / "rows.jsonl", *[LONG] * 40)
    cut = CliRunner().invoke(app, [*common, "name=cut", data, "data.too_long=truncate"])
    assert cut.exit_code == 0, cut.output
    text = write(tmp_path / "text.jsonl", *[{"text": "x" * 400}] * 40)
    split = CliRunner().invoke(app, [*common, "name=split", "task=cpt", text, "data.too_long=split"])
    assert split.exit_code == 0, split.output
    steps = {
        name: json.loads((tmp_path / name / "plans/001.json").read_text())["steps_per_epoch"]
        for name in ("cut", "split")
    }
    assert steps["split"] >= 4 * steps["cut"] > 0
