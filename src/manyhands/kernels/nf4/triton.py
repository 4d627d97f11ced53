"""NF4, with double quantization or without, to floating point as one Triton kernel: each code is read once, each value
written once.

A thread takes a word of eight codes, finds its block's absolute maximum, and writes eight values, 16 bytes of bfloat16,
beside its neighbor's; nothing passes between threads but a table. Compiled for compute capability 9.0 that is 8
instructions a value. By its data sheet an H200 issues some 15 in the time that its memory takes for a value's 2.5
bytes, so the way a level is found decides: from a table in shared memory (two instructions and a load, without bank
conflicts, as 16 words lie in 16 banks) and not by a tree of 15 selections, which run at half rate.

Importing this needs Triton; ``select`` does so only on a GPU, and compares with bitsandbytes before use.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from manyhands.kernels.nf4 import reference as nf4

WORD_VALUES = tl.constexpr(8)  # in 32 bits
BLOCK_VALUES, ROW_BLOCKS, ROW_VALUES = (
    tl.constexpr(nf4.BLOCK_VALUES),
    tl.constexpr(nf4.ROW_BLOCKS),
    tl.constexpr(nf4.ROW_VALUES),
)
STATISTICS_BYTES = tl.constexpr(nf4.STATISTICS_BYTES)


# Of pieces of 1,024 to 16,384 values and 4 to 16 warps the fastest by 2 % for weights of an 8B model on an H200
# (``benchmarks/nf4.py``); a table in the L1 cache was 2 % slower than one in shared memory.
PIECE = 2048  # values a program, a part of a row
NUM_WARPS = 4


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_pointer,
    statistics_pointer,
    dynamic_pointer,
    levels_pointer,
    weight_pointer,
    num_values,
    PIECE: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    WORDS: tl.constexpr = PIECE // WORD_VALUES
    PIECES: tl.constexpr = ROW_VALUES // PIECE
    piece = tl.program_id(0)
    row, first_block = (piece // PIECES).to(tl.int64), (piece % PIECES) * (PIECE // BLOCK_VALUES)
    start = piece.to(tl.int64) * PIECE  # an index may pass 2**31
    at = tl.arange(0, WORDS)
    # Told that words do not lie side by side, Triton gives a thread every n-th one and not four in a row, so that words
    # come to where their values are written, and a warp still reads 128 bytes at once. Else they pass through shared
    # memory.
    words = tl.load(codes_pointer.to(tl.pointer_type(tl.uint32)) + start // WORD_VALUES + tl.max_contiguous(at, 1))
    block = first_block + at // (BLOCK_VALUES // WORD_VALUES)
    if DOUBLE:
        second_pointer = statistics_pointer + (row * STATISTICS_BYTES + ROW_BLOCKS) // 4
        coded = tl.load(statistics_pointer.to(tl.pointer_type(tl.uint8)) + row * STATISTICS_BYTES + block)
        # Launched without fused multiply-add: bitsandbytes rounds the product before it adds.
        absmax = tl.load(dynamic_pointer + coded.to(tl.int32)) * tl.load(second_pointer) + tl.load(second_pointer + 1)
    else:
        absmax = tl.load(statistics_pointer + row * ROW_BLOCKS + block)
    within = tl.arange(0, WORD_VALUES)
    code = (words[:, None] >> ((within ^ 1) * 4)[None, :].to(tl.uint32)) & 15  # the upper half of a byte is first
    table = tl.load(levels_pointer + tl.arange(0, 16))
    level = tl.gather(table, code.to(tl.int32).reshape(PIECE), 0).reshape(WORDS, WORD_VALUES)
    index = start + at[:, None] * WORD_VALUES + within[None, :]
    tl.store(
        weight_pointer + index, (level * absmax[:, None]).to(weight_pointer.dtype.element_ty), mask=index < num_values
    )


def dequantize_triton(
    codes: torch.Tensor, statistics: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """As ``reference.dequantize_reference``, bit for bit, on the current device. One launch, which waits for nothing.

    Only where a result in bfloat16 or float32 is below 2**-126: bitsandbytes, compiled with fast arithmetic, makes it
    zero.
    """
    weight = torch.empty(shape, dtype=dtype, device=codes.device)
    num_values = math.prod(shape)
    _dequantize_kernel[(triton.cdiv(num_values, PIECE),)](
        codes.contiguous().view(torch.int32),
        statistics.contiguous().view(torch.float32),
        nf4.dynamic_code(codes.device),
        nf4.levels(codes.device),
        weight,
        num_values,
        PIECE=PIECE,
        DOUBLE=nf4.is_double(statistics),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return weight
