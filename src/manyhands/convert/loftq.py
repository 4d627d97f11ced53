"""LoRA A and B initialized to the best low-rank part of NF4's quantization error (LoftQ, Li et al. 2023,
https://arxiv.org/abs/2310.08659).

One iteration of it: the weight in NF4 is left as it is, and s B A is the truncated singular value decomposition of W -
NF4(W), A and B each with the square roots of the singular values. One rank decomposes a weight and all ranks take their
parts of it, so no rank holds more than one full weight, and the result depends neither on the number of ranks nor on
what is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.convert.lora import adapted_layers
from manyhands.convert.nf4 import Nf4Linear
from manyhands.convert.protocol import BaseConverter
from manyhands.core.collective_errors import this_rank
from manyhands.core.holding import fill_from, gather
from manyhands.core.progress import advance
from manyhands.core.seeds import named_generator
from manyhands.kernels.nf4.select import dequantize
from manyhands.model.load import draw_weights, match_checkpoint
from manyhands.model.source import read_converted, read_stored
from manyhands.planner.types import Plan

# Singular values of NF4's quantization error fall slowly, so the subspace is twice as wide as the rank and multiplied
# often. Measured with 12 on the weights of the demo's model, and on random ones of 2048 x 2048: at least 0.985 of the
# share that the exact decomposition makes up for.
NUM_ITERATIONS = 12
MIN_OVERSAMPLING = 16


class LowRank(NamedTuple):
    """B (o, k) and A (k, i), float32, whose product approaches a matrix; squared Frobenius norms of the matrix and
    of the residual.
    """

    b: torch.Tensor
    a: torch.Tensor
    square: torch.Tensor
    residual: torch.Tensor


def nf4_adapters(model: torch.nn.Module) -> dict[str, Any]:
    """The adapted layers that are held in NF4, by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, Nf4Linear)}


def quantization_error(
    layer: Any, codes: torch.Tensor, statistics: torch.Tensor, weight: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """W - NF4(W) (o, i), float32 on ``device``, of the gathered NF4 pieces and the weight as its file has it.

    Takes 10 bytes a value meanwhile.
    """
    shape = (layer.out_features, layer.in_features)
    held = dequantize(codes.to(device), statistics.to(device), shape, codes.dtype)
    return (weight.to(device, torch.float32) - held).float()


def best_low_rank(matrix: torch.Tensor, rank: int, generator: torch.Generator) -> LowRank:
    """The ``rank`` largest singular values of (o, i) with their vectors, by subspace iteration; k is less where a side
    is.

    Algorithms 4.4 and 5.1 of Halko, Martinsson and Tropp (2011, https://arxiv.org/abs/0909.4061). Costs some 50 o i (2
    rank) multiplications, where the exact decomposition takes many o i min(o, i): on a CPU core 0.6 s and 1.9 s for
    2048 x 2048 and rank 64. ``generator`` is one of the CPU, so every device begins with the same numbers.
    """
    width = min(rank + max(rank, MIN_OVERSAMPLING), *matrix.shape)
    start = torch.randn(matrix.shape[1], width, generator=generator).to(matrix)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(NUM_ITERATIONS):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis)).Q
    other, triangle = torch.linalg.qr(matrix.T @ basis)  # matrix ~ basis triangle^T other^T
    left, values, right = torch.linalg.svd(triangle.T)
    roots, square = values[:rank].sqrt(), matrix.square().sum()
    b, a = (basis @ left[:, :rank]) * roots, roots[:, None] * (right[:rank] @ other.T)
    return LowRank(b, a, square, square - values[:rank].square().sum())


def set_lora_weights(layer: Any, b: torch.Tensor, a: torch.Tensor) -> None:
    """Initialize ``layer`` to s B A = ``b a``, each rank its part. A collective where A and B are sharded.

    Dimensions that a small weight leaves over keep their drawn rows of A beside zeros in B, so that they train.
    """
    num_used = len(a)
    down = gather(layer.lora_A.weight).to(a.device, copy=True)
    up = torch.zeros(layer.lora_B.weight.shape, dtype=down.dtype, device=a.device)
    down[:num_used] = a
    up[:, :num_used] = b / layer.scaling
    fill_from(layer.lora_A.weight, down)
    fill_from(layer.lora_B.weight, up)


