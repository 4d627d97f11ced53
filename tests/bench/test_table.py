"""The speed table: what counts as measured, ratios within one run, and the check against stored rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.bench import __main__ as bench
from manyhands.bench.rows import BY_NAME, TABLE, mix_lengths
from manyhands.bench.shapes import SHAPES, flops_per_token

ROW = BY_NAME["8b-lora"]


def result(label: str, rate: int, run: str = "a", gpus: int = 1, **more: Any) -> dict[str, Any]:
    ours = {"planned_gib": 1.0} if label == "manyhands" else {}
    return {"row": ROW.name, "label": label, "gpus": gpus, "tokens_per_s_gpu": rate, "run": run, **ours, **more}


def test_a_ratio_needs_both_sides_in_one_run() -> None:
    assert bench.ratio([result("manyhands", 300), result("trl", 200)], ROW) == pytest.approx(1.5)
    assert bench.ratio([result("manyhands", 300, "a"), result("trl", 200, "b")], ROW) is None
    assert bench.ratio([result("manyhands", 300, gpus=2), result("trl", 200, gpus=1)], ROW) is None


def test_the_better_of_the_peers_ways_counts() -> None:
    stored = [result("manyhands", 300), result("trl", 100), result("trl-packing", 200)]
    assert bench.ratio(stored, ROW) == pytest.approx(1.5)


def test_rows_of_another_shape_count_for_nothing() -> None:
    tried = [result("manyhands", 300, shape="tiny"), result("trl", 200)]
    assert bench.newest(tried, ROW, "manyhands") is None and not bench.is_measured(tried, ROW, "manyhands", 1)
    assert bench.newest([result("manyhands", 300, shape=ROW.shape)], ROW, "manyhands") is not None


def test_failed_rows_are_measured_again() -> None:
    assert bench.is_measured([result("trl", 1)], ROW, "trl", 1)
    assert not bench.is_measured([result("trl", 1, failure="out of memory")], ROW, "trl", 1)
    assert not bench.is_measured([result("trl", 1)], ROW, "manyhands", 1)
    assert not bench.is_measured([result("trl", 1)], ROW, "trl", 2)


def test_the_check_fails_where_a_ratio_fell(capsys: pytest.CaptureFixture[str]) -> None:
    before = [result("manyhands", 300), result("trl", 200)]
    slower_machine = [result("manyhands", 150), result("trl", 100)]
    slower_code = [result("manyhands", 270), result("trl", 200)]
    assert bench.check(slower_machine, before, [ROW]) == 0
    assert bench.check(slower_code, before, [ROW]) == 1
    assert "8b-lora: 1.35 of the peer, was 1.50" in capsys.readouterr().out


def test_the_check_fails_where_nothing_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    before = [result("manyhands", 300), result("trl", 200)]
    assert bench.check([result("manyhands", 300)], before, [ROW]) == 1
    assert bench.check([result("manyhands", 300, gpus=2), result("trl", 200, gpus=2)], before, [ROW]) == 1
    assert "0 ratios compared" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["h200-beside-trl.jsonl", "h200-x4-beside-trl.jsonl"])
def test_the_check_compares_what_is_stored(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows measured by hand, under labels of their own, count as ours too: else a check would pass for want of rows."""
    stored = bench.read(Path(__file__).resolve().parents[2] / "bench" / "results" / file)
    slower = [r | {"tokens_per_s_gpu": 0.9 * r["tokens_per_s_gpu"]} if "planned_gib" in r else r for r in stored]
    assert bench.check(stored, stored, list(TABLE)) == 0
    assert bench.check(slower, stored, list(TABLE)) == 1
    assert "0 ratios" not in capsys.readouterr().out


def test_rows_by_hand_or_in_little_memory_are_not_ours() -> None:
    assert bench.side_of(result("manyhands", 300)) == "manyhands"
    for key, value in {"by_hand": ["parallel.compile=false"], "lengths": "gsm8k.json", "limit_gib": 20.0}.items():
        assert bench.newest([result("manyhands", 300) | {"label": "other", key: value}], ROW, "manyhands") is None


def test_the_smallest_memory_is_the_least_in_which_the_row_ran() -> None:
    stored = [result("smallest", 9, limit_gib=gib, outcome=how) for gib, how in ((20.0, "ran"), (17.0, "out of memory"), (18.0, "ran"))]
    assert bench.show_smallest(stored, ROW) == "18.0" and bench.show_smallest([], ROW) == ""


def test_open_rows_are_listed_as_open(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_table([], list(TABLE))
    assert capsys.readouterr().out.count("| open |") == len(TABLE)


def test_a_ratio_below_the_floor_says_so() -> None:
    assert (bench.show_ratio(1.02), bench.show_ratio(1.3), bench.show_ratio(None)) == ("1.02, below 1.05", "1.30", "")


def test_results_survive_a_missing_file(tmp_path: Path) -> None:
    assert bench.read(tmp_path / "none.jsonl") == []
    (tmp_path / "rows.jsonl").write_text(json.dumps(result("trl", 1)) + "\n")
    assert bench.read(tmp_path / "rows.jsonl")[0]["label"] == "trl"


def test_operations_of_a_full_8b_model() -> None:
    """6 x 7.5e9 matmul weights, and 3 passes x 4 operations x 2,048 positions x 4,096 x 32 layers."""
    assert flops_per_token("llama8b", 4096, full=True) == pytest.approx(6 * 7.504e9 + 12 * 2048 * 4096 * 32, rel=1e-3)


def test_the_mix_is_long_tailed_and_the_same_every_time() -> None:
    lengths = sorted(mix_lengths(2000))
    assert lengths == sorted(mix_lengths(2000)) and (lengths[0], lengths[-1]) == (64, 4096)
    assert lengths[1000] < 500 < lengths[1800]
    assert {row.shape for row in TABLE} <= set(SHAPES)
