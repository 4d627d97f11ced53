"""An engine as small as one can be: one process, plain tensors, any torch optimizer, gradients from autograd alone.

The loop trains with it what it trains with the native engine, so nothing in the loop can know how a model is
parallelized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.planner.types import Plan
from manyhands.training.types import Batch, Terms


class ToyEngine:
    """``loss_model(batch, metrics=...)`` returns loss terms of ``model``. Gradients are summed by hand."""

    def __init__(self, loss_model: Any, model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.loss_model, self.model = loss_model, model
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(list(self.weights.values()))
        self.lasts: list[bool] = []  # what ``backward`` was given

    @property
    def is_local(self) -> bool:
        return True

    def make_optimizer(self, plan: Plan, config: RunConfig) -> str:
        return f"{type(self.optimizer).__name__}, made with the engine"

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        return self.loss_model.logits(batch)

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor, entries: Batch | None = None) -> torch.Tensor:
        return self.loss_model.next_token_logits(input_ids, entries)

    def forward(self, batch: Batch, *, metrics: bool = False) -> Terms:
        return self.loss_model(batch, metrics=metrics)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.lasts.append(last)
        found = torch.autograd.grad(loss, list(self.weights.values()), materialize_grads=True)
        for weight, gradient in zip(self.weights.values(), found, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def gradient_norm(self) -> torch.Tensor:
        squares = [p.grad.double().square().sum() for p in self.weights.values() if p.grad is not None]
        return torch.stack(squares).sum().sqrt()

    def step(self, learning_rate: float, *, max_norm: float) -> None:
        if max_norm > 0:
            factor = (max_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
            for weight in self.weights.values():
                if weight.grad is not None:
                    weight.grad *= factor.to(weight.grad.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    def update_in_backward(self, learning_rate: float) -> None:
        """The toy updates when it steps."""

    def learning_rates(self) -> Mapping[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Any], **_: Any) -> None:
        folder.mkdir(parents=True)
        tensors = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{key}:{name}": value for key, value in self.optimizer.state.get(weight, {}).items()}
        save_file(tensors, folder / "tensors.safetensors")
        (folder / "state.json").write_text(json.dumps(state))

    def load(self, folder: Path, **_: Any) -> dict[str, Any]:
        tensors = load_file(folder / "tensors.safetensors")
        for name, weight in self.weights.items():
            weight.data.copy_(tensors[name])
        for key, name in (full.split(":") for full in tensors if ":" in full):
            self.optimizer.state[self.weights[name]][key] = tensors[f"{key}:{name}"]
        return json.loads((folder / "state.json").read_text())

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]
