"""Rows of several GPUs are started by torchrun, which takes part of a word for an option of its own."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import benchmarks.__main__ as beside_peers
from manyhands.bench import __main__ as alone
from manyhands.bench import case
from manyhands.bench.rows import BY_NAME, BenchRow

ROW = BY_NAME["8b-full"]


def start_ours(options: argparse.Namespace) -> None:
    alone.measure(ROW, 2, options, "today")


def start_peers(options: argparse.Namespace) -> None:
    beside_peers.measure(ROW, "manyhands", 2, options.output, options, "today")


@pytest.mark.parametrize("start", [start_ours, start_peers])
def test_torchrun_hands_all_options_to_the_row(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []

    def record(module: str, arguments: list[str], *_: Any) -> tuple[str, dict[str, Any]]:
        started.append((module, arguments))
        return "", {}

    for command in (alone, beside_peers):
        monkeypatch.setattr(command, "start_processes", record)
    start(argparse.Namespace(steps=8, shape="tiny", output=tmp_path / "rows.jsonl"))
    ((module, arguments),) = started
    read = get_args_parser().parse_args(["--standalone", "--nproc_per_node=2", "-m", module, *arguments])
    assert (read.training_script, read.training_script_args) == (module, arguments)
    monkeypatch.setattr("sys.argv", [module, *arguments])
    assert case.parse().run == "today"


def test_a_row_that_is_none_is_refused_without_options_that_the_command_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "nope"])
    assert alone.main() == 2
    said = capsys.readouterr().err
    assert "no row called 'nope'" in said and "8b-full" in said and "--steps" not in said and "--shape" not in said


def test_a_row_clips_as_its_keys_say(tmp_path: Path) -> None:
    """Where nothing is clipped, weights in host memory are updated in the backward pass: another row."""

    class Norm(case.Observer):
        def summarise(self, rank: Any, loop: Any, results: Any) -> dict[str, Any]:
            return {"max_grad_norm": loop.max_grad_norm}

    for keys, expected in (([], 1.0), (["optimizer.max_grad_norm=0"], 0.0)):
        output = tmp_path / f"{expected}.jsonl"
        given = ["--steps=2", "--warm=1", f"--work={tmp_path}", f"--output={output}", "parallel.device=cpu", *keys]
        options = case.read_options(argparse.ArgumentParser(), given)
        case.run(options, BenchRow("clips", "", "tiny", "lora", 1, rows=1, length=64), Norm())
        assert json.loads(output.read_text())["max_grad_norm"] == expected


@pytest.mark.parametrize("reference", ["adapters", "stored"])
def test_a_row_of_pairs_starts_where_no_answer_is_better(tmp_path: Path, reference: str) -> None:
    """Before the first step a pair's loss is log 2; the step that follows the timed ones has its reference too."""
    keys, output = ["parallel.device=cpu", f"preference.reference={reference}"], tmp_path / "rows.jsonl"
    given = ["--steps=2", "--warm=1", f"--work={tmp_path}", f"--output={output}", *keys]
    case.run(case.read_options(argparse.ArgumentParser(), given), replace(BY_NAME["8b-dpo"], shape="tiny", length=32))
    assert json.loads(output.read_text())["losses"][0] == 0.6931
