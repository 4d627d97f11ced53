"""Linear layers whose matmuls are in fp8."""

from manyhands.kernels.fp8.linear import (
    QuantizedWeights,
    count_quantized_bytes,
    dequantize_rows,
    fp8_linears,
    fp8_mlp,
    quantize_weights,
    stored_linear,
)
from manyhands.kernels.fp8.ops import has_features
from manyhands.kernels.fp8.reference import ALIGNMENT
from manyhands.kernels.fp8.select import describe, has_scaled_mm

__all__ = [
    "ALIGNMENT",
    "QuantizedWeights",
    "count_quantized_bytes",
    "dequantize_rows",
    "describe",
    "fp8_linears",
    "fp8_mlp",
    "has_features",
    "has_scaled_mm",
    "quantize_weights",
    "stored_linear",
]
