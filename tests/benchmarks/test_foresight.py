"""The configurations that the plan is judged by: many kinds, and half of their shapes never fitted to."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.foresight_cases import CASES, FITTED, HELD_OUT
from benchmarks.foresight_fit import by_group, read_rows, report
from manyhands.planner.time.rates import load_fitted

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_shape_is_either_fitted_to_or_held_out() -> None:
    shapes = {case.shape for case in CASES}
    assert not set(FITTED) & set(HELD_OUT)
    assert shapes <= set(FITTED) | set(HELD_OUT)
    assert len(shapes & set(HELD_OUT)) >= len(shapes) / 2


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
