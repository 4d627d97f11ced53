"""Every optimizer, sharded and whole: the same weights; resumed half-way: the same bits, and in 8 bits the same but for
blocks that lie otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.training import optimizer_ranks

pytestmark = pytest.mark.distributed

RATES = {"learning_rates": {"wide": 3e-2, "norm": 1e-3}, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {"name": name, **RATES} for name in ("adamw", "adamw_8bit", "paged_adamw", "adafactor", "muon")
}
RESHARDED = ("adamw", "paged_adamw", "adafactor", "muon")
TASK = "tests.training.optimizer_ranks:"


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
    for kind, world_size in (("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("replicate", 2), ("experts", 4)):
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


PASSED_ON = [  # layout, ranks, and whether its shards cut other blocks than those of the one before
    ("fsdp", 2, False),
    ("single", 1, True),
    ("fsdp", 4, True),
    ("replicate", 2, True),
    ("hsdp", 4, True),
    ("fsdp", 2, False),
    ("experts", 2, False),
    ("experts", 4, False),
    ("single", 1, True),
]


def test_8bit_moments_pass_through_every_layout_within_the_quantizers_error(world: Ranks, tmp_path: Path) -> None:
    """One weight has blocks that lie otherwise in shards of 4 ranks, of 2 ranks and of one; the others are as saved,
    bit for bit, and so is everything where two layouts cut alike.
    """
    keys = OPTIMIZERS["adamw_8bit"]
    saved, source = None, tmp_path / "0"
    world.run(f"{TASK}save", keys, "fsdp", source, world_size=2)
    for number, (kind, size, cuts_otherwise) in enumerate(PASSED_ON, start=1):
        target = tmp_path / str(number)
        if kind == "single":
            moments, said = optimizer_ranks.pass_on(keys, kind, source, target)
        else:
            moments, said = world.run(f"{TASK}pass_on", keys, kind, source, target, world_size=size)[0]
        assert [text.rpartition(": ")[2] for text in said] == ["block.odd.weight"] * cuts_otherwise, (kind, said)
        for name, (values, largest) in moments.items():
            if saved is not None and "odd" in name and cuts_otherwise:
                bound = 0.0036 if "exp_avg_sq" in name else 0.0071
                assert ((values - saved[name][0]).abs() <= bound * largest).all(), (kind, name)
            else:
                assert saved is None or torch.equal(values, saved[name][0]), (kind, name)
        saved, source = moments, target


def test_a_run_goes_on_over_other_8bit_blocks(world: Ranks, tmp_path: Path) -> None:
    keys = OPTIMIZERS["adamw_8bit"]
    wanted = world.run(f"{TASK}save", keys, "fsdp", tmp_path, world_size=4)[0]
    said: list[str] = []
    found = [optimizer_ranks.resume(keys, "single", tmp_path, said)]
    assert said == [
        "note: quantized optimizer states of 1 weight were quantized again, as the shards of the 4 ranks that saved"
        " them cut other blocks: block.odd.weight"
    ]
    found += world.run(f"{TASK}resume", keys, "fsdp", tmp_path, world_size=2)
    odd = "block.odd.weight"
    from_the_start = apart({odd: optimizer_ranks.run(keys, "single")[odd]}, wanted)  # with its own blocks all along
    for each in found:
        assert isinstance(each, dict)
        assert 0 < apart({odd: each[odd]}, wanted) < 1.5 * from_the_start
        assert same({**each, odd: wanted[odd]}, wanted)
