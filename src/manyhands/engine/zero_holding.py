"""How DeepSpeed holds parameters: flat pieces that begin and end anywhere, in a row or between two.

Of a parameter that is trained a rank's piece is that of its float32 master; the weights that compute are copies of the
masters, refreshed by every update. Stage 3 cuts frozen parameters alike. Stages 1 and 2 leave those whole: they are
plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from manyhands.core.holding import register
from manyhands.engine.deepspeed_compat import fragment, is_master_sharded, is_sharded_weight


class ZeroFragments:
    """Implements ``core.holding.Holding``. Whatever needs parts by rows is refused by the plan."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return is_sharded_weight(tensor) or is_master_sharded(tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.ds_shape if is_sharded_weight(tensor) else tensor.shape)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return fragment(tensor)[0]

    def slices(self, tensor: torch.Tensor) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")

    def part_of(self, tensor: torch.Tensor, full: Any) -> torch.Tensor:
        """Reads the rows that the piece touches."""
        piece, start = fragment(tensor)
        shape = self.shape(tensor)
        if piece.numel() == 0:
            return torch.empty(0)
        if not shape:
            return full.reshape(1)
        width = math.prod(shape[1:])
        first, last = start // width, -(-(start + piece.numel()) // width)
        rows = full[(slice(first, last), *(slice(0, size) for size in shape[1:]))]
        return rows.reshape(-1)[start - first * width :][: piece.numel()]

    def num_shards(self, tensor: torch.Tensor) -> int:
        return dist.get_world_size()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather_fragments(tensor, self.shape(tensor))

    def shard_like(self, part: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")

    def sum_over_shards(self, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")


def gather_fragments(
    tensor: Any, shape: Sequence[int], state: str | None = None, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """A parameter's master, or its state in ``optimizer``, in full on every rank, where weights compute. Collective."""
    piece, start = fragment(tensor, state, optimizer)
    full = torch.zeros(math.prod(shape), dtype=piece.dtype, device=tensor.device)
    full[start : start + piece.numel()] = piece.to(tensor.device)
    dist.all_reduce(full)  # every element is one rank's alone
    return full.view(tuple(shape))


_fragments = ZeroFragments()
_registered: list[ZeroFragments] = []


def register_fragments() -> None:
    """From now on ``core.holding`` knows them."""
    if not _registered:
        register(_fragments)
        _registered.append(_fragments)
