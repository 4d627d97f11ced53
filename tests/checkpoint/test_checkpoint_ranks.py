"""Checkpoints between numbers of ranks and strategies, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.shards import ShardReader
from tests.checkpoint import checkpoint_ranks
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A checkpoint of each case, saved by 4 ranks, and the tensors it must hold."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, world.run("tests.checkpoint.checkpoint_ranks:save", folder, world_size=4)[0]


def test_world_and_then_one_process_load_what_four_saved(world: Ranks, saved: tuple[Path, dict]) -> None:
    folder, wanted = saved
    for results in world.run("tests.checkpoint.checkpoint_ranks:load", folder, wanted, world_size=2):
        assert results == dict.fromkeys(("fsdp32", "fsdp64", "fsdp16", "ddp", "fsdp into ddp"), True)
    alone = checkpoint_ranks.load_alone(folder, wanted)  # no process group; saved by 4 and by 2
    assert len(alone) == 8
    assert all(alone.values())


@pytest.mark.parametrize("case", ["fsdp32", "fsdp16", "ddp"])
def test_any_flat_range_is_read_across_files(saved: tuple[Path, dict], case: str) -> None:
    """As layouts need it whose pieces begin and end within rows: 4 ranks have cut 10 rows of 5."""
    folder, wanted = saved
    reader = ShardReader(folder / case / "step-000002")
    for name, full in wanted[case].items():
        parameter, _, key = name.partition("/")
        stored = f"optim.{key}.{parameter}" if key else f"model.{parameter}"
        flat = full.reshape(-1)
        for first, end in ((0, len(flat)), (len(flat) // 3, len(flat) - len(flat) // 4), (len(flat), len(flat))):
            assert torch.equal(reader.read(stored, first, end - first), flat[first:end]), (name, first, end)
    with pytest.raises(ValueError, match="not all of"):
        reader.read(stored, 1, len(flat))
    with pytest.raises(KeyError):
        reader.read("model.nowhere", 0, 1)


def test_one_rank_that_cannot_write_fails_the_save_on_all(world: Ranks, tmp_path: Path) -> None:
    for text in world.run("tests.checkpoint.checkpoint_ranks:save_on_a_full_disk", tmp_path, world_size=4):
        assert text == "the disk is full; No space left on device; 0 checkpoints"


def test_a_flipped_bit_is_named_on_every_rank(world: Ranks, saved: tuple[Path, dict]) -> None:
    for text in world.run("tests.checkpoint.checkpoint_ranks:load_damaged", saved[0], world_size=4):
        assert text == "checkpoint file shard-00003-model-00001-of-00001.safetensors is damaged"
