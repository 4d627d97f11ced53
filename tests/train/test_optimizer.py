from __future__ import annotations

import torch
from torch import nn

from manyhands.config.schema import OptimizerSection
from manyhands.train.optimizer import group_parameters, make_optimizer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_every_trained_parameter_is_in_exactly_one_group():
    model = Tied()
    model.norm.bias.requires_grad_(False)
    names = [name for group in group_parameters(model, 0.1) for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len(set(names)) == len(names)


def test_weight_decay_reaches_matrices_only():
    decayed, kept = group_parameters(Tied(), 0.1)
    assert [n for n, _ in decayed["params"]] == ["inner.weight"] and decayed["weight_decay"] == 0.1
    assert {n for n, _ in kept["params"]} == {"embed.weight", "norm.weight", "norm.bias", "inner.bias"} and kept["weight_decay"] == 0.0


def test_one_step_is_adamw():
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    optimizer = make_optimizer(weight, OptimizerSection(weight_decay=0.5), 0.1)
    weight.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    # decay: 1 - 0.1 * 0.5 = 0.95; the first Adam step has length lr whatever the gradient's size: 0.95 - 0.1 = 0.85
    assert abs(weight.weight.item() - 0.85) < 1e-6
