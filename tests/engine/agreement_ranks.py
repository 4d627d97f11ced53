"""On each rank: checks before the first step, one of which finds a fault on rank 1 alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.model.checks import check_batches, check_loss, check_packing, check_padding
from manyhands.model.loss import LossModel
from manyhands.planner.types import Plan
from manyhands.worker import stages
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")


class OnRanks:
    """A model each pass of which is a collective, as where weights are sharded. ``faulty``: the passes that rank 1
    computes wrongly, counted from 0."""

    def __init__(self, loss_model: LossModel, faulty: int, value: float) -> None:
        self.loss_model, self.faulty, self.value, self.passes = loss_model, faulty, value, 0

    def _compute(self, found: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        is_wrong = dist.get_rank() == 1 and self.passes == self.faulty
        self.passes += 1
        return found + self.value * torch.randn_like(found) if is_wrong else found

    def forward(self, batch: Mapping[str, Any], *, metrics: bool = False) -> Any:
        loss_sum, weight = self.loss_model(batch)["lm"]
        return {"lm": (self._compute(loss_sum), weight)}

    def logits(self, batch: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        return self._compute(self.loss_model.logits(batch, rows))


CHECKS: dict[str, Callable[..., object]] = {
    "loss": check_loss,
    "packing": check_packing,
    "padding": check_padding,
    "batches": partial(check_batches, packing=True),
}


def check(name: str, faulty: int, value: float) -> tuple[str, float]:
    loss_model = LossModel(tiny_model("llama"))
    engine = OnRanks(loss_model, faulty, value)
    return _error_of(lambda: CHECKS[name](engine, loss_model, CPU))


def build_with_failing_kernel(plan: Plan, config: RunConfig) -> tuple[str, float]:
    """The self-test of an attention kernel fails on rank 1."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), CPU)
    rank: Any = SimpleNamespace(plan=plan, config=config, world=world, process=SimpleNamespace(print=lambda _: None))

    def choose(*_: Any, **__: Any) -> Any:
        if world.rank == 1:
            raise UserError("the attention kernel fails its self-test", where="kernels.attention")
        return SimpleNamespace(describe=lambda: "fast")

    with patch("manyhands.convert.attention_kernels.choose_attention_kernels", choose):
        return _error_of(lambda: stages.build_model(rank))


def _error_of(work: Callable[[], object]) -> tuple[str, float]:
    """The error as text and the seconds that it took; the ranks can call another collective together."""
    begun = time.monotonic()
    text = ""
    try:
        work()
    except UserError as error:
        text = str(error)
    together = torch.ones(1)
    dist.all_reduce(together)
    assert together == dist.get_world_size()
    return text, time.monotonic() - begun
