"""Factors that begin at the best low-rank part of what NF4 loses (LoftQ, Li et al. 2023,
https://arxiv.org/abs/2310.08659).

One iteration of it: the weight in NF4 stays as it is, and s B A is the truncated singular value decomposition of W -
NF4(W), each factor with the root of the singular values. Knows which weights and how; which rank does it is
``convert/loftq_init.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from manyhands.config.schema import RunConfig
from manyhands.convert.lora import LoraNf4Linear, adapted_layers
from manyhands.core.holding import fill_from, gather
from manyhands.kernels.nf4 import dequantize
from manyhands.model.load import draw_weights, match_checkpoint
from manyhands.model.source import read_converted, read_stored
from manyhands.plan.types import Plan

# Singular values of what NF4 loses fall slowly, so the subspace is twice as wide as the rank and multiplied often.
# Measured with
# 12 on the weights of the demo's model, and on random ones of 2048 x 2048: at least 0.985 of the share that the exact
# decomposition takes up.
NUM_ITERATIONS = 12
MIN_OVERSAMPLING = 16


class LowRank(NamedTuple):
    """B (o, k) and A (k, i), float32, whose product approaches a matrix; squared Frobenius norms of the matrix and of
    the rest.
    """

    b: torch.Tensor
    a: torch.Tensor
    whole: torch.Tensor
    rest: torch.Tensor


def nf4_adapters(model: torch.nn.Module) -> dict[str, LoraNf4Linear]:
    """The adapted layers that are held in NF4, by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, LoraNf4Linear)}


def quantization_error(
    layer: LoraNf4Linear, codes: torch.Tensor, statistics: torch.Tensor, weight: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """W - NF4(W) (o, i), float32 on ``device``, of the whole stored pieces and the weight as its file has it.

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
    roots, whole = values[:rank].sqrt(), matrix.square().sum()
    b, a = (basis @ left[:, :rank]) * roots, roots[:, None] * (right[:rank] @ other.T)
    return LowRank(b, a, whole, whole - values[:rank].square().sum())


def set_lora_weights(layer: LoraNf4Linear, b: torch.Tensor, a: torch.Tensor) -> None:
    """Let ``layer`` begin with s B A = ``b a``, each rank its part. A collective where the factors are sharded.

    Dimensions that a small weight leaves over keep their drawn rows of A beside zeros in B, so that they train.
    """
    num_used = len(a)
    down = gather(layer.lora_A.weight).to(a.device, copy=True)
    up = torch.zeros(layer.lora_B.weight.shape, dtype=down.dtype, device=a.device)
    down[:num_used] = a
    up[:, :num_used] = b / layer.scaling
    fill_from(layer.lora_A.weight, down)
    fill_from(layer.lora_B.weight, up)


def weight_reader(model: Any, plan: Plan, config: RunConfig) -> Callable[[str], torch.Tensor]:
    """What gives a layer's whole weight (o, i) by the layer's name, as the model was filled: from the files, or drawn
    anew.
    """
    if config.model.init == "random":
        return draw_weights(model, config.seed)
    checkpoint = match_checkpoint(model, plan.model_folder, plan.new_tokens)
    conversions = {name: conversion for conversion in checkpoint.conversions for name in conversion.shapes}

    def read(name: str) -> torch.Tensor:
        weight = f"{name}.weight"
        if weight in checkpoint.plain:
            return read_stored(checkpoint.plain[weight])
        return read_converted(model, conversions[weight])[weight]

    return read
