"""Blocks of moments in 8 bits: where they lie, in which shape their scales are kept, and how moments move from one
division into blocks to another.

A rank quantizes its own part, so blocks begin at its first value. Where two layouts cut alike nothing changes.
Elsewhere a moment is dequantized by the blocks it was saved in and quantized again by those of this layout: an error of
at most half the widest step between two levels, times the new block's largest value (0.71 % of it for the first moment,
0.36 % for the second).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyhands.core.holding import local, num_shards, shard_like
from manyhands.core.limits import BLOCK_VALUES_8BIT as BLOCK

CHUNK_VALUES = 2**14 * BLOCK  # requantized at once


@dataclass(frozen=True)
class Blocks:
    """Of a flat tensor of ``num_values``: every ``cut`` values a new block begins, and between these every 256."""

    num_values: int
    cut: int

    @property
    def per_cut(self) -> int:
        return math.ceil(self.cut / BLOCK)

    def index_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The block of each position, counted as the scales are kept."""
        return positions // self.cut * self.per_cut + positions % self.cut // BLOCK

    def spans_of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the block of each position begins and ends."""
        start = positions // self.cut * self.cut
        begin = start + (positions - start) // BLOCK * BLOCK
        return begin, torch.minimum(begin + BLOCK, start + self.cut).clamp(max=self.num_values)


def create_scales(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for the scales of a moment's blocks, in a shape that is equal in two layouts only if their blocks are.

    ===================================  ==============================  ======================================
    columns are full blocks              (rows, columns / 256)           cut as the parameter, in any layout
    shards are equal and full blocks     (blocks)                        the same in every such layout
    otherwise                            (shards, blocks of the first)   of this number of shards alone
    ===================================  ==============================  ======================================
    """
    part, rows, shards = local(parameter), parameter.shape[0], num_shards(parameter)
    columns = parameter.numel() // rows
    if columns % BLOCK == 0:
        return shard_like(_zeros(part, part.shape[0], columns // BLOCK), parameter, (rows, columns // BLOCK))
    if shards == 1 or (rows % shards == 0 and part.numel() % BLOCK == 0):
        num_blocks = math.ceil(parameter.numel() / BLOCK)
        return shard_like(_zeros(part, num_blocks // shards), parameter, (num_blocks,))
    num_blocks = math.ceil(math.ceil(rows / shards) * columns / BLOCK)
    return shard_like(_zeros(part, 1, num_blocks), parameter, (shards, num_blocks))


def blocks_in(parameter: torch.Tensor, shape: Sequence[int]) -> Blocks | None:
    """The blocks whose scales have this shape; None if it is none of ``create_scales``."""
    num_values, rows = parameter.numel(), parameter.shape[0]
    columns = num_values // rows
    whole = Blocks(num_values, math.ceil(num_values / BLOCK) * BLOCK)
    if columns % BLOCK == 0:
        return whole if tuple(shape) == (rows, columns // BLOCK) else None
    if tuple(shape) == (whole.per_cut,):
        return whole
    if len(shape) != 2 or not shape[0]:
        return None
    cut = Blocks(num_values, math.ceil(rows / shape[0]) * columns)
    return cut if cut.per_cut == shape[1] else None


def requantize(
    codes: torch.Tensor,
    first: int,
    scales: torch.Tensor,
    saved: Blocks,
    saved_scales: torch.Tensor,
    levels: torch.Tensor,
) -> None:
    """Moves a moment, in place, into the blocks of this rank's part, which begin at its first value.

    ``codes`` (n): this rank's, as saved; ``first``: where they begin in the full tensor; ``scales``: of this rank's
    blocks, to be written; ``saved_scales``: of the full tensor in the blocks ``saved``; ``levels`` (256), ascending.
    A block that lies where a saved one did keeps its codes and its scale. A second moment that is not zero stays so,
    as it is divided by.
    """
    middle = (levels[:-1] + levels[1:]) / 2
    smallest = int((levels == 0).nonzero()[0]) + 1 if levels[0] == 0 else 0
    for begin in range(0, len(codes), CHUNK_VALUES):
        old = codes[begin : begin + CHUNK_VALUES]
        places = torch.arange(first + begin, first + begin + len(old), device=codes.device)
        values = levels[old.long()] * saved_scales[saved.index_of(places)]
        by_block = torch.nn.functional.pad(values, (0, -len(old) % BLOCK)).view(-1, BLOCK)
        largest = by_block.abs().amax(1)
        relative = by_block / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        new = torch.bucketize(relative, middle)
        if smallest:
            new = torch.where(by_block > 0, new.clamp(min=smallest), new)
        starts, ends = places[::BLOCK], (places[::BLOCK] + BLOCK).clamp(max=first + begin + len(old))
        saved_starts, saved_ends = saved.spans_of(starts)
        keeps = (starts == saved_starts) & (ends == saved_ends)
        kept = keeps[:, None].expand_as(new).reshape(-1)[: len(old)]
        old.copy_(torch.where(kept, old, new.to(torch.uint8).reshape(-1)[: len(old)]))
        scales[begin // BLOCK :][: len(starts)] = torch.where(keeps, saved_scales[saved.index_of(starts)], largest)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)
