"""What a converter is: one feature that changes the model before training, such as an adapter or a quantized weight.

A converter is told when the model is on meta, when its weights are loaded and when the first step is near; it changes
the module tree and its own parameters, and nothing else. It must not know ranks, files of the run or the loop; the
model may be sharded by the time its weights are there. torchtitan's ``ModelConverter`` is the model for this
(torchtitan/protocols/model_converter.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from manyhands.config.schema import MethodSection, RunConfig
from manyhands.model.loss import LossModel
from manyhands.planner.types import Plan, method_of


@dataclass(frozen=True)
class Context:
    """What a converter may know of the run. ``device`` is where the model computes.

    ``resumes``: a checkpoint will be loaded over whatever values ``after_load`` leaves.
    """

    config: RunConfig
    plan: Plan
    device: torch.device
    resumes: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        dtype: torch.dtype = getattr(torch, self.plan.layout.compute_dtype)
        return dtype

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def method(self) -> MethodSection:
        return method_of(self.plan, self.config)


class TrainedModel(Protocol):
    """The model as it will be trained, under any strategy; what self-tests call. Every rank makes the same calls."""

    def forward(
        self, batch: Mapping[str, Any], *, metrics: bool = False
    ) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]: ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None: ...

    def drop_gradients(self) -> None: ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Finding:
    """What a self-test found: a line for the log, and values for the report."""

    text: str
    measured: Mapping[str, float] = field(default_factory=dict)


class Converter(Protocol):
    """The hooks, in the order in which they are called; of several converters in the order of the plan."""

    def on_meta(self, model: Any) -> None:
        """Change the transformers model while it is on meta and not sharded. UserError where it cannot be done."""

    def on_loss(self, loss_model: LossModel) -> None:
        """Change how the loss is computed; ``loss_model`` is the model with its loss around it, still on meta."""

    def after_load(self, model: Any) -> None:
        """Fill what no file holds. The weights are there, sharded or not; every rank calls this, so it may gather."""

    def before_first_step(self, model: Any, trained: TrainedModel, batch: Mapping[str, Any]) -> Finding | None:
        """A self-test on a real micro-batch, each rank its own; UserError where the feature is not accurate enough.
        ``model`` is the transformers model within ``trained``.
        """

    def describe(self) -> Sequence[str]:
        """Lines for the log: what was changed, and why not more. Asked after ``on_meta`` and again after
        ``after_load``.
        """


class BaseConverter:
    """A converter that does nothing: each feature overrides the hooks that it needs."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.lines: list[str] = []  # what it says of itself

    def on_meta(self, model: Any) -> None:
        pass

    def on_loss(self, loss_model: LossModel) -> None:
        pass

    def after_load(self, model: nn.Module) -> None:
        pass

    def before_first_step(self, model: nn.Module, trained: TrainedModel, batch: Mapping[str, Any]) -> Finding | None:
        return None

    def describe(self) -> Sequence[str]:
        return tuple(self.lines)
