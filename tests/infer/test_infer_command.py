"""``manyhands generate`` on the folders that a run leaves."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.facts.identity import identify_files
from manyhands.infer.__main__ import main
from manyhands.infer.load import find_parts
from manyhands.launch.run_folder import RunFolder
from tests.export.tiny import METHOD, adapt, make_model, save_source
from tests.launch.builders import make_config, make_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    base = save_source(root / "base", make_model())
    export_adapter(root / "adapter", adapt(make_model()), METHOD, str(base), rank=0)
    return root


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--max-new-tokens", "8"]) == 0
    return capsys.readouterr().out


def test_a_model_answers_and_the_adapter_changes_the_answer(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, str(folders / "base"), "--prompt", "w1 w2")
    adapted = ask(capsys, str(folders / "adapter"), "--prompt", "w1 w2", "--base", str(folders / "base"))
    assert plain.strip() and adapted.strip() and plain != adapted


def test_lines_of_standard_input_are_one_conversation(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw1 w2\n\nw1 w2\n"))
    first, second, third = ask(capsys, str(folders / "base")).splitlines()
    assert first == third  # an empty line starts anew
    assert second != first  # the second turn saw the first


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
    assert main([str(tmp_path / "x"), "--prompt", "w1"]) == 2
    assert text in capsys.readouterr().err


def test_an_adapter_with_more_than_lora_is_refused(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"rank_pattern": {"q_proj": 2}}))
    assert main([str(tmp_path), "--prompt", "w1", "--base", str(folders / "base")]) == 2
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
    run.write_plan(make_plan(1, model_folder=str(base), model_files=identify_files(base, config)))
    assert find_parts(run.path).weights == base
    raw = bytearray((base / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (base / "model.safetensors").write_bytes(raw)
    with pytest.raises(UserError, match="not the one that the run was trained on") as refused:
        find_parts(run.path)
    assert refused.value.details[0].startswith("model.safetensors: ")
    assert find_parts(run.path, str(base)).weights == base, "asked for by name"
