"""Sharded gradients lie where activations have been, if they stay until the step; no number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.test_layouts import documents
from tests.support.ranks import Ranks, ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

ONE, SEVERAL = [documents(1, [5, 20, 3], 0.7)], [documents(seed, [9, 9], 0.5) for seed in range(3)]
CAST = {"compute_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models"), "llama", with_tokenizer=False))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("keys", "of_several"),
    [
        ({"strategy": "fsdp"}, [True, False, False]),  # the second and third are added to the first
        ({"strategy": "fsdp"} | CAST, [True, False, False]),
        ({"strategy": "fsdp", "reduce_every": False}, [True, True, True]),  # only the last is reduced
        ({"strategy": "ddp"} | CAST, [False, False, False]),  # the last becomes the gradient, the others are read
    ],
    ids=["fsdp", "fsdp, cast", "fsdp, reduced once", "ddp, cast"],
)
def test_only_what_stays_until_the_step_shares_memory_with_activations(
    world: Ranks, folder: str, keys: dict[str, Any], of_several: list[bool]
) -> None:
    plan, config = tiny_plan(folder, world_size=2, **keys), tiny_run(folder, "full")
    every = world.run("tests.engine.gradient_memory_ranks:record", plan, config, [ONE, SEVERAL, ONE], world_size=2)
    assert every == [[[True], of_several, [True]]] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fsdp", "offload": "all", "reshard_after_forward": True},
        {"strategy": "fsdp", "compute_dtype": "bfloat16", "master_dtype": "bfloat16"},
    ],
    ids=["in host memory", "cast"],
)
def test_what_is_moved_or_cast_stays_with_fsdp(world: Ranks, folder: str, keys: dict[str, Any]) -> None:
    plan, config = tiny_plan(folder, world_size=2, **keys), tiny_run(folder, "full")
    assert world.run("tests.engine.gradient_memory_ranks:record", plan, config, [ONE], world_size=2) == [None] * 2


@pytest.mark.distributed
def test_a_self_test_before_the_first_step_does_not_count_as_its_micro_batch(world: Ranks, folder: str) -> None:
    """Else the first step's gradients took memory of their own, which the allocator keeps to the end."""
    plan, config = tiny_plan(folder, world_size=2, strategy="fsdp", converters=("fp8",)), tiny_run(folder, "full")
    every = world.run("tests.engine.gradient_memory_ranks:record_after_check", plan, config, ONE[0], world_size=2)
    assert every == [[True]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_on_a_gpu_gradients_take_no_memory_beside_activations(micro_batches: int) -> None:
    width = 4096
    found, plain = (measure(width, micro_batches, with_activations) for with_activations in (True, False))
    assert found["losses"] == plain["losses"] and found["losses"][-micro_batches] < found["losses"][0]
    assert all(np.array_equal(*weights) for weights in zip(found["weights"], plain["weights"], strict=True))
    assert found["used"] == pytest.approx(plain["used"], rel=0.05)
    gradients = 8 * 2 * width * width * 4
    saved = (plain["held"] - found["held"]) / gradients  # of a step's second micro-batch they are beside activations
    assert saved > (0.5 if micro_batches == 1 else -0.1)


def measure(width: int, micro_batches: int, with_activations: bool) -> dict[str, Any]:
    with ranks(1, device="cuda") as world:  # memory that is held is of a process
        return world.run(
            "tests.engine.gradient_memory_ranks:train_blocks",
            width,
            32768,
            micro_batches,
            with_activations,
            world_size=1,
        )[0]
