"""torch's planners, which also report progress at each tensor, by the methods that torch offers for extension."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from manyhands.core.progress import advance


class SavePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        advance()
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        advance()
