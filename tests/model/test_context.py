"""Packs that ranks divide: attention of every kind, against the same pack on one rank, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.data.batch.divide import chunks_of, divide_pack
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
]
IN_FLOAT32 = ("gemma2", "gpt_oss")  # norms and routers of any model, whose gradients are sums over tokens


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
    with pytest.raises(ValueError, match="4 chunks"):
        chunks_of(18, 0, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("family", "implementation", "rope"), KINDS)
def test_ranks_together_have_the_loss_and_gradients_of_one(
    family: str, implementation: str, rope: str, degree: int, world: Ranks
) -> None:
    arguments = (family, implementation, rope, "")
    for found in world.run("tests.model.context_ranks:deviations", *arguments, world_size=degree):
        assert max(found) < (1e-6 if family in IN_FLOAT32 else 1e-9), found


@pytest.mark.distributed
@pytest.mark.parametrize("fault", ["positions", "gradients"])
def test_a_planted_fault_shows(fault: str, world: Ranks) -> None:
    found = world.run("tests.model.context_ranks:deviations", "llama", BLOCKWISE, "", fault, world_size=2)
    assert found[0][1] > 1e-2, found
