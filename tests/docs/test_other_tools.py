"""The page for users of other tools: its files are read, its lines and scripts train, with a tiny model in the place of
theirs.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.api import trainer as trainer_module
from manyhands.cli.option_hints import _table
from manyhands.importers.load import load_config
from tests.cli.conftest import call
from tests.support.tiny import write_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "other-tools.md").read_text()
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROWS = [
    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": str(n)}]} for n in range(9)
]


def blocks(language: str) -> dict[str, str]:
    """By the heading that they stand below."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for text in re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            found[section.partition("\n")[0]] = text
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MANYHANDS_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    write_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "data").mkdir()
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    mine = {"file_name": "../rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": mine}))
    return tmp_path


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("Axolotl", {"method.name": "qlora", "method.rank": 32, "batch.packs": 8, "data.too_long": "drop"}),
        ("LLaMA-Factory", {"method.rank": 8, "batch.samples": 8, "stop.epochs": 3.0, "data.train_on": "assistant"}),
        ("TRL", {"method.rank": 16, "batch.samples": 8, "data.train_on": "assistant", "stop.epochs": 3.0}),
    ],
)
def test_each_file_is_read_as_it_stands(folder: Path, tool: str, expected: dict[str, Any]) -> None:
    (folder / "file.yaml").write_text(blocks("yaml")[tool].replace(MODEL, "model"))
    config = load_config(folder / "file.yaml", overrides=["parallel.gpus=1"]).model_dump()
    assert {key: config[key.split(".")[0]][key.split(".")[1]] for key in expected} == expected


def test_the_line_starts_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = types.SimpleNamespace(start=lambda run, **_: started.append(run.config) or 0)
    monkeypatch.setitem(sys.modules, "manyhands.launch.local.start", start)
    result = call(*blocks("bash")["TRL"].replace(MODEL, "model").split()[1:])
    assert result.exit_code == 0, result.output
    assert (started[0].method.name, started[0].stop.epochs, started[0].name) == ("lora", 1.0, "trl")


@pytest.mark.parametrize("tool", ["TRL", "Unsloth"])
def test_each_script_runs_to_its_end(folder: Path, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a run in place of training, which tests/api/test_notebook_calls.py does."""
    kept: list[Any] = []

    def start(load: Any, **_: Any) -> Path:
        kept.append(load().config)
        step = {"kind": "step", "step": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5}
        row = {**step, "seconds": 1.0, "num_samples": 2, "devices": []}
        (folder / "run" / "adapter").mkdir(parents=True)
        (folder / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "run" / "run.json").write_text("{}")
        return folder / "run"

    monkeypatch.setattr(trainer_module, "start", start)
    monkeypatch.setattr(mh.TrainOutput, "plan", types.SimpleNamespace(num_steps=1))
    monkeypatch.setattr("manyhands.api.outputs.export", lambda run, output, *options: kept.append((output, options)))
    exec(compile(blocks("python")[tool].replace(MODEL, "model"), tool, "exec"), {})
    assert kept[0].stop.max_steps == 10 and kept[0].method.name == {"TRL": "full", "Unsloth": "lora"}[tool]
    assert tool == "TRL" or (Path("lora_model").is_dir() and kept[1][1] == ("--merge", "--dtype", "bfloat16"))


def test_commands_of_the_others_have_the_answers_of_the_command_line() -> None:
    answers = _table("commands")
    named = re.findall(r"`(?:axolotl |llamafactory-cli )?([\w-]+)` is\s+`manyhands (\w+)", PAGE)
    assert len(named) == 6
    for theirs, ours in named:
        assert theirs == ours or answers[theirs].split()[0] in (ours, "generate"), theirs
