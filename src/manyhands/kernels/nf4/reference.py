"""Weights in NF4 with double quantization back to floating point, by bitsandbytes or by one Triton kernel with the same
bits.

A weight (o, i), flattened, is R rows of 256 blocks of 64 values (``convert/nf4.py`` has the layout and fills it): codes
(R, 8192 bytes), two values a byte, the first in its upper half; statistics (R, 264 bytes), 256 codes of absolute
maxima, then two float32, their scale and their offset. A value is ``level[code] * (dynamic[code of maximum] * scale +
offset)``, each step rounded to float32 and the last one to the result's dtype. bitsandbytes takes five launches for it
and writes the maxima in float32 between them; Triton takes one. Without double quantization statistics are (R, 1024
bytes), the maxima themselves in float32; which of the two it is follows from a row's bytes. Knows tensors, no layers,
ranks or runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from manyhands.core import limits

BLOCK_VALUES, ROW_BLOCKS, ROW_VALUES = limits.NF4_BLOCK_VALUES, limits.NF4_ROW_BLOCKS, limits.NF4_ROW_VALUES
CODE_BYTES, STATISTICS_BYTES = limits.NF4_CODE_BYTES, limits.NF4_STATISTICS_BYTES
FLOAT_STATISTICS_BYTES = limits.NF4_FLOAT_STATISTICS_BYTES
# Of the self-test: whole rows, half a block at the end, an odd number of values, several rows with a padded one.
TRIED_SHAPES = ((64, 256), (75, 96), (33, 75), (301, 256))
Dequantize = Callable[[torch.Tensor, torch.Tensor, tuple[int, int], torch.dtype], torch.Tensor]


def dequantize_reference(
    codes: torch.Tensor, statistics: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight (o, i) in a ``kernel_dtype``, as bitsandbytes' ``dequantize_4bit`` gives it."""
    operators, num_values = _operators(), shape[0] * shape[1]
    packed = codes.view(torch.uint8).view(-1)[: math.ceil(num_values / 2)]
    absmax = _maxima(statistics).view(-1)[: math.ceil(num_values / BLOCK_VALUES)]
    # Blocks run over the flattened weight; bitsandbytes 0.50.2 gets rows wrong on an AVX-512 CPU where i % 64 is 32.
    kernel_shape = shape if shape[1] % BLOCK_VALUES == 0 else (num_values,)
    return operators.dequantize_4bit(packed, absmax, BLOCK_VALUES, "nf4", kernel_shape, dtype).view(shape)


def _maxima(statistics: torch.Tensor) -> torch.Tensor:
    """Absolute maxima (R, 256), float32."""
    if not is_double(statistics):
        return statistics.contiguous().view(torch.float32)
    coded = statistics.view(torch.uint8)[:, :ROW_BLOCKS].contiguous()
    scales, offset = statistics.view(torch.float32)[:, -2].contiguous(), statistics.view(torch.float32)[0, -1]
    code = dynamic_code(statistics.device)
    return _operators().dequantize_blockwise(coded, scales, code, ROW_BLOCKS, torch.float32) + offset


def is_double(statistics: torch.Tensor) -> bool:
    """Whether the maxima in these statistics are quantized themselves, whatever dtype the bytes are viewed as."""
    return statistics.shape[1] * statistics.element_size() == STATISTICS_BYTES


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute a result in ``dtype`` as: they know no float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def count_unlike(candidate: Dequantize, device: torch.device, dtype: torch.dtype) -> int:
    """Values with other bits than bitsandbytes', over random weights of ``TRIED_SHAPES`` in ``dtype`` and in float32,
    with and without double quantization.

    In float32 an absolute maximum shows that was rounded once in place of twice, which 16 bits hide.
    """
    unlike = 0
    for shape, double in itertools.product(TRIED_SHAPES, (True, False)):
        codes, statistics = draw_weight(shape, device, double)
        for tried in {dtype, torch.float32}:
            found, wanted = (way(codes, statistics, shape, tried) for way in (candidate, dequantize_reference))
            unlike += int((_bits(found) != _bits(wanted)).sum()) if found.shape == wanted.shape else wanted.numel()
    return unlike


def draw_weight(shape: tuple[int, int], device: torch.device, double: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and statistics, as bytes, of a weight of this shape, with double quantization or without; its values
    are some hundredths, as in a model.
    """
    draw, num_rows = torch.Generator().manual_seed(math.prod(shape)), count_rows(shape)
    codes = torch.randint(0, 256, (num_rows, CODE_BYTES), dtype=torch.uint8, generator=draw)
    if not double:
        maxima = torch.rand((num_rows, ROW_BLOCKS), generator=draw) * 0.02 + 0.02
        return codes.to(device), maxima.view(torch.uint8).to(device)
    second = torch.randint(0, 256, (num_rows, ROW_BLOCKS), dtype=torch.uint8, generator=draw)
    scales = torch.rand(num_rows, generator=draw) * 0.02
    offset = torch.full((num_rows,), float(torch.rand((), generator=draw)) * 0.02 + 0.02)
    statistics = torch.cat([second, torch.stack([scales, offset], 1).view(torch.uint8)], 1)
    return codes.to(device), statistics.to(device)


def count_rows(shape: tuple[int, ...] | torch.Size) -> int:
    """Rows of codes and statistics for a weight of this shape."""
    return math.ceil(math.prod(shape) / ROW_VALUES)


@cache
def dynamic_code(device: torch.device) -> torch.Tensor:
    """The 256 values of bitsandbytes' dynamic 8-bit format, in which the absolute maxima are coded; float32."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


@cache
def levels(device: torch.device) -> torch.Tensor:
    """The 16 values of NF4, float32."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device=device)


@cache
def _operators() -> Any:
    """bitsandbytes' operators, which its import registers. ImportError where it is not installed."""
    import bitsandbytes  # noqa: F401

    return torch.ops.bitsandbytes


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)
