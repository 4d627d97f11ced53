"""Weights in MXFP4 (OCP Microscaling Formats 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): to floating point, and from it.

A value is one of four bits, a sign, two bits of exponent and one of mantissa (e2m1), times a power of two that 32
neighbours in a row share (e8m0, a byte, 127 for 1). Shapes: a weight (n, i), i a multiple of 32, is codes (n, i / 2
bytes), two values a byte, the first in its lower half, and scales (n, i / 32 bytes, filled up to a multiple of 8).
Either may be viewed as any dtype. Knows tensors, no layers, ranks or runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from manyhands.core.limits import MXFP4_BLOCK_VALUES, MXFP4_SCALES_MULTIPLE

Dequantize = Callable[[torch.Tensor, torch.Tensor, tuple[int, int], torch.dtype], torch.Tensor]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CHUNK_VALUES = 2**22  # made at once, in float32
LARGEST_EXPONENT = 2  # of 6.0
ZERO_EXPONENT = 127


def count_bytes(inner: int) -> tuple[int, int]:
    """Of a row's codes, and of its scales as they are held."""
    num_scales = inner // MXFP4_BLOCK_VALUES
    return inner // 2, -(-num_scales // MXFP4_SCALES_MULTIPLE) * MXFP4_SCALES_MULTIPLE


def dequantize_reference(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight (n, i), in float32 as the product of a value and its scale, rounded once to ``dtype``."""
    num_rows, inner = shape
    num_scales = inner // MXFP4_BLOCK_VALUES
    own_codes, own_scales = (x.contiguous().view(torch.uint8).view(num_rows, -1) for x in (codes, scales))
    pairs, powers = _pairs(codes.device), _powers(codes.device)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    step = max(1, CHUNK_VALUES // inner)
    for rows in (slice(begin, begin + step) for begin in range(0, num_rows, step)):
        values = pairs[own_codes[rows].int()].view(-1, num_scales, MXFP4_BLOCK_VALUES)
        factors = powers[own_scales[rows, :num_scales].int()]
        out[rows] = (values * factors[..., None]).view(-1, inner)
    return out


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (n, i / 2) and scales (n, i / 32), uint8, of a weight (n, i). A block's scale is that of its largest value
    (section 6.3 of the specification); halfway between two values the smaller one is taken.
    """
    blocks = weight.float().unflatten(1, (-1, MXFP4_BLOCK_VALUES))
    exponents = torch.frexp(blocks.abs().amax(-1))[1] - 1 - LARGEST_EXPONENT
    scales = (exponents + ZERO_EXPONENT).clamp(0, 254)
    scaled = blocks / _powers(weight.device)[scales][..., None]
    levels = torch.tensor(MAGNITUDES, device=weight.device)
    nearest = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2)
    codes = (nearest + 8 * scaled.signbit()).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.to(torch.uint8)


def draw_pieces(num_rows: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales for tests: every code, and scales between 2**-40 and 2**40."""
    draw = torch.Generator().manual_seed(0)
    num_bytes, num_scales = count_bytes(inner)
    codes = torch.randint(256, (num_rows, num_bytes), generator=draw, dtype=torch.uint8)
    scales = torch.randint(87, 168, (num_rows, num_scales), generator=draw, dtype=torch.uint8)
    return codes.to(device), scales.to(device)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Both values of a byte (256, 2)."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=device)
    codes = torch.arange(256, device=device)
    return torch.stack([values[codes & 15], values[codes >> 4]], 1)


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """The factor of a scale (256)."""
    return torch.pow(2.0, torch.arange(256, device=device) - ZERO_EXPONENT)
