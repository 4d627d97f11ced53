"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) in PEFT's names and file format.

An adapted layer keeps its weight, the same parameter under the same name, so that checkpoints and exports of the base need
no renaming; the factors live beside it as ``lora_A.weight`` and ``lora_B.weight``. Knows nothing of ranks or the loop.

Shapes: an adapted layer has weight (o, i), A (r, i), B (o, r); its output is x W^T + alpha / r (x A^T) B^T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.errors import UserError
from manyhands.model.blocks import block_linears, find_blocks
from manyhands.model.shards import fill_from, gather, named_generator

PEFT_PREFIX = "base_model.model."  # PEFT's names: this, then ours
MIN_REACH = 0.9  # share of the blocks' matrix elements that all-linear must adapt


class LoraLinear(nn.Linear):
    """A frozen linear layer with trained low-rank factors.

    The factors are float32 (float64 beside a float64 weight) and cast to the input's dtype, so no autocast is needed and
    gradients arrive in the factors' own dtype.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scaling, self.dropout = alpha / rank, dropout
        dtype = torch.float64 if base.weight.dtype == torch.float64 else torch.float32
        device = base.weight.device
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        low = F.linear(dropped, self.lora_A.weight.to(x.dtype)) * self.scaling  # scaled here, where it is r wide
        return F.linear(x, self.weight, self.bias) + F.linear(low, self.lora_B.weight.to(x.dtype))


def apply_lora(model: nn.Module, method: MethodSection, seed: int) -> list[str]:
    """Freeze ``model`` and put adapters on ``method.targets``; returns the adapted layers' names.

    Works on meta (``materialize`` fills the factors later) and on a loaded model, which gets its factors at once.
    Raises ``UserError`` where a pattern matches nothing or ``all-linear`` does not reach the blocks' weights.
    """
    candidates = block_linears(model)
    targets = find_targets(candidates, method.targets)
    if method.targets == "all-linear":
        _check_reach(model, targets)
    model.requires_grad_(False)
    for name in targets:
        parent, _, child = name.rpartition(".")
        adapted = LoraLinear(candidates[name], method.rank, method.alpha, method.dropout)
        adapted.train(candidates[name].training)
        setattr(model.get_submodule(parent), child, adapted)
    if not any(parameter.is_meta for parameter in model.parameters()):
        initialize_adapters(model, seed)
    return targets


def find_targets(candidates: Mapping[str, nn.Linear], targets: str | tuple[str, ...]) -> list[str]:
    """Names among ``candidates`` that are asked for: all, or by full name, by the end of a name (``q_proj``), or by glob."""
    if targets == "all-linear":
        return list(candidates)
    chosen: set[str] = set()
    for pattern in targets:
        hits = {name for name in candidates if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not hits:
            kinds = sorted({".".join(part for part in name.split(".")[-2:]) for name in candidates})
            raise UserError(
                f"No layer matches the adapter target {pattern!r}.",
                where="method.targets",
                fix="Name linear layers of the blocks, for example one of these, or use all-linear.",
                details=kinds[:20],
            )
        chosen |= hits
    return [name for name in candidates if name in chosen]


def _check_reach(model: nn.Module, targets: list[str]) -> None:
    total = sum(p.numel() for block in find_blocks(model).values() for p in block.parameters() if p.dim() >= 2)
    linears = block_linears(model)
    reached = sum(linears[name].weight.numel() for name in targets)
    if reached < MIN_REACH * total:
        raise UserError(
            f"Adapters on all linear layers reach only {reached / max(total, 1):.0%} of the blocks' weights.",
            where="method.targets: all-linear",
            why=f"{type(model).__name__} holds the rest in modules that are no linear layers (merged experts, for example).",
            fix="Name the layers to adapt in method.targets, or use method.name=full.",
        )


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """A from U(-1/sqrt(i), 1/sqrt(i)), which is PEFT's kaiming_uniform(a=sqrt(5)); B zero, so training starts at the base model.

    Drawn on the CPU from (seed, name), so it is the same for any device, sharding and number of processes.
    """
    for name, layer in adapted_layers(model).items():
        factor = layer.lora_A.weight
        bound = 1 / math.sqrt(layer.in_features)
        full = torch.empty(factor.shape, dtype=factor.dtype).uniform_(
            -bound, bound, generator=named_generator(seed, f"{name}.lora_A.weight")
        )
        fill_from(factor, full)
        local = layer.lora_B.weight
        fill_from(local, torch.zeros(local.shape, dtype=local.dtype))


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole factors under PEFT's names. Where they are sharded every rank must call this, in the same order."""
    state = {}
    for name, layer in adapted_layers(model).items():
        state[f"{PEFT_PREFIX}{name}.lora_A.weight"] = gather(layer.lora_A.weight)
        state[f"{PEFT_PREFIX}{name}.lora_B.weight"] = gather(layer.lora_B.weight)
    return state


@torch.no_grad()
def load_adapter_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Put whole factors, under PEFT's names, into the adapted layers, sharded or not. Names and shapes must agree exactly."""
    parameters = {}
    for name, layer in adapted_layers(model).items():
        parameters[f"{PEFT_PREFIX}{name}.lora_A.weight"] = layer.lora_A.weight
        parameters[f"{PEFT_PREFIX}{name}.lora_B.weight"] = layer.lora_B.weight
    wrong = [f"missing: {name}" for name in sorted(parameters.keys() - state.keys())]
    wrong += [f"unexpected: {name}" for name in sorted(state.keys() - parameters.keys())]
    wrong += [
        f"shape of {name}: {tuple(state[name].shape)}, the model has {tuple(parameters[name].shape)}"
        for name in sorted(parameters.keys() & state.keys())
        if state[name].shape != parameters[name].shape
    ]
    if wrong:
        raise UserError("The adapter does not fit the model.", fix="Use the same base model, rank and targets.", details=wrong[:20])
    for name, parameter in parameters.items():
        fill_from(parameter, state[name])
