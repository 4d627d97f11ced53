"""Measured runs of ``benchmarks.foresight`` estimated anew: memory and seconds stay as near as the page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.foresight_cases import CASES
from benchmarks.foresight_fit import Measured, fit, read_rows, report
from manyhands.plan.rates import load_fitted

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = read_rows(sorted(RESULTS.glob("*foresight-*.jsonl")))
MEMORY_UNDER, MEMORY_OVER, SECONDS = 0.03, 0.06, 0.08  # of any row: one that is off by more is a term that is missing


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row["case"])
def test_no_row_is_far_off(row: Measured) -> None:
    assert -MEMORY_UNDER <= row.planned_gib / row.held_gib - 1 <= MEMORY_OVER
    planned, taken = row.compare_seconds(load_fitted())
    assert abs(planned / taken - 1) <= SECONDS


def test_a_fit_finds_the_constants_that_rows_were_made_with() -> None:
    """Of rows whose seconds are exactly those of other constants, the errors vanish."""
    present = load_fitted()
    slower = type(present)(**vars(present) | {"matmul_share": 0.8 * present.matmul_share})
    made = [
        Measured(row.row | {"step_s": sum(row.seconds(slower).values())}, row.estimate, row.time, row.kind)
        for row in ROWS
    ]
    found = fit(made, present)
    errors = np.array([planned / taken - 1 for planned, taken in (row.compare_seconds(found) for row in made)])
    assert np.abs(errors).max() < 0.02 and found.matmul_share < 0.9 * present.matmul_share


def test_the_page_has_every_row_and_says_what_is_missing() -> None:
    page = report(ROWS, load_fitted())
    assert all(row.row["case"].replace(",", ", ") in page for row in ROWS)
    measured = {row.row["case"] for row in ROWS}
    assert f"{len(ROWS)} configurations" in page
    assert ("Not measured yet" in page) == any(case.name not in measured for case in CASES)
