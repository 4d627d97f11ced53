"""Packs that ranks divide: attention of every kind, against the same pack on one rank, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.data.batch.divide import add_halos, chunks_of, divide_pack
from manyhands.model.attention import BLOCKWISE, VARLEN
from tests.support.ranks import Ranks

# family, implementation, rope type
KINDS = [
    ("starcoder2", BLOCKWISE, ""),  # a window in every layer
    ("starcoder2", VARLEN, ""),
    ("llama", VARLEN, "longrope"),
    ("llama", BLOCKWISE, "dynamic"),
    ("gemma2", BLOCKWISE, ""),  # a cap, and a window in every second layer
    ("gpt_oss", BLOCKWISE, ""),  # sinks, experts
    ("lfm2", BLOCKWISE, ""),  # short convolutions
]
IN_FLOAT32 = ("gemma2", "gpt_oss", "lfm2")  # norms and routers of any model, whose gradients are sums over tokens


def test_a_part_has_the_keys_of_the_documents_that_it_begins_in() -> None:
    """Two documents of 5 and 10 tokens, one of padding, on two ranks: chunks of 4."""
    ids = np.arange(16)[None]
    batch = {"input_ids": ids, "position_ids": ids, "cu_seq_lens": np.array([0, 5, 15, 16]), "max_length": 10}
    first, second = (divide_pack(batch, rank, 2) for rank in range(2))
    assert first["input_ids"].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert first["cu_seq_lens"].tolist() == [0, 4, 7, 8] and first["cu_seq_lens_k"].tolist() == [0, 4, 14, 15]
    assert first["key_positions"].tolist() == [*range(4), *range(5, 16)]
    assert second["input_ids"].tolist() == [list(range(4, 12))]
    assert second["cu_seq_lens"].tolist() == [0, 1, 4, 8] and second["cu_seq_lens_k"].tolist() == [0, 5, 8, 15]
    assert second["key_positions"].tolist() == [*range(8), *range(5, 12)]
    heads = divide_pack(batch, 1, 2, exchanges_heads=True)
    assert heads["input_ids"].tolist() == second["input_ids"].tolist() and "key_positions" not in heads
    assert heads["cu_seq_lens"].tolist() == [0, 5, 15, 16] and heads["exchanges_heads"] == 2
    halos = add_halos([0, 5, 15, 80], 0, 2)  # chunks of 20 tokens; of the second one's tokens 56 to 59
    assert halos["halo_places"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert halos["halo_bounds"].tolist() == [0, 4, 9, 19, 24, 48]
    with pytest.raises(ValueError, match="4 chunks"):
        chunks_of(18, 0, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("family", "implementation", "rope"), KINDS)
def test_ranks_together_have_the_loss_and_gradients_of_one(
    family: str, implementation: str, rope: str, heads: bool, degree: int, world: Ranks
) -> None:
    arguments = (family, implementation, rope, heads, "")
    for found in world.run("tests.model.context_ranks:deviations", *arguments, world_size=degree):
        assert max(found) < (1e-6 if family in IN_FLOAT32 else 1e-9), found


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("heads", [False, True])
def test_what_torch_2_11_has_gives_the_same(heads: bool, world: Ranks) -> None:
    arguments = ("llama", VARLEN, "", heads, "", True)
    for found in world.run("tests.model.context_ranks:deviations", *arguments, world_size=2):
        assert max(found) < 1e-9, found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "heads", "fault"),
    [
        ("llama", False, "positions"),
        ("llama", False, "gradients"),
        ("llama", True, "positions"),
        ("llama", True, "order"),
        ("gpt_oss", True, "heads"),  # another rank's sinks
        ("lfm2", True, "halos"),
    ],
)
def test_a_planted_fault_shows(family: str, heads: bool, fault: str, world: Ranks) -> None:
    found = world.run("tests.model.context_ranks:deviations", family, BLOCKWISE, "", heads, fault, world_size=2)
    assert found[0][1] > 1e-2, found
