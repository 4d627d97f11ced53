"""Hooks and metrics of the user's: named by module or file, imported by every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.references import import_reference
from manyhands.core.world import World
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import Plan
from manyhands.training.types import Engine, Evaluation, Hook, TrainState
from manyhands.worker.rank import BuiltModel, Data, Rank


@dataclass(frozen=True)
class HookContext:
    """What a user's hook gets of its rank. ``print`` writes a line to rank 0's terminal and to the rank's log."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    world: World
    tokenizer: Any
    model: nn.Module
    engine: Engine
    print: Callable[[str], None]

    @property
    def is_first(self) -> bool:
        return self.world.is_first


MakeHook = Callable[[HookContext], Hook]


def make_hooks(makers: Sequence[MakeHook], rank: Rank, data: Data, built: BuiltModel) -> list[Hook]:
    """Calls what ``read_hooks`` has found."""
    context = HookContext(
        rank.config,
        rank.plan,
        rank.folder,
        rank.world,
        data.tokenizer,
        built.model,
        built.engine,
        rank.process.print,
    )
    return [make(context) for make in makers]


def read_hooks(hooks: Sequence[Any], metrics: Mapping[str, Any] | Sequence[str] | None) -> list[MakeHook]:
    """Makes hooks once the model is there. ``hooks``, ``metrics``: functions or references. UserError."""
    pairs = metrics.items() if isinstance(metrics, Mapping) else [one.partition("=")[::2] for one in metrics or ()]
    functions = {name: import_reference(one) for name, one in pairs}
    made: list[MakeHook] = [partial(_make, import_reference(hook)) for hook in hooks]
    return [*made, partial(MetricHook, functions=functions)] if functions else made


def _make(function: Callable[[HookContext], Any], rank: HookContext) -> Hook:
    hook = function(rank)
    if not isinstance(hook, Hook):
        raise UserError(
            f"{getattr(function, '__qualname__', function)} returned a {type(hook).__name__}, not a hook",
            fix="return an object of a subclass of manyhands.training.types.Hook",
        )
    return hook


class MetricHook(Hook):
    """Functions of an evaluation, computed by rank 0, which has the answers."""

    def __init__(self, rank: HookContext, functions: Mapping[str, Callable[[Evaluation], float]]) -> None:
        self.rank, self.functions = rank, functions

    def measure(self, state: TrainState, evaluation: Evaluation) -> Mapping[str, float]:
        if not self.rank.is_first:
            return {}
        found = {name: function(evaluation) for name, function in self.functions.items()}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(
                    f"the metric {name!r} is a {type(value).__name__}, not a number", where=f"step {state.step}"
                )
        text = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if math.isfinite(value))
        self.rank.print(f"metrics after step {state.step}: {text}")
        return {name: float(value) for name, value in found.items()}
