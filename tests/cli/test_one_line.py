"""A run without a run file: what its options and its rows mean, and the run file that is kept of it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from manyhands.core.errors import EXIT_USAGE
from manyhands.importers.load import load_config
from manyhands.launch.run.folder import RunFolder
from tests.cli.conftest import call


def write_rows(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def started(monkeypatch, tmp_path):
    runs: list = []
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", {"question": "1 + 1?", "answer": "2"})
    monkeypatch.setitem(
        sys.modules, "manyhands.launch.local.start", types.SimpleNamespace(start=lambda run, **_: runs.append(run) or 0)
    )
    return runs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model org/Tiny-1B --data rows.jsonl", {"name": "Tiny-1B-rows", "method.name": "lora", "task": "sft"}),
        ("-m org/m --data rows.jsonl --method qlora --epochs 2", {"method.name": "qlora", "stop.epochs": 2.0}),
        ("-m org/m --data rows.jsonl --lr 1e-4 --rank 32", {"optimizer.learning_rate": 1e-4, "method.rank": 32}),
        ("-m org/m --data rows.jsonl -o out/x", {"output.dir": "out", "name": "x"}),
        ("-m org/m --data rows.jsonl --batch-size 64 --max-length 512", {"batch.samples": 64, "data.max_length": 512}),
        ("-m org/m --data rows.jsonl", {"data.too_long": "truncate", "data.format": "question"}),
        ("-m org/m --data texts.jsonl", {"task": "cpt", "data.too_long": "split"}),
        ("-m org/m --data german.jsonl", {"data.fields": {"question": "Frage", "answer": "Antwort"}}),
        ("-m org/m --data rows.jsonl data.too_long=error seed=7", {"data.too_long": "error", "seed": 7}),
        ("seed=7 -m org/m --data rows.jsonl", {"seed": 7}),
        ("model.name=org/m data.train=rows.jsonl --epochs 3", {"model.name": "org/m", "stop.epochs": 3.0}),
        # as other tools have it
        ("--model_name_or_path org/m --dataset_name rows.jsonl", {"model.name": "org/m"}),
        ("-m org/m --data rows.jsonl --learning_rate 1e-4", {"optimizer.learning_rate": 1e-4}),
        ("--model_name org/m --dataset rows.jsonl --num_train_epochs 3", {"stop.epochs": 3.0}),
        ("-m org/m --data rows.jsonl --max_seq_length 512 --output_dir out/y", {"data.max_length": 512, "name": "y"}),
    ],
)
def test_options_and_rows_make_the_run(started, tmp_path, words, expected):
    write_rows(tmp_path / "texts.jsonl", {"text": "one"}, {"text": "two"})
    write_rows(tmp_path / "german.jsonl", {"Frage": "1 + 1?", "Antwort": "2"})
    result = call("train", *words.split())
    assert result.exit_code == 0, result.output
    (run,) = started
    fields = run.config.model_dump()
    for key, value in expected.items():
        found = fields
        for part in key.split("."):
            found = found[part]
        assert found == value, key


def test_the_kept_run_file_is_the_same_run(started, tmp_path):
    words = "-m org/m --data rows.jsonl -o out/x --lr 3e-4 --gpus 2 stop.max_steps=3 method.target_modules=[q_proj]"
    assert call("train", *words.split()).exit_code == 0
    (run,) = started
    folder = RunFolder(tmp_path / "out" / "x")
    folder.create()
    folder.write_origin(run)
    assert load_config(folder.path / "run.yaml") == run.config


def test_options_beside_a_run_file_are_overrides_of_its_keys(started, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: org/m}\ndata: {train: rows.jsonl}\nmethod: {rank: 4}\n")
    assert call("train", path, "--rank", 8, "--epochs", 2).exit_code == 0
    (run,) = started
    assert (run.config.method.rank, run.config.stop.epochs, run.run_file) == (8, 2.0, None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "--model and --data are missing"),
        ("--model org/m", "--data is missing"),
        ("--data rows.jsonl seed=1", "--model is missing"),
        ("-m org/m --data none.jsonl", "none.jsonl"),
        ("-m org/m --data odd.jsonl", "data.fields.question=COLUMN"),
        ("-m org/m --data rows.jsonl --method lroa", "method.name"),
        ("-m org/m --data rows.jsonl --lr high", "optimizer.learning_rate"),
        ("-m org/m --data rows.jsonl model.name=org/n", "--model and model.name are both given"),
        ("-m org/m --data rows.jsonl -o out/x name=y", "--output and output.dir are both given"),
        ("-m org/m --data rows.jsonl optimizer.learningrate=1", "optimizer.learning_rate"),
        ("-m org/m --data rows.jsonl --load_in_4bit", "method.name: qlora"),
        ("-m org/m --data rows.jsonl --lora_alpha 16", "method.alpha"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_way_out(started, tmp_path, words, text):
    write_rows(tmp_path / "odd.jsonl", {"a": "1", "b": "2", "c": "3"})
    result = call("train", *words.split())
    assert result.exit_code == EXIT_USAGE and text in result.stderr and not started
