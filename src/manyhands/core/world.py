"""A rank's position in the run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class World:
    """A rank, its machine-local rank, the number of ranks, and the device of its model."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0
