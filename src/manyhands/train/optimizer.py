"""AdamW and its groups: every trained parameter in exactly one group, weight decay only on matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands.config.schema import OptimizerSection


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of (name, parameter) pairs: matrices that decay, and the rest.

    Norm weights, biases (one dimension) and embeddings (also where the head is tied to them) do not decay: pulling
    them to zero changes scales that nothing else restores.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(n, p) for n, p in trained if p.ndim >= 2 and id(p) not in embeddings]
    kept = [(n, p) for n, p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, section: OptimizerSection, learning_rate: float) -> torch.optim.AdamW:
    """AdamW over the trained parameters of ``model``, in their own (master) dtype; fused, which torch has for CPU and CUDA."""
    groups = group_parameters(model, section.weight_decay)
    if not groups:
        raise ValueError("no parameter of the model is trained")
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(section.beta1, section.beta2), eps=section.eps, weight_decay=section.weight_decay, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
