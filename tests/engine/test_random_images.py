"""Random batches with and without images, as ``python -m tests.random_images`` draws them by the thousand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.model.multimodal import Images
from tests.random_images import KINDS, draw_batch, run_kind, train
from tests.support.multimodal import write_tiny_multimodal
from tests.support.ranks import Ranks


def test_batches_have_ranks_and_micro_batches_without_images() -> None:
    """Within a few draws there is one for nobody, for one rank alone and for all; the same for the same number."""
    found = set()
    for number in range(40):
        batch, again = (draw_batch(KINDS[0], 0, number, 4) for _ in range(2))
        assert len(batch) % 4 == 0 and [[d.ids for d in m] for m in batch] == [[d.ids for d in m] for m in again]
        found.add(sum(any(d.num_images for micro in batch[rank::4] for d in micro) for rank in range(4)))
    assert found == {0, 1, 2, 3, 4}


def train_unjoined(*arguments: Any) -> Any:
    """Micro-batches without images leave tower and projector out of their graph."""
    inner = Images._zero_of_all_weights
    Images._zero_of_all_weights = lambda self, model, device: torch.zeros((), device=device)  # type: ignore[method-assign]
    try:
        return train(*arguments)
    finally:
        Images._zero_of_all_weights = inner  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_join_every_collective(world: Ranks, tmp_path: Path) -> None:
    """And where one does not, that is found."""
    chosen = {kind.name: kind for kind in KINDS}
    folders = {family: write_tiny_multimodal(tmp_path / family, family=family) for family in ("gemma3", "qwen3_vl")}
    for name in ("gemma3 everything fsdp", "qwen3_vl projector ddp"):
        kind = chosen[name]
        assert run_kind(world, kind, folders[kind.family], seed=1, batches=10, world_size=4) == ""
    spoiled = f"{__name__}:train_unjoined"
    failed = run_kind(world, kind, folders[kind.family], seed=1, batches=10, world_size=4, target=spoiled)
    assert failed.startswith("qwen3_vl projector ddp, batch ") and "rank " in failed
