"""Which kernel updates a part: Triton where it passes its comparison with the reference on this device."""

from __future__ import annotations

from functools import cache

import torch

from manyhands.kernels.adamw.reference import Update, UpdateAll, one_by_one, update_reference
from manyhands.kernels.backend import Backend, beyond_bound, triton_or


@cache
def choose_backend(device: torch.device) -> Backend:
    """Triton where it can be imported and agrees with the reference on ``device``; else torch, with the reason."""
    return triton_or(
        "eager", device, "adamw.triton", lambda kernels: beyond_bound(kernels.compare(device, update_reference))
    )


def find_update(backend: str) -> Update:
    """The function that updates a part, by ``triton`` or ``eager``."""
    if backend == "triton":
        from manyhands.kernels.adamw.triton import update_triton

        return update_triton
    return update_reference


def find_update_all(backend: str) -> UpdateAll:
    """The function that updates many parts."""
    if backend == "triton":
        from manyhands.kernels.adamw.triton import MultiTensorUpdate

        return MultiTensorUpdate()
    return one_by_one(update_reference)
