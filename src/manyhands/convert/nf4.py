"""Frozen linear layers in NF4 (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

What is stored is what bitsandbytes' ``quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=...)``
gives, byte for byte; its kernels quantize and dequantize. Only the layout is ours, so that each shard can be
dequantized by itself. Every linear layer of the blocks is quantized, adapted or not; embeddings, head, norms and biases
stay in the compute dtype. Knows nothing of adapters and ranks.

Layout: the weight (o, i), flattened, is cut into ROWS of 256 blocks of 64 values, the last one padded. A row is one
block of the second level, so a shard of rows holds complete blocks of both levels:

===================  ===========  =====================================================================================
parameter            bytes a row  holds
===================  ===========  =====================================================================================
weight_codes         8192         a value in 4 bits, two a byte
weight_statistics    264          256 codes of the blocks' absolute maxima, then two float32: the scale of these codes,
                                  and the offset added to them, which all rows share
===================  ===========  =====================================================================================

Without double quantization a row of weight_statistics is 1024 bytes, the blocks' absolute maxima in float32.

Both are stored VIEWED AS THE COMPUTE DTYPE: a mixed-precision policy casts what has another dtype, uint8 in torch 2.11
and float32 in every version, and leaves these bytes alone. Nothing may compute with them directly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.convert.grouped import hold
from manyhands.convert.packed import PackedLinear
from manyhands.convert.protocol import BaseConverter
from manyhands.convert.stored_nf4 import find_quantized, take_stored
from manyhands.core.errors import UserError
from manyhands.core.holding import gather_parts, local, local_slices
from manyhands.facts.stored_nf4 import StoredNf4
from manyhands.kernels.backend import Backend
from manyhands.kernels.lora import Matmuls
from manyhands.kernels.matmul import low_rank_linear, sum_of_matmuls
from manyhands.kernels.nf4.reference import (
    BLOCK_VALUES,
    CODE_BYTES,
    FLOAT_STATISTICS_BYTES,
    ROW_BLOCKS,
    ROW_VALUES,
    STATISTICS_BYTES,
    count_rows,
    is_double,
    kernel_dtype,
)
from manyhands.kernels.nf4.select import choose_backend, dequantize, describe, use
from manyhands.kernels.operators import operator
from manyhands.model.structure import block_linears
from manyhands.model.weights import Storage

CHUNK_VALUES = 2**22  # quantized at once: on a CPU bitsandbytes takes some 20 bytes a value meanwhile


class Rows(Protocol):
    """A matrix of which rows are taken: a tensor, or a slice of a safetensors file, which reads what is asked."""

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


class Nf4Linear(PackedLinear):
    """A frozen linear layer that holds its weight in NF4 and dequantizes it for each matmul. Empty until ``fill``.

    Its bias stays as it is. ``weight`` is no parameter here but the dequantized weight, computed at each access.
    """

    weight_pieces = ("weight_codes", "weight_statistics")  # model.weights.QuantizedLayer
    weight_codes: nn.Parameter
    weight_statistics: nn.Parameter

    def __init__(self, base: nn.Linear, double_quant: bool = True) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.storage: Storage = "nf4" if double_quant else "nf4_single"
        dtype, device = base.weight.dtype, base.weight.device
        statistics_bytes = STATISTICS_BYTES if double_quant else FLOAT_STATISTICS_BYTES
        for name, num_bytes in (("weight_codes", CODE_BYTES), ("weight_statistics", statistics_bytes)):
            empty = torch.empty(count_rows(base.weight.shape), num_bytes // dtype.itemsize, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", base.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        return nf4_linear(x, self.weight_codes, self.weight_statistics, self.bias, self.out_features)

    def fused_base(self) -> tuple[tuple[torch.Tensor, ...], Matmuls]:
        """What ``kernels.lora.Layer`` takes: the pieces of the weight, and their matmuls."""
        return (self.weight_codes, self.weight_statistics), Nf4Matmuls(self.in_features, self.out_features)

    @staticmethod
    def dequantize(pieces: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return dequantize(pieces[0], pieces[1], shape, dtype)

    @torch.no_grad()
    def fill(self, weight: Rows | StoredNf4) -> None:
        """Quantize ``weight`` (o, i), in any dtype and on any device: a tensor, or a file's, read as far as it is
        needed.

        Where the layer is sharded every rank calls this, takes the rows that its own shard holds and quantizes
        them; with double quantization one float32 a block of 64 values is gathered, as the offset is the mean over the
        full weight. So the bytes are the same for any sharding. The weight is cast to the compute dtype before (float32
        where that is float64). What a file holds in NF4 is taken as it is.
        """
        if isinstance(weight, StoredNf4):
            take_stored(weight, self.weight_codes, self.weight_statistics)
            return
        bitsandbytes()  # registers its operators
        codes, statistics = local(self.weight_codes), local(self.weight_statistics)
        flat = self._own_values(weight).to(codes.device, kernel_dtype(codes.dtype))
        codes.zero_()  # what pads the last row
        statistics.zero_()
        absmax = torch.zeros(len(codes) * ROW_BLOCKS, dtype=torch.float32, device=codes.device)
        num_blocks = math.ceil(len(flat) / BLOCK_VALUES)
        for begin in range(0, len(flat), CHUNK_VALUES):
            piece = flat[begin : begin + CHUNK_VALUES]
            packed, maxima = torch.ops.bitsandbytes.quantize_4bit(piece, BLOCK_VALUES, "nf4", torch.uint8)
            codes.view(torch.uint8).view(-1)[begin // 2 :][: len(packed)] = packed.view(-1)
            absmax[begin // BLOCK_VALUES :][: len(maxima)] = maxima
        if not is_double(statistics):
            statistics.view(torch.float32).copy_(absmax.view(-1, ROW_BLOCKS))
            return
        whole = gather_parts(absmax.view(-1, ROW_BLOCKS), self.weight_codes).view(-1)
        offset = _mean(whole[: math.ceil(self.in_features * self.out_features / BLOCK_VALUES)])
        if num_blocks:
            quantize = bitsandbytes().functional.quantize_blockwise
            second, state = quantize(absmax[:num_blocks] - offset, blocksize=ROW_BLOCKS)
            view = statistics.view(torch.uint8)
            view[:, :ROW_BLOCKS] = F.pad(second, (0, len(absmax) - num_blocks)).view(-1, ROW_BLOCKS)
            view[:, ROW_BLOCKS:] = torch.stack([state.absmax, offset.expand(len(codes))], dim=1).view(torch.uint8)

    def _own_values(self, weight: Rows) -> torch.Tensor:
        """The values of the flattened weight that this rank's rows of codes hold."""
        rows, total = local_slices(self.weight_codes)[0], self.in_features * self.out_features
        begin, end = min(rows.start * ROW_VALUES, total), min(rows.stop * ROW_VALUES, total)
        if begin == end:
            return torch.empty(0)
        first = begin // self.in_features
        values = weight[first : math.ceil(end / self.in_features)].reshape(-1)
        return values[begin - first * self.in_features : end - first * self.in_features]


