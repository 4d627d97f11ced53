"""Muon for matrices, AdamW for everything else (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

A matrix's update is its momentum with all singular values brought near 1, by Newton-Schulz iterations. Scaled to the
length that AdamW's updates have (Liu et al. 2025, https://arxiv.org/abs/2502.16982, section 2.2), so one learning rate
serves both. Momenta are sharded as the parameters are; an update needs the full matrix, so that of one matrix at a
time is gathered and every rank computes it: from the same gradients come the same bits in every layout.

Layouts sum gradients in another order, though, and so differ in the last digit (1e-7). Iterations in float32 make at
most 5e-6 of it in the weights; in bfloat16, where that digit rounds some elements the other way, up to 1e-2 (20 steps
of random matrices of full and of low rank). So they run in the dtype that the model computes in: in float32 layouts
agree as they do with AdamW, in bfloat16 they differ by Muon's rounding too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from manyhands.core.errors import UserError
from manyhands.core.holding import gather_parts, local, local_part
from manyhands.optim.options import Group, Options

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic a x + b x^3 + c x^5; singular values end between 0.7 and 1.2
NUM_ITERATIONS = 5
MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2  # what the elements of AdamW's updates measure, in learning rates


class Muon(torch.optim.Optimizer):
    """``matrices`` are groups of 2-D parameters for Muon, ``rest`` groups for torch's fused AdamW; ``param_groups`` are
    both.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        rest: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.dtype = dtype  # of the iterations
        super().__init__(matrices, {"lr": lr, "momentum": MOMENTUM, "weight_decay": 0.0})
        self._num_muon_groups = len(self.param_groups)
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True) if rest else None
        if self._adamw is not None:
            self._adamw.state = self.state
            self.param_groups += self._adamw.param_groups  # the same groups: a rate set here is set there

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups[: self._num_muon_groups]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self._adamw is not None:
            self._adamw.step()

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(buffer, momentum)  # Nesterov's
        update = orthogonalize(gather_parts(ahead.to(self.dtype), like=parameter))
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(local_part(parameter, update), alpha=-group["lr"] * RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """(n, m) -> about U V^T for matrix = U S V^T, by iterating X <- a X + (b X X^T + c (X X^T)^2) X on the wide
    form.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # the largest singular value is at most the norm
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def make_muon(groups: list[Group], options: Options) -> Muon:
    matrices, rest = split_matrices(groups, options.blocks)
    return Muon(
        matrices, rest, lr=options.learning_rate, betas=options.betas, eps=options.eps, dtype=options.compute_dtype
    )


def split_matrices(groups: list[Group], blocks: Collection[str]) -> tuple[list[Group], list[Group]]:
    """The same groups for Muon, with the matrices of ``blocks``, and for AdamW, with everything else. UserError where
    there is no such matrix.
    """

    def is_matrix(name: str, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and any(name.startswith(f"{block}.") for block in blocks)

    matrices = [{**group, "params": [pair for pair in group["params"] if is_matrix(*pair)]} for group in groups]
    rest = [{**group, "params": [pair for pair in group["params"] if not is_matrix(*pair)]} for group in groups]
    if not any(group["params"] for group in matrices):
        raise UserError(
            "optimizer.name: muon has nothing to do: no matrix of the blocks is trained",
            where="optimizer.name",
            fix="use optimizer.name=adamw, or train matrices of the blocks",
        )
    return [group for group in matrices if group["params"]], [group for group in rest if group["params"]]
