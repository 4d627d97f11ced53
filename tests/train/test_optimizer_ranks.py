"""Every optimizer, sharded and whole: the same weights; resumed half-way: the same bits; 8-bit blocks only where they
fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.core.errors import UserError
from tests.support.ranks import Ranks
from tests.train import optimizer_ranks

pytestmark = pytest.mark.distributed

RATES = {"learning_rates": {"wide": 3e-2, "norm": 1e-3}, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {"name": name, **RATES} for name in ("adamw", "adamw_8bit", "paged_adamw", "adafactor", "muon")
}
RESHARDED = ("adamw", "paged_adamw", "adafactor", "muon")
TASK = "tests.train.optimizer_ranks:"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference, in units of the largest update there has been: about one peak learning rate."""
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items()) / optimizer_ranks.PEAK


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_and_copies_end_at_the_weights_of_one_process(name: str, world: Ranks) -> None:
    keys = OPTIMIZERS[name]
    alone = optimizer_ranks.run(keys, "single")
    start = optimizer_ranks.run(keys, "single", 0)
    assert all(not torch.equal(tensor, start[key]) for key, tensor in alone.items() if key != "block.frozen.weight")
    for kind, world_size in (("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("replicate", 2)):
        for found in world.run(f"{TASK}run", keys, kind, world_size=world_size):
            if name == "adamw_8bit":
                found, alone_now = (
                    {k: v for k, v in w.items() if "odd" not in k} for w in (found, alone)
                )  # its blocks differ
            else:
                alone_now = alone
            assert apart(found, alone_now) < 5e-5, (kind, world_size)  # one unit in the last place of a weight of 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_to_the_same_bits(name: str, world: Ranks, tmp_path: Path) -> None:
    keys = OPTIMIZERS[name]
    wanted = optimizer_ranks.save(keys, "single", tmp_path / "single")
    found = optimizer_ranks.resume(keys, "single", tmp_path / "single")
    assert isinstance(found, dict) and same(found, wanted)
    wanted = world.run(f"{TASK}save", keys, "fsdp", tmp_path / "two", world_size=2)[0]
    found = world.run(f"{TASK}resume", keys, "fsdp", tmp_path / "two", world_size=2)[0]
    assert same(found, wanted)


@pytest.mark.parametrize("name", RESHARDED)
def test_other_numbers_of_ranks_take_up_sharded_states(name: str, world: Ranks, tmp_path: Path) -> None:
    keys = OPTIMIZERS[name]
    wanted = world.run(f"{TASK}save", keys, "fsdp", tmp_path, world_size=4)[0]
    alone = optimizer_ranks.resume(keys, "single", tmp_path)
    assert isinstance(alone, dict)
    for found in (alone, world.run(f"{TASK}resume", keys, "fsdp", tmp_path, world_size=2)[0]):
        assert apart(found, wanted) < 5e-5 if name == "adafactor" else same(found, wanted)


def test_8bit_blocks_over_other_shards_are_refused(world: Ranks, tmp_path: Path) -> None:
    keys = OPTIMIZERS["adamw_8bit"]
    world.run(f"{TASK}save", keys, "fsdp", tmp_path, world_size=4)
    refused = optimizer_ranks.resume(keys, "single", tmp_path)
    assert isinstance(refused, UserError) and "as 4 ranks had them" in refused.why
    assert list(refused.details) == [
        "exp_avg_scale.block.odd.weight",
        "exp_avg_sq_scale.block.odd.weight",
    ]  # the others would fit
    for other in world.run(f"{TASK}resume", keys, "fsdp", tmp_path, world_size=2):
        assert isinstance(other, UserError)
