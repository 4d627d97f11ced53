"""Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235): second moments of matrices as one row and one
column.

As it is used for fine-tuning (T5 and after): an absolute learning rate, no momentum, no scaling by the weights' size,
which would keep a LoRA factor that starts at zero near it. ``torch.optim.Adafactor`` scales so, and waits for the
device twice a parameter. Statistics are of full matrices in every layout: sums over shards are float64 and travel
together, twice a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from manyhands.core.holding import local, shard_like, sum_over_shards
from manyhands.optim.options import Group, Options

DECAY = -0.8  # the second moment's decay is 1 - t^DECAY at step t
EPS = 1e-30  # added to squared gradients
MAX_RMS = 1.0  # updates are scaled down to this root mean square


@dataclass(frozen=True)
class _LocalMatrix:
    """One parameter as this rank has it: ``n`` of ``rows`` rows, dimensions after the first laid together."""

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, torch.Tensor]
    weight: torch.Tensor  # (n, columns), or (n) for a vector
    gradient: torch.Tensor

    @property
    def is_matrix(self) -> bool:
        return self.gradient.ndim == 2

    def direction(self, row_mean: torch.Tensor) -> torch.Tensor:
        """The gradient over the root of its second moment, which is R C^T / mean(R) for a matrix."""
        if not self.is_matrix:
            return self.gradient * local(self.state["exp_avg_sq"]).rsqrt()
        rows = (local(self.state["exp_avg_sq_row"]) / row_mean).rsqrt_()
        return self.gradient * rows[:, None] * self.state["exp_avg_sq_col"].rsqrt()


class Adafactor(torch.optim.Optimizer):
    """``step`` is a collective where parameters are sharded (by their first dimension, as FSDP2 does)."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def create_state(self, parameter: torch.Tensor) -> None:
        """Zeros: ``step`` (), and row (rows) and column (columns) of a matrix or all of a vector. Rows are sharded,
        columns are not.
        """
        state, part = self.state[parameter], local(parameter)
        state["step"] = torch.zeros((), dtype=torch.float32)
        if parameter.ndim == 1:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        else:
            rows, columns = parameter.shape[0], parameter[:1].numel()
            state["exp_avg_sq_row"] = shard_like(part.new_zeros(part.shape[0]), parameter, (rows,))
            state["exp_avg_sq_col"] = part.new_zeros(columns)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parts = [self._open(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        row_means = self._advance(parts)
        squares = [part.direction(mean).double().square().sum() for part, mean in zip(parts, row_means, strict=True)]
        squares = sum_over_shards(squares, [part.parameter for part in parts])
        for part, mean, square in zip(parts, row_means, squares, strict=True):
            rms = (square / part.parameter.numel()).sqrt()
            factor = part.group["lr"] / (rms / MAX_RMS).clamp(min=1.0)
            part.weight.mul_(1 - part.group["lr"] * part.group["weight_decay"])
            part.weight.sub_(part.direction(mean).mul_(factor.to(part.weight.dtype)))

    def _open(self, parameter: torch.Tensor, group: dict[str, Any]) -> _LocalMatrix:
        if not self.state[parameter]:
            self.create_state(parameter)
        assert parameter.grad is not None
        weight, gradient = local(parameter), local(parameter.grad)
        if weight.ndim > 2:
            weight, gradient = weight.flatten(1), gradient.flatten(1)
        return _LocalMatrix(parameter, group, self.state[parameter], weight, gradient)

    def _advance(self, parts: list[_LocalMatrix]) -> list[torch.Tensor]:
        """Moves the second moments on; the mean of each matrix's row statistics, 0-d float64 (1 for a vector)."""
        sums = []
        for part in parts:
            part.state["step"] += 1
            square, fresh = part.gradient.square().add_(EPS), part.state["step"].item() ** DECAY
            if not part.is_matrix:
                local(part.state["exp_avg_sq"]).lerp_(square, fresh)
                sums.append(torch.ones(1, dtype=torch.float64, device=square.device))
                continue
            row = local(part.state["exp_avg_sq_row"])
            row.lerp_(square.mean(1, dtype=torch.float64).to(row.dtype), fresh)
            sums.append(torch.cat([square.sum(0, dtype=torch.float64), row.sum(dtype=torch.float64)[None]]))
        sums = sum_over_shards(sums, [part.parameter for part in parts])
        means = []
        for part, total in zip(parts, sums, strict=True):
            if part.is_matrix:
                rows, column = part.parameter.shape[0], part.state["exp_avg_sq_col"]
                column.lerp_((total[:-1] / rows).to(column.dtype), part.state["step"].item() ** DECAY)
                means.append(total[-1] / rows)
            else:
                means.append(total.new_ones(()))
        return means


def make_adafactor(groups: list[Group], options: Options) -> Adafactor:
    return Adafactor(groups, lr=options.learning_rate)
