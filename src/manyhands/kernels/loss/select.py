"""Which kernels compute the softmax of the fused loss: Triton where it passes its comparison on this device."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from manyhands.kernels.backend import Backend, beyond_bound, triton_or
from manyhands.kernels.loss.reference import softmax_part, softmax_rows


@cache
def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Triton where it can be imported and agrees with the reference on ``device``; else torch, with the reason."""
    if device.type == "cuda" and dtype == torch.float64:
        return Backend("eager", "float64 is computed by torch")
    return triton_or(
        "eager", device, "loss.triton", lambda kernels: beyond_bound(kernels.compare(device, dtype, softmax_rows))
    )


@lru_cache
def compiled_softmax() -> Any:
    return torch.compile(softmax_part, dynamic=True, fullgraph=True)
