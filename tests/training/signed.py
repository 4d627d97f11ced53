"""An optimizer that the product does not know: steps of one size along the sign of a momentum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from manyhands.optim.options import Group, Options
from manyhands.optim.registry import OPTIMIZERS, OptimizerSpec
from tests.training import optimizer_ranks

KEYS = {"name": "signed", "weight_decay": 0.1}


class Signed(torch.optim.Optimizer):
    def __init__(self, groups: list[Group], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                momentum = self.state[parameter]["momentum"]
                momentum.mul_(self.momentum).add_(parameter.grad, alpha=1 - self.momentum)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * momentum.sign())


def make_signed(groups: list[Group], options: Options) -> Signed:
    return Signed(groups, lr=options.learning_rate, momentum=options.betas[0])


SPEC = OptimizerSpec(
    factory="tests.training.signed:make_signed",
    summary="signs of a momentum",
    state_bytes=lambda counts, master_bytes: counts.num_trained * master_bytes,
    moved_bytes=20,
    unused_keys=("beta2", "eps"),
    names={"transformers": {"signed_momentum": ""}},
)


def save(folder: Path) -> dict[str, torch.Tensor]:
    OPTIMIZERS["signed"] = SPEC
    return optimizer_ranks.save(KEYS, "fsdp", folder)


def resume(folder: Path) -> Any:
    OPTIMIZERS["signed"] = SPEC
    return optimizer_ranks.resume(KEYS, "fsdp", folder)
