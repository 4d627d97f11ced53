"""What one rank does for ``test_step``: a step and an evaluation of a model with one weight and two loss terms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.schema import StopSection
from manyhands.core.terms import LANGUAGE_MODEL, LossTerm
from manyhands.core.world import World
from manyhands.engine.apply import replicate
from manyhands.engine.native import NativeEngine
from manyhands.training.loop import Loop, evaluate, train
from manyhands.training.step import StepWork, TermWeight
from manyhands.training.types import Hook, TrainState

TOKENS: list[list[float]] = [[1.0], [2.0, 3.0], []]  # the loss of each rank's tokens
ROUTER = [(4.0, 30), (0.0, 0), (6.0, 70)]  # sum and weight of each rank's second term


TERMS = (LANGUAGE_MODEL, LossTerm("router", 0.5))


class TwoTerms(nn.Module):
    optional_parts = None

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        object.__setattr__(self, "model", self)  # what NativeEngine takes for the model inside

    def forward(self, batch: dict[str, Any], metrics: bool = False) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        terms = {name: ((self.w * value).sum(), torch.tensor(float(weight))) for name, (value, weight) in batch.items()}
        return terms | ({"correct": (torch.ones(()), torch.ones(()))} if metrics else {})


class Keep(Hook):
    def after_step(self, state, result):  # type: ignore[no-untyped-def]
        self.result = result


def train_and_evaluate() -> dict[str, float]:
    rank, device = dist.get_rank(), torch.device("cpu")
    model = TwoTerms()
    engine = NativeEngine(model, World(rank, rank, dist.get_world_size(), device), replica=replicate(model, "full"))  # type: ignore[arg-type]
    engine.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own = TOKENS[rank]
    batch = {"lm": (sum(own), len(own)), "router": ROUTER[rank]}
    held_out = evaluate(
        engine,
        nn.Identity(),
        [batch],
        TrainState(),
        num_samples=1,
        num_tokens=3,
        num_loss_tokens={"": 3},
        device=device,
        terms=TERMS,
    )
    weights = {"lm": TermWeight(3, len(own)), "router": TermWeight(100, ROUTER[rank][1])}
    work = StepWork(0, 1.0, 3, 3, 3, 1, weights, [batch])
    keep = Keep()
    train(
        Loop(
            engine=engine,
            schedule=lambda step: 1.0,
            works=[work],
            state=TrainState(),
            stop=StopSection(),
            num_steps=1,
            max_grad_norm=0.0,
            seed=0,
            rank=rank,
            device=device,
            terms=TERMS,
            hooks=[keep],
        )
    )
    return {"gradient": 1 - model.w.item(), "loss": keep.result.loss, **keep.result.terms, "held out": held_out.loss}
