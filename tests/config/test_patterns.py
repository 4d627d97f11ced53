"""Names by pattern: what each kind means, and what an expression from outside may cost."""

from __future__ import annotations

import time

import pytest

from manyhands.config import patterns
from manyhands.config.patterns import expand, matches, reaches
from manyhands.core.errors import UserError

NAME = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (NAME, True),
        ("q_proj", True),
        ("*_proj", True),
        ("proj", False),
        ("layers.*.q_proj", True),
        ("re:.*q_proj", True),
        ("re:q_proj", False),
        (r"re:model\.layers\.(1|10)\..*", True),
        (r"re:model(\.\w{1,100}){4}", True),
    ],
)
def test_a_name_an_end_a_glob_or_an_expression(pattern, fits):
    assert matches(NAME, pattern) is fits


def test_a_slice_stands_for_the_modules_of_each_list_that_it_names():
    names = [f"model.layers.{index}.mlp.weight" for index in range(12)] + ["vision.layers.3.weight", "norm.weight"]
    assert expand("model.layers[-2:].mlp", names) == ("model.layers.10.mlp", "model.layers.11.mlp")
    assert expand("layers[3:4]", names) == ("model.layers.3", "vision.layers.3")
    assert expand("layers[20:]", names) == () and expand("layers.[0-3]", names) == ("layers.[0-3]",)


def test_a_module_reaches_its_weights():
    assert reaches(f"{NAME}.weight", "re:.*self_attn") and not reaches(f"{NAME}.weight", "mlp")


@pytest.mark.parametrize("pattern", ["re:(?:(?:.|.)*(?:.|..)*)*(?<=m)", "re:(?:(?:a|.)*(?:.|..)*)*(?<=m)"])
def test_an_expression_without_end_is_stopped(pattern, monkeypatch):
    """Each of a hundred names would take longer than the universe is old; all together stay in the bound."""
    monkeypatch.setattr(patterns, "MAX_CPU_S", 0.5)
    patterns._compile.cache_clear()
    start = time.process_time()
    for index in range(100):
        with pytest.raises(UserError, match="takes too long") as refused:
            matches(f"{NAME}{index}" + "a" * 40, pattern)
    assert "nested repeats" in refused.value.fix and time.process_time() - start < 30
    patterns._compile.cache_clear()


def test_the_time_of_many_slow_names_adds_up(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(patterns, "COUNTED_FROM_S", 0.0)
    monkeypatch.setattr(time, "thread_time", iter(range(0, 1000, 1)).__next__)
    patterns._compile.cache_clear()
    with pytest.raises(UserError, match="takes too long"):
        for _ in range(3):
            matches(NAME, "re:.*q_proj")
    patterns._compile.cache_clear()


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(",
        "re:((a{1000}){1000}){1000}",
        "re:" + "a" * 20_000,
        "re:" + "(" * 5000 + ")" * 5000,
        "re:a{99999999999999999999}",
    ],
)
def test_an_expression_that_is_none_or_too_large_is_refused(pattern):
    with pytest.raises(UserError, match="is not a valid regular expression") as refused:
        matches(NAME, pattern)
    assert len(refused.value.what) < 300


def test_counts_without_numbers_are_a_pattern_or_an_error_but_no_traceback() -> None:
    for pattern in ("re:a{}", "re:a{,}"):
        try:
            matches("aa", pattern)
        except UserError as refused:
            assert "regular expression" in refused.what
