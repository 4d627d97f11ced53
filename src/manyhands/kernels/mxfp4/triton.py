"""MXFP4 to floating point as one Triton kernel: each code is read once, each value written once.

A thread takes a word of eight codes, whose values share a scale, and writes eight values, 16 bytes of bfloat16. A code
with its sign in bit 31, exponent and mantissa in bits 24 to 22 is, as float32, 2**-126 times its value, also where that
is subnormal: two shifts, a mask and two products a value. Compiled for compute capability 9.0 that is 10 instructions a
value with all others; by its data sheet an H200 issues some 15 in the time that its memory takes for a value's 2.5
bytes. Blocks are counted in 32 bits, and a block's scale is found by a division by a constant.

Importing this needs Triton; ``select`` does so only on a GPU, and compares with the reference before use.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from manyhands.core.limits import MXFP4_BLOCK_VALUES
from manyhands.kernels.mxfp4.reference import count_bytes

WORD_VALUES = tl.constexpr(8)  # in 32 bits
BLOCK_VALUES = tl.constexpr(MXFP4_BLOCK_VALUES)
SIGN_AND_VALUE = tl.constexpr(-0x7E400000)  # 0x81C00000
SMALLEST_NORMAL_INVERSE = tl.constexpr(2.0**126)
PIECE = 2048  # values a program
NUM_WARPS = 4


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_pointer,
    scales_pointer,
    weight_pointer,
    num_values,
    NUM_SCALES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PIECE: tl.constexpr,
):
    WORDS: tl.constexpr = PIECE // WORD_VALUES
    start = tl.program_id(0).to(tl.int64) * PIECE  # an index may pass 2**31
    at = tl.arange(0, WORDS)
    inside = at * WORD_VALUES < num_values - start
    codes_pointer = codes_pointer.to(tl.pointer_type(tl.uint32)) + start // WORD_VALUES
    words = tl.load(codes_pointer + tl.max_contiguous(at, 1), mask=inside, other=0)  # as kernels/nf4/triton.py has it
    block = tl.program_id(0) * (PIECE // BLOCK_VALUES) + at // (BLOCK_VALUES // WORD_VALUES)
    place = block + block // NUM_SCALES * (SCALE_BYTES - NUM_SCALES)
    scale = tl.load(scales_pointer + place, mask=inside, other=0).to(tl.uint32)
    factor = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    within = tl.arange(0, WORD_VALUES)
    code = (words[:, None] << (28 - within * 4)[None, :].to(tl.uint32)).to(tl.int32, bitcast=True)
    value = ((code >> 6) & SIGN_AND_VALUE).to(tl.float32, bitcast=True) * SMALLEST_NORMAL_INVERSE * factor[:, None]
    index = at[:, None] * WORD_VALUES + within[None, :]
    tl.store(weight_pointer + start + index, value.to(weight_pointer.dtype.element_ty), mask=inside[:, None])


def dequantize_triton(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """As ``reference.dequantize_reference``, bit for bit, on the current device. One launch, which waits for
    nothing.
    """
    weight = torch.empty(shape, dtype=dtype, device=codes.device)
    num_values = math.prod(shape)
    _dequantize_kernel[(triton.cdiv(num_values, PIECE),)](
        codes.contiguous().view(torch.int32),
        scales.contiguous().view(torch.uint8),
        weight,
        num_values,
        NUM_SCALES=shape[1] // MXFP4_BLOCK_VALUES,
        SCALE_BYTES=count_bytes(shape[1])[1],
        PIECE=PIECE,
        num_warps=NUM_WARPS,
    )
    return weight
