"""The comparison with libraries runs, on a CPU and tiny, as far as what is installed allows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import libraries

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["ours", "scaled_mm", "bfloat16"])
def test_a_block_in_fp8_is_near_to_bfloat16(kind: str) -> None:
    rows = list(libraries.fp8_cases(kind, CPU, tiny=True, compiled=False))
    assert [row["case"] for row in rows] == [f"{kind}, lora", f"{kind}, full"]
    for row in rows:
        assert "failed" not in row, row
        least, most = (0.0, 0.0) if kind == "bfloat16" else (0.005, 0.1)
        assert least <= row["output_gap"] <= most and least <= row["gradient_gap"] <= most, row


def test_a_missing_library_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torchao'")

    monkeypatch.setattr(libraries, "convert", missing)
    rows = list(libraries.fp8_cases("torchao", CPU, tiny=True, compiled=False))
    assert [row["failed"] for row in rows] == ["ModuleNotFoundError: No module named 'torchao'"] * 2


def test_shards_and_resumed_states_are_told_apart() -> None:
    plain = "torch fused, float32"
    assert libraries.resumes_equal(plain, CPU) and libraries.shards_equal(plain, CPU, 3)
    weights = libraries.draw_weights([(8, 4), (4,)], CPU)
    libraries.set_gradients(weights, 1)
    optimizer = libraries.make_optimizer(plain, weights)
    optimizer.step()
    assert libraries.held_bytes(optimizer) == 2 * 4 * (32 + 4) + 2 * 4  # two moments and a step for each weight
