"""Weights in NF4 back to floating point."""

from manyhands.kernels.nf4.reference import (
    BLOCK_VALUES,
    CODE_BYTES,
    FLOAT_STATISTICS_BYTES,
    ROW_BLOCKS,
    ROW_VALUES,
    STATISTICS_BYTES,
    count_rows,
    dynamic_code,
    is_double,
    kernel_dtype,
    levels,
)
from manyhands.kernels.nf4.select import choose_backend, dequantize, describe, use

__all__ = [
    "BLOCK_VALUES",
    "CODE_BYTES",
    "FLOAT_STATISTICS_BYTES",
    "ROW_BLOCKS",
    "ROW_VALUES",
    "STATISTICS_BYTES",
    "choose_backend",
    "count_rows",
    "dequantize",
    "describe",
    "dynamic_code",
    "is_double",
    "kernel_dtype",
    "levels",
    "use",
]
