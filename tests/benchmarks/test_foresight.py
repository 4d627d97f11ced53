"""The configurations that the plan is judged by: many kinds, and half of their shapes never fitted to."""

from __future__ import annotations

from collections import Counter

from benchmarks.foresight_cases import CASES, FITTED, HELD_OUT, TRIALS
from manyhands.bench.shapes import SHAPES


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
