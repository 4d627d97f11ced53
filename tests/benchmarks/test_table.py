"""The speed table: what counts as measured and as ours, ratios to the best peer of one run, and the check against
stored rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from manyhands.bench.rows import BY_NAME, TABLE, mix_lengths, read
from manyhands.bench.shapes import SHAPES, flops_per_token

ROW = BY_NAME["8b-lora"]
STORED = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def result(label: str, rate: int, run: str | None = "a", gpus: int = 1, **more: Any) -> dict[str, Any]:
    ours = {"planned_gib": 1.0} if label == "manyhands" else {}
    return {"row": ROW.name, "label": label, "gpus": gpus, "tokens_per_s_gpu": rate, "run": run, **ours, **more}


def test_a_ratio_needs_both_sides_in_one_run() -> None:
    assert table.ratio([result("manyhands", 300), result("trl", 200)], ROW) == pytest.approx(1.5)
    assert table.ratio([result("manyhands", 300, "a"), result("trl", 200, "b")], ROW) is None
    assert table.ratio([result("manyhands", 300, gpus=2), result("trl", 200, gpus=1)], ROW) is None


def test_the_best_peer_of_the_run_counts() -> None:
    stored = [result("manyhands", 300), result("trl", 100), result("trl-packing", 200)]
    assert table.ratio(stored, ROW) == pytest.approx(1.5)
    stored.append(result("unsloth", 250))
    assert table.ratio(stored, ROW) == pytest.approx(1.2)
    stored.append(result("unsloth", 290, "b"))  # a faster one, in another run
    assert table.ratio(stored, ROW) == pytest.approx(1.2)
    best = table.best_peer(stored, ROW)
    assert best is not None and best["label"] == "unsloth"


def test_failed_rows_are_measured_again_and_the_others_of_the_row_with_them() -> None:
    both = ["manyhands", "trl"]
    assert table.is_measured([result("manyhands", 2), result("trl", 1)], ROW, both, 1)
    assert not table.is_measured([result("manyhands", 2), result("trl", 1, failure="out of memory")], ROW, both, 1)
    assert not table.is_measured([result("manyhands", 2), result("trl", 1, "b")], ROW, both, 1)
    assert not table.is_measured([result("manyhands", 2), result("trl", 1)], ROW, [*both, "unsloth"], 1)
    assert not table.is_measured([result("manyhands", 2), result("trl", 1)], ROW, both, 2)


def test_the_check_fails_where_a_ratio_fell(capsys: pytest.CaptureFixture[str]) -> None:
    before = [result("manyhands", 300), result("trl", 200)]
    slower_machine = [result("manyhands", 150), result("trl", 100)]
    slower_code = [result("manyhands", 270), result("trl", 200)]
    assert table.check(slower_machine, before, [ROW]) == 0
    assert table.check(slower_code, before, [ROW]) == 1
    assert "8b-lora: 1.35 of trl, was 1.50" in capsys.readouterr().out


def test_rows_by_hand_or_in_little_memory_are_not_ours() -> None:
    assert (
        table.side_of(result("manyhands", 300))
        == table.side_of(result("manyhands", 300) | {"label": "x"})
        == "manyhands"
    )
    for key, value in {
        "by_hand": ["parallel.compile=false"],
        "lengths": "gsm8k.json",
        "limit_gib": 20.0,
        "layers": 8,
    }.items():
        for label in ("manyhands", "other"):
            assert table.newest([result("manyhands", 300) | {"label": label, key: value}], ROW, "manyhands") is None


def test_no_stored_row_with_keys_by_hand_counts_as_ours() -> None:
    stored = [r for file in STORED for r in read(file) if "row" in r]
    by_hand = [r for r in stored if r.get("by_hand")]
    assert len(stored) > 50 and by_hand  # some of them with the label of ours
    assert not [r for r in by_hand if table.side_of(r) == "manyhands"]


def test_operations_of_a_full_8b_model() -> None:
    """6 x 7.5e9 matmul weights, and 3 passes x 4 operations x 2,048 positions x 4,096 x 32 layers."""
    assert flops_per_token("llama8b", 4096, full=True) == pytest.approx(6 * 7.504e9 + 12 * 2048 * 4096 * 32, rel=1e-3)


def test_the_mix_is_long_tailed_and_the_same_every_time() -> None:
    lengths = sorted(mix_lengths(2000))
    assert lengths == sorted(mix_lengths(2000)) and (lengths[0], lengths[-1]) == (64, 4096)
    assert lengths[1000] < 500 < lengths[1800]
    assert {row.shape for row in TABLE} <= set(SHAPES)