def weight_reader(model: Any, plan: Plan, config: RunConfig, device: torch.device) -> Callable[[str], torch.Tensor]:
    """A function from a layer's name to its full weight (o, i), read from the files or drawn again, as the model was
    filled.
    """
    if config.model.init == "random":
        return draw_weights(model, config.seed, device)
    checkpoint = match_checkpoint(model, plan.model_folder, plan.new_tokens)
    conversions = {name: conversion for conversion in checkpoint.conversions for name in conversion.shapes}

    def read(name: str) -> torch.Tensor:
        weight = f"{name}.weight"
        if weight in checkpoint.plain:
            return read_stored(checkpoint.plain[weight])
        return read_converted(model, conversions[weight])[weight]

    return read


@torch.no_grad()
def initialize_with_loftq(model: Any, plan: Plan, config: RunConfig, device: torch.device) -> float:
    """Initialize LoRA A and B beside every weight in NF4 as the module's docstring has it; returns the share of the
    squared quantization error that they make up for.

    ``model`` is the transformers model, filled, its parameters sharded or not. All ranks must call it. In each round
    every rank has one weight: its NF4 codes are gathered, so the values are the stored ones; the file is read by this
    rank alone, computed on ``device``; and A and B are sent to all in float32.
    """
    rank, world_size = this_rank()
    layers, weight_of = list(nf4_adapters(model).items()), weight_reader(model, plan, config, device)
    square = residual = 0.0
    for begin in range(0, len(layers), world_size):
        batch = layers[begin : begin + world_size]
        own: torch.Tensor | None = None
        pieces = None
        for index, (_, layer) in enumerate(batch):
            gathered = gather(layer.weight_codes), gather(layer.weight_statistics)
            pieces = gathered if index == rank else pieces
        if pieces is not None:
            name, layer = batch[rank]
            error = quantization_error(layer, *pieces, weight_of(name), device)
            found = best_low_rank(error, layer.lora_A.out_features, named_generator(config.seed, f"{name}.loftq"))
            own = torch.cat([part.reshape(-1) for part in found])
            del error, found
        for index, (_, layer) in enumerate(batch):
            one_square, one_residual = _receive(layer, own if index == rank else None, index, device)
            square, residual = square + one_square, residual + one_residual
        advance()
    return 1 - residual / square if square else 0.0


def _receive(layer: Any, own: torch.Tensor | None, source: int, device: torch.device) -> tuple[float, float]:
    """Copy what rank ``source`` has computed into ``layer``; the two squared norms of ``LowRank``."""
    num_out, num_in = layer.out_features, layer.in_features
    size = min(layer.lora_A.out_features, num_out, num_in)
    sizes = [num_out * size, size * num_in, 1, 1]
    sent = torch.empty(sum(sizes), device=device) if own is None else own
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(sent, source)
    b, a, square, residual = sent.split(sizes)
    set_lora_weights(layer, b.view(num_out, size), a.view(size, num_in))
    return square.item(), residual.item()


class LoftQ(BaseConverter):
    """The first values of LoRA's A and B, for a run that begins; a resumed one has them in its checkpoint."""

    def after_load(self, model: Any) -> None:
        context = self.context
        if context.resumes:
            return
        share = initialize_with_loftq(model, context.plan, context.config, context.device)
        if context.device.type == "cuda":  # what training takes is measured from here
            torch.cuda.empty_cache()
        rank = context.config.method.rank
        self.lines += (
            f"adapters: LoftQ, rank {rank}: {share:.0%} of the squared quantization error of NF4 is made up for",
            "adapters: the adapter belongs to the weights in 4 bits; beside those in 16 bits, which have no such error,"
            " it would be wrong",
        )
