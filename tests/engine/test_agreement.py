"""What one rank alone finds wrong before the first step ends every rank with that rank's message, within seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.ci]
ON_RANK_1 = "only on rank 1 of 2"


@pytest.mark.parametrize(
    ("check", "faulty", "value", "message"),
    [
        ("loss", 0, 1e3, "does not follow from its own logits"),
        ("loss", 1, float("nan"), "its logits are nan or inf"),
        ("packing", 0, 1.0, "packed documents see each other"),
        ("padding", 0, 1.0, "is not what the model's own code computes"),
        ("batches", 3, 1.0, "depend on what was in earlier batches"),
    ],
)
def test_a_check_that_fails_on_one_rank(world: Ranks, check: str, faulty: int, value: float, message: str) -> None:
    for text, seconds in world.run("tests.engine.agreement_ranks:check", check, faulty, value, world_size=2):
        assert message in text and ON_RANK_1 in text and seconds < 20, text
    if check == "batches":  # and nothing where all is well
        assert [text for text, _ in world.run("tests.engine.agreement_ranks:check", check, -1, 0.0, world_size=2)] == [
            "",
            "",
        ]


def test_a_kernel_that_fails_its_self_test_on_one_rank(world: Ranks, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", with_tokenizer=False)
    sharded: dict[str, Any] = {"strategy": "fsdp", "world_size": 2}
    plan = tiny_plan(folder, converters=("attention_kernels",), **sharded)
    for text, seconds in world.run(
        "tests.engine.agreement_ranks:build_with_failing_kernel", plan, tiny_run(folder), world_size=2
    ):
        assert "the attention kernel fails its self-test" in text and ON_RANK_1 in text and seconds < 20, text