# Operators of our own, opaque to torch.compile: it would see that both directions dequantize the same weight, do it
# once and keep the weight in 16 bits from the forward to the backward pass.
@torch.library.custom_op(
    "manyhands::nf4_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor statistics, Tensor? bias, int out_features) -> Tensor",
)
def nf4_linear(
    x: torch.Tensor, codes: torch.Tensor, statistics: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """``x W^T + bias``, (..., i) -> (..., o). The gradient of x dequantizes again; that of the weight does not
    exist.
    """
    return F.linear(x, dequantize(codes, statistics, (out_features, x.shape[-1]), x.dtype), bias)


def _linear_backward(
    gradient: torch.Tensor, codes: torch.Tensor, statistics: torch.Tensor, in_features: int
) -> torch.Tensor:
    """``gradient W``, (..., o) -> (..., i)"""
    return gradient @ dequantize(codes, statistics, (gradient.shape[-1], in_features), gradient.dtype)


@nf4_linear.register_fake
def _(x, codes, statistics, bias, out_features):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_linear_backward(gradient, codes, statistics, in_features):  # type: ignore[no-untyped-def]
    return gradient.new_empty((*gradient.shape[:-1], in_features))


nf4_linear_backward = operator(
    "nf4_linear_backward",
    "(Tensor gradient, Tensor codes, Tensor statistics, int in_features) -> Tensor",
    _linear_backward,
    _fake_linear_backward,
)


class Nf4Matmuls(NamedTuple):
    """``kernels.lora.Matmuls`` of weights (o, i) that are held as codes and statistics."""

    in_features: int
    out_features: int

    def linear(
        self,
        x: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        low: torch.Tensor | None,
        b: torch.Tensor | None,
    ) -> torch.Tensor:
        codes, statistics = pieces
        if low is None or b is None:
            return nf4_linear(x, codes, statistics, bias, self.out_features)
        return nf4_low_rank_linear(x, codes, statistics, bias, low, b)

    def input_gradient(
        self,
        gradients: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[torch.Tensor]],
        left: Sequence[torch.Tensor],
        right: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        codes, statistics = [each[0] for each in pieces], [each[1] for each in pieces]
        return nf4_input_gradient(list(gradients), codes, statistics, list(left), list(right), self.in_features)


# Without gradients: called inside the autograd functions of ``kernels.lora`` alone.
def _low_rank_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    statistics: torch.Tensor,
    bias: torch.Tensor | None,
    low: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """``kernels.matmul.low_rank_linear`` for x (n, i), low (n, r), b (o, r) -> (n, o), beside a weight in NF4"""
    return low_rank_linear(x, dequantize(codes, statistics, (b.shape[0], x.shape[1]), x.dtype), bias, low, b)


def _input_gradient(
    gradients: list[torch.Tensor],
    codes: list[torch.Tensor],
    statistics: list[torch.Tensor],
    left: list[torch.Tensor],
    right: list[torch.Tensor],
    in_features: int,
) -> torch.Tensor:
    """``sum_j gradients_j W_j + sum_k left_k right_k``, (n, o_j) and (n, r_k), (r_k, i) -> (n, i); one W_j at a time is
    whole.
    """

    def weight(j: int) -> torch.Tensor:
        return dequantize(codes[j], statistics[j], (gradients[j].shape[1], in_features), gradients[j].dtype)

    total = sum_of_matmuls(left, right) if left else gradients[0] @ weight(0)
    for j in range(0 if left else 1, len(gradients)):
        total.addmm_(gradients[j], weight(j))
    return total


def _fake_low_rank_linear(x, codes, statistics, bias, low, b):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], b.shape[0]))


