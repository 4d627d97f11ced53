"""Which kernel dequantizes NF4 weights: Triton where it gives bitsandbytes' bits on this device."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from manyhands.kernels.backend import Backend, triton_or
from manyhands.kernels.nf4.reference import Dequantize, count_unlike, dequantize_reference, kernel_dtype


def describe(backend: Backend) -> str:
    """One line for the log."""
    return "Triton, one launch a weight" if backend.name == "triton" else f"bitsandbytes ({backend.reason})"


# What ``use`` chose, by dtype, for the whole process: weights are dequantized inside operators that are opaque to
# torch.compile and inside layers under activation checkpointing, where nothing but tensors arrives. Both give the same
# bits, so nothing else depends on it.
_chosen: dict[torch.dtype, Dequantize] = {}


def dequantize(
    codes: torch.Tensor, statistics: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight (o, i), new, from whole codes and statistics, whatever dtype these are viewed as."""
    computed = kernel_dtype(dtype)
    function = _chosen.get(computed, dequantize_reference) if codes.is_cuda else dequantize_reference
    return function(codes, statistics, shape, computed).to(dtype)


def use(backend: Backend, dtype: torch.dtype) -> None:
    """From now on ``dequantize`` makes weights in ``dtype`` on GPUs by ``backend``; without this, by bitsandbytes."""
    if backend.name == "triton":
        from manyhands.kernels.nf4.triton import dequantize_triton

        _chosen[kernel_dtype(dtype)] = dequantize_triton
    else:
        _chosen.pop(kernel_dtype(dtype), None)


@cache
def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Triton where it can be imported and gives bitsandbytes' bits on ``device``, else bitsandbytes, with the
    reason.
    """

    def find_fault(kernels: ModuleType) -> str:
        unlike = count_unlike(kernels.dequantize_triton, device, kernel_dtype(dtype))
        return f"gave {unlike} values of its self-test with other bits" if unlike else ""

    return triton_or("bitsandbytes", device, "nf4.triton", find_fault)
