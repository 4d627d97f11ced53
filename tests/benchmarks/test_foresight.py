"""The configurations that the plan is judged by: many kinds, and half of their shapes never fitted to."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import foresight
from benchmarks.foresight_cases import CASES, FITTED, HELD_OUT, ONE_GPU, TRIALS
from benchmarks.foresight_fit import by_group, read_rows, report
from manyhands.bench.shapes import SHAPES
from manyhands.planner.rates import load_fitted

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_case_has_a_name_of_its_own() -> None:
    names = Counter(case.name for case in (*CASES, *TRIALS))
    assert max(names.values()) == 1


def test_a_shape_is_either_fitted_to_or_held_out() -> None:
    shapes = {case.shape for case in CASES}
    assert not set(FITTED) & set(HELD_OUT)
    assert shapes <= set(FITTED) | set(HELD_OUT)
    assert len(shapes & set(HELD_OUT)) >= len(shapes) / 2


def test_the_cases_are_of_many_kinds() -> None:
    assert len(CASES) >= 60
    assert {case.gpus for case in CASES} == {1, 2, 4}
    assert {case.method for case in CASES} == {"full", "lora", "qlora"}
    assert len({SHAPES[case.shape][0] for case in CASES}) >= 8
    lengths = {case.length for case in CASES}
    assert (min(lengths), max(lengths)) == (512, 131_072)
    for gpus in (1, 2, 4):
        held_out = [case.is_held_out for case in CASES if case.gpus == gpus]
        assert 0.3 <= sum(held_out) / len(held_out) <= 0.7


def test_rows_of_another_kind_of_gpu_are_planned_from_its_datasheet_and_stand_apart(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RESULTS / "h200-foresight-4.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "input" in row][:2]
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps(row | {"device": name}) + "\n" for row in rows for name in ("NVIDIA H200", "NVIDIA H100 NVL")
        )
    )
    found = read_rows([tmp_path / "rows.jsonl"])
    groups = by_group(found)
    others = [name for name in groups if name.endswith("datasheet alone")]
    assert len(found) == 4 and len(others) == 1 and len(groups[others[0]]) == 2
    assert {row.group for row in found} - set(others) <= {"held out", "fitted"}
    for other in groups[others[0]]:  # a GPU with less bandwidth and power is not taken for an H200
        same = next(row for row in found if row.row["case"] == other.row["case"] and row is not other)
        assert sum(other.seconds(load_fitted()).values()) > sum(same.seconds(load_fitted()).values())
    page = report(found, load_fitted())
    assert f"| {others[0]} | 2 rows" in page and "2 configurations of" in page


@pytest.mark.parametrize(("device", "left_out"), [("NVIDIA H200", 1), ("NVIDIA H100 80GB HBM3", 0)])
def test_a_case_that_was_measured_on_such_a_gpu_is_not_measured_again(
    device: str, left_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"case": ONE_GPU[0].name, "device": "NVIDIA H200"}) + "\n")
    gpu = SimpleNamespace(name=device, memory_bytes=140 * 2**30)
    monkeypatch.setattr(foresight, "read_host_facts", lambda: SimpleNamespace(gpus=[gpu]))
    monkeypatch.setattr(foresight, "count_gpus", lambda: 1)
    options = argparse.Namespace(
        gpus=None, have=[tmp_path / "rows.jsonl"], output=tmp_path / "new.jsonl", case=None, only=None
    )
    assert len(foresight.Schedule(options).pending) == len(ONE_GPU) - left_out