def _fake_input_gradient(gradients, codes, statistics, left, right, in_features):  # type: ignore[no-untyped-def]
    return gradients[0].new_empty((gradients[0].shape[0], in_features))


nf4_low_rank_linear = operator(
    "nf4_low_rank_linear",
    "(Tensor x, Tensor codes, Tensor statistics, Tensor? bias, Tensor low, Tensor b) -> Tensor",
    _low_rank_linear,
    _fake_low_rank_linear,
)
nf4_input_gradient = operator(
    "nf4_input_gradient",
    "(Tensor[] gradients, Tensor[] codes, Tensor[] statistics, Tensor[] left, Tensor[] right, int in_features)"
    " -> Tensor",
    _input_gradient,
    _fake_input_gradient,
)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, codes, statistics, _, _ = inputs
    ctx.in_features = x.shape[-1]
    ctx.save_for_backward(codes, statistics)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    for_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return nf4_linear_backward(gradient, *ctx.saved_tensors, ctx.in_features), None, None, for_bias, None


nf4_linear.register_autograd(_backward, setup_context=_keep_for_backward)


@functools.cache
def bitsandbytes() -> Any:
    """The library, imported once. UserError where it is not installed."""
    try:
        import bitsandbytes as library
    except ImportError as error:
        raise UserError(
            "method.name: qlora needs bitsandbytes",
            where="method.name",
            why=str(error),
            fix="pip install 'manyhands[qlora]', or use method.name=lora",
        ) from error
    return library


def _mean(values: torch.Tensor) -> torch.Tensor:
    """float32, as bitsandbytes takes it; on a CPU by one thread, as more would sum in another order."""
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return values.mean()
    finally:
        torch.set_num_threads(num_threads)


def quantize_blocks(model: nn.Module, double_quant: bool = True, names: Collection[str] | None = None) -> list[str]:
    """Put an ``Nf4Linear`` in the place of every linear layer of the blocks, or of those in ``names``; returns their
    names.

    For a model on meta: ``materialize`` fills the layers. UserError where bitsandbytes is missing.
    """
    bitsandbytes()
    linears = {name: x for name, x in block_linears(model).items() if names is None or name in names}
    for name, linear in linears.items():
        model.set_submodule(name, hold(linear, Nf4Linear, double_quant))
    return list(linears)


@torch.no_grad()
def round_to_nf4(model: nn.Module, double_quant: bool = True) -> None:
    """Give every linear layer of the blocks the values that NF4 keeps of its weight, in place and in its dtype."""
    bitsandbytes()
    for linear in block_linears(model).values():
        held = Nf4Linear(linear, double_quant)
        held.fill(linear.weight.detach())
        linear.weight.copy_(held.weight)


class Nf4Blocks(BaseConverter):
    """Weights of the blocks' linear layers in NF4, and what dequantizes them in this process."""

    def on_meta(self, model: nn.Module) -> None:
        context = self.context
        names = None if context.plan.stored_nf4 is None else find_quantized(model, context.plan.model_folder)
        quantize_blocks(model, context.method.double_quant, names)
        if context.config.kernels.nf4 == "reference":
            backend = Backend("bitsandbytes", "as configured")
        else:
            backend = choose_backend(context.device, context.dtype)
        use(backend, context.dtype)
        self.lines.append(f"nf4: weights dequantized by {describe(backend)}")
