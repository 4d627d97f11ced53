"""The text of a multimodal model under mixed precision: what is left out is in no unit of FSDP2, and every layout
agrees.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.layouts import measure
from tests.support.multimodal import write_tiny_multimodal
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run

DOCUMENTS = [[(list(range(40, 40 + n)), [True] * n)] for n in (30, 18)]  # one a rank


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("activation_checkpointing", "family"),
    [("none", "gemma3"), ("full", "gemma3"), ("full", "qwen2_5_vl"), ("none", "llava_next"), ("full", "gemma4")],
)
def test_full_training_in_bfloat16_is_the_same_sharded_and_replicated(
    tmp_path: Path, world: Ranks, activation_checkpointing: str, family: str
) -> None:
    folder = str(write_tiny_multimodal(tmp_path, "bfloat16", family=family))
    found = []
    for strategy in ("ddp", "fsdp"):
        plan = tiny_plan(
            folder,
            strategy=strategy,
            world_size=2,
            compute_dtype="bfloat16",
            activation_checkpointing=activation_checkpointing,
        )
        found.append(world.run("tests.support.layouts:measure", plan, tiny_run(folder), [DOCUMENTS], world_size=2)[0])
    replicated, sharded = found
    assert sharded["loss"] == replicated["loss"] and sharded["norm"] == pytest.approx(replicated["norm"], rel=1e-6)
    assert sharded["gradients"].keys() == replicated["gradients"].keys()
    assert all(".language_model." in name or name.endswith("lm_head.weight") for name in sharded["gradients"])
    for name, gradient in replicated["gradients"].items():
        np.testing.assert_allclose(
            sharded["gradients"][name], gradient, rtol=0, atol=1e-6 * max(np.abs(gradient).max(), 1e-12)
        )


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_vl"])
def test_one_process_takes_the_same_step(tmp_path: Path, family: str) -> None:
    folder = str(write_tiny_multimodal(tmp_path, family=family))
    both = [[[document for part in DOCUMENTS for document in part]]]
    steps = [
        measure(tiny_plan(folder, activation_checkpointing=activation_checkpointing), tiny_run(folder), both)
        for activation_checkpointing in ("none", "full")
    ]
    assert steps[0]["loss"] == steps[1]["loss"] and steps[0]["norm"] == steps[1]["norm"] > 0
