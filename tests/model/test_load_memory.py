"""Loading onto shards holds no more than the shards, and little beside: over all ranks, and on any one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.model import read_model_facts
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model

NUM_RANKS = 4
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 64,
}
MAX_OF_ALL, MAX_OF_ONE = 1.25, 1.5  # of the float32 bytes; of one rank's share


def within(peaks: list[int], float32_bytes: int) -> bool:
    return sum(peaks) <= MAX_OF_ALL * float32_bytes and max(peaks) <= MAX_OF_ONE * float32_bytes / NUM_RANKS


@pytest.mark.slow
@pytest.mark.distributed
def test_no_rank_holds_more_than_its_share_while_loading(tmp_path: Path, world: Ranks) -> None:
    """A bfloat16 file into float32 masters under FSDP2. The naive way must fail the same bounds, or they say
    nothing.
    """
    folder = write_tiny_model(tmp_path / "large", "llama", "bfloat16", with_tokenizer=False, vocab_size=16384, **SHAPE)
    small = write_tiny_model(tmp_path / "small", "llama", "bfloat16", with_tokenizer=False)
    float32_bytes = 4 * read_model_facts(folder, "large", "pretrained").num_parameters
    assert float32_bytes > 140e6
    ours, naive = (
        world.run("tests.model.load_memory_ranks:measure", str(folder), str(small), way, world_size=NUM_RANKS)
        for way in (False, True)
    )
    shares = [[round(peak / float32_bytes, 3) for peak in peaks] for peaks in (ours, naive)]
    assert within(ours, float32_bytes), shares
    assert not within(naive, float32_bytes), shares
    print(f"{float32_bytes / 2**20:.0f} MiB in float32; shares of it: ours {shares[0]}, naive {shares[1]}")
