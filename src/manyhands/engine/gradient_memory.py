"""Sharded gradients in the memory that activations have given back.

FSDP2 allocates what a reduction gives in the stream that reduces, and torch's allocator has a pool for each stream.
Gradients are freed after every step, yet no forward pass could use their memory: 3 to 15 GiB a GPU in six full runs on
two H200s (``docs/results.md``). Here they come from the pool of the stream that computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class GradientMemory(DefaultReduceScatter):
    """FSDP2's own reduce-scatter, and where its results are allocated. One for all units of a model."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # whose pool results come from; None: the present one's

    def prepare(self, device: torch.device, *, become_gradients: bool) -> None:
        """Before a backward pass, in the stream that computes it. ``become_gradients``: whether its results stay until
        the step. Those that are only added to others are freed while they are still read, which needs the pool of the
        stream that reads them.
        """
        self.stream = torch.cuda.current_stream(device) if become_gradients and device.type == "cuda" else None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks twice: for what is reduced, in the stream that computes, and for the result, in its own."""
        stream = self.stream
        if stream is None or stream == (present := torch.cuda.current_stream(device)):
            return super().allocate(size, dtype=dtype, device=device)
        with torch.cuda.stream(stream):
            result = super().allocate(size, dtype=dtype, device=device)
        present.wait_stream(stream)  # which may still use what this memory held before
        result.record_stream(present)
        return result
