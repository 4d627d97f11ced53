"""Which kernel dequantizes MXFP4 weights: Triton where it gives the reference's bits on this device."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from manyhands.kernels.backend import Backend, triton_or
from manyhands.kernels.mxfp4.reference import dequantize_reference, draw_pieces

TRIED_SHAPES = ((64, 256), (33, 96), (301, 2880))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The weight (n, i), new, from whole codes and scales, whatever dtype these are viewed as."""
    if codes.is_cuda and choose_backend(codes.device, dtype).name == "triton":
        from manyhands.kernels.mxfp4.triton import dequantize_triton

        return dequantize_triton(codes, scales, shape, dtype)
    return dequantize_reference(codes, scales, shape, dtype)


@cache
def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Triton where it can be imported and gives the reference's bits on ``device``, else the reference, with the
    reason.
    """

    def find_fault(kernels: ModuleType) -> str:
        for shape in TRIED_SHAPES:
            pieces = draw_pieces(*shape, device)
            found, wanted = (f(*pieces, shape, dtype) for f in (kernels.dequantize_triton, dequantize_reference))
            if not torch.equal(found, wanted):
                return f"gave {int((found != wanted).sum())} values of its self-test with other bits"
        return ""

    return triton_or("reference", device, "mxfp4.triton", find_fault)


def describe(backend: Backend) -> str:
    """One line for the log."""
    return "Triton, one launch a weight" if backend.name == "triton" else f"torch ({backend.reason})"
