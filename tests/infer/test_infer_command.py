"""``manyhands generate`` and ``chat`` on the folders that a run leaves."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.facts.identity import identify_files
from manyhands.infer.__main__ import main
from manyhands.infer.chat import chat
from manyhands.infer.load import find_parts, open_answerer
from manyhands.infer.prompts import PromptOptions
from manyhands.infer.settings import GenerationSettings
from manyhands.launch.run.folder import RunFolder
from tests.export.tiny import METHOD, adapt, make_model, save_source
from tests.launch.builders import make_config, make_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    base = save_source(root / "base", make_model())
    export_adapter(root / "adapter", adapt(make_model()), METHOD, str(base), rank=0)
    return root


def call(verb: str, folder: Path, **request: object) -> int:
    return main([verb, json.dumps({"folder": str(folder), "settings": {"max_new_tokens": 8}, **request})])


def ask(capsys: pytest.CaptureFixture[str], folder: Path, **request: object) -> str:
    assert call("generate", folder, **request) == 0
    return capsys.readouterr().out


def test_a_model_answers_and_the_adapter_changes_the_answer(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, folders / "base", prompt="w1 w2")
    adapted = ask(capsys, folders / "adapter", prompt="w1 w2", base=str(folders / "base"))
    assert plain.strip() and adapted.strip() and plain != adapted


def test_lines_of_standard_input_are_one_conversation(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw1 w2\n\nw1 w2\n"))
    assert call("chat", folders / "base") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == third  # an empty line starts anew
    assert second != first  # the second turn saw the first
    assert first == ask(capsys, folders / "base", prompt="w1 w2").strip()


def test_a_chat_prints_each_answer_as_it_is_made_with_its_system_prompt(folders: Path) -> None:
    class Out(io.StringIO):
        pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return super().write(text)

    answerer, settings = open_answerer(folders / "base"), GenerationSettings(max_new_tokens=8)
    out = Out()
    chat(answerer, settings, PromptOptions(system="w9"), ["w1 w2\n", "w3\n"], out)
    history = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}]
    first = answerer.answer(history, 8)
    history += [{"role": "assistant", "content": first}, {"role": "user", "content": "w3"}]
    assert out.getvalue() == f"{first}\n{answerer.answer(history, 8)}\n"
    assert len(out.pieces) > 10  # word by word


def test_bytes_that_are_no_text_are_named_as_that(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = b"caf\xe9".decode(errors="surrogateescape")
    chat(open_answerer(folders / "base"), GenerationSettings(max_new_tokens=8), lines=[f"{line}\n"])
    for given in ({"prompt": line}, {"prompt": "a", "options": {"system": line}}):
        assert call("generate", folders / "base", **given) == 2
    assert capsys.readouterr().err.count("error: the prompt is not UTF-8 text: convert it first") == 3


def test_a_turn_that_the_template_refuses_leaves_the_chat_open(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answerer = open_answerer(folders / "base")
    refusing = "{% if 'w5' in messages[-1]['content'] %}{{ raise_exception('not that') }}{% endif %}"
    answerer.tokenizer.chat_template = refusing + answerer.tokenizer.chat_template
    out = io.StringIO()
    chat(answerer, GenerationSettings(max_new_tokens=8), lines=["w5", "w1 w2"], out=out)
    assert "not that" in capsys.readouterr().err
    assert out.getvalue().strip() == answerer.answer([{"role": "user", "content": "w1 w2"}], 8)


@pytest.fixture(scope="module")
def short(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 positions."""
    folder = shutil.copytree(folders / "base", tmp_path_factory.mktemp("short") / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    return folder


def test_a_prompt_beyond_the_models_positions_is_refused(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, short, prompt="w1 w2").strip()
    assert call("generate", short, prompt="w1 " * 18) == 2  # there is room for the prompt, and not for 8 tokens more
    assert "24 positions, for the prompt and 8 new tokens" in capsys.readouterr().err


def test_a_chat_answers_as_long_as_there_are_positions(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answerer, out = open_answerer(short), io.StringIO()
    most = next(n for n in range(24) if len(answerer.encode([{"role": "user", "content": "w1 " * n}])) == 21)
    chat(answerer, GenerationSettings(max_new_tokens=8), lines=["w1 " * most, "w2", "", "w1 w2"], out=out)
    first, refused, fresh = out.getvalue().splitlines()
    assert len(answerer.tokenizer.encode(first, add_special_tokens=False)) <= 3 and not refused
    assert "begin a new conversation" in capsys.readouterr().err
    assert fresh == answerer.answer([{"role": "user", "content": "w1 w2"}], 8)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "neither a run, a model nor an adapter"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")), "the model folder has no weights"),
    ],
)
def test_a_wrong_folder_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], make, text: str) -> None:
    make(tmp_path / "x")
    assert call("generate", tmp_path / "x", prompt="w1") == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "part", "note"),
    [
        ("interrupted", "", "its result is that of step 3; manyhands export"),
        ("running", "model", "its result is that of step 3"),
        ("finished", "", ""),
    ],
)
def test_the_result_of_a_shorter_run_is_named(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, part: str, note: str
) -> None:
    """A run that was made longer and has not finished still holds the model of its earlier end."""
    run = RunFolder(tmp_path / "run")
    run.plans.mkdir(parents=True)
    run.write_config(make_config())
    (run.plans / "001.report.json").write_text(json.dumps({"measured": {"steps": 3}}))
    checkpoint = run.checkpoints / "step-000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    shutil.copytree(folders / "base", run.path / "model")
    run.write_status(state)
    assert call("generate", run.path / part, prompt="w1") == 0
    said = capsys.readouterr().err
    assert (note in said and "made longer" in said) if note else "made longer" not in said


def test_an_adapter_with_more_than_lora_is_refused(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"rank_pattern": {"q_proj": 2}}))
    assert call("generate", tmp_path, prompt="w1", base=str(folders / "base")) == 2
    assert "it sets rank_pattern" in capsys.readouterr().err


def test_an_adapter_without_a_base_name_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="does not name its base") as caught:
        find_parts(tmp_path)
    assert "--base" in caught.value.fix


def test_an_adapter_on_another_base_than_its_runs_is_refused(folders: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", RunFolder(tmp_path / "run")
    shutil.copytree(folders / "base", base)
    shutil.copytree(folders / "adapter", run.path / "adapter")
    config = make_config(**{"model.name": str(base), "data.cache": str(tmp_path / "cache")})
    run.create()
    run.write_config(config)
    files = identify_files(base, config)
    run.write_plan(make_plan(1, config_digest=config.digest, model_folder=str(base), model_files=files))
    assert find_parts(run.path).weights == base
    raw = bytearray((base / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (base / "model.safetensors").write_bytes(raw)
    with pytest.raises(UserError, match="not the one that the run was trained on") as refused:
        find_parts(run.path)
    assert refused.value.details[0].startswith("model.safetensors: ")
    assert find_parts(run.path, str(base)).weights == base, "asked for by name"


def test_figures_are_shown_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that may not be written loses none."""

    def refuse(found: object, output: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(output))

    monkeypatch.setattr("manyhands.infer.compare.compare", lambda folder, **options: "found")
    monkeypatch.setattr("manyhands.infer.compare.describe", lambda found: "the figures")
    monkeypatch.setattr("manyhands.infer.compare.write_files", refuse)
    assert main(["evaluate", json.dumps({"folder": str(tmp_path), "output": str(tmp_path / "out")})]) == 2
    shown = capsys.readouterr()
    assert shown.out == "the figures\n" and f"where: {tmp_path}/out\n  why: Permission denied" in shown.err
