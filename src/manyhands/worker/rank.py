"""What a rank's stages work on. Signals, logs, heartbeats and exit codes belong to the ``Process`` around them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, runtime_checkable

import torch

from manyhands.config.schema import RunConfig
from manyhands.convert.protocol import Converter
from manyhands.core.errors import EXIT_INTERRUPTED
from manyhands.core.world import World
from manyhands.data.batch.order import SampleOrder
from manyhands.data.store.store import TokenStore
from manyhands.launch.run.folder import RunFolder
from manyhands.model.loss import LossModel
from manyhands.planner.types import Plan
from manyhands.training.types import Batch, Engine


class RunEngine(Engine, Protocol):
    """What the stages call of an engine, in addition to the loop. ``engine.apply`` makes the one of the product.

    Where weights are sharded (``is_local`` is false), every rank calls every method, in the same order.
    """

    @property
    def is_local(self) -> bool:
        """Whether this rank can run a forward pass without any other rank."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What ``make_optimizer`` has made."""
        ...

    def make_optimizer(self, plan: Plan, config: RunConfig) -> str:
        """Makes the plan's optimizer, before any ``step`` or ``load``; returns a note for the user or ""."""
        ...

    def drop_gradients(self) -> None:
        """Forgets what backward passes have given since the last step."""
        ...

    def logits(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (b, t, v) of a small batch, by the model's own forward pass, without gradients."""
        ...

    def next_token_logits(self, input_ids: torch.Tensor, entries: Batch | None = None) -> torch.Tensor:
        """Logits (b, v) of the token after ``input_ids`` (b, t), without gradients. ``entries``: further
        inputs of a batch, such as ``position_ids``."""
        ...


@runtime_checkable
class StagesCheckpoints(Protocol):
    """An engine whose state can be saved while it trains on."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """What ``save`` saves, sharing memory with the model and the optimizer."""
        ...

    def before_update(self, call: Callable[[], None]) -> None:
        """``call`` is called once, by the next ``step`` or ``load``, before it changes anything."""
        ...


class Stop:
    """Whether the process was asked to end, and by which signal (0: by none); never, where it receives no signals."""

    number = 0

    def __call__(self) -> bool:
        return bool(self.number)

    @property
    def exit_code(self) -> int:
        return 128 + self.number if self.number else EXIT_INTERRUPTED


class Process:
    """Where the stages report to, and what they ask whether to stop.

    Attributes:
        stage, step: where the rank is; ``step`` counts the steps done.
        stop_by_file, look_again_at: of rank 0: the user's file STOP was there; when it looks for it next, on the
            monotonic clock.
    """

    def __init__(self, *, is_first: bool = True, terminal: TextIO | None = None) -> None:
        self.is_first = is_first
        self.terminal: TextIO = terminal or sys.stdout
        self.log: TextIO | None = None  # this rank's own, where the terminal is another
        self.stop = Stop()
        self.stop_by_file, self.look_again_at = False, 0.0
        self.stage, self.step = "start", 0

    def enter(self, stage: str) -> None:
        """``stage`` begins."""
        self.stage = stage
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """This rank advances; ``step``: the steps done, where they are known."""
        if step is not None:
            self.step = step

    def begin_step(self, step: int) -> None:
        """This rank begins ``step``, 1 for the first."""

    def print(self, text: str) -> None:
        """A line for the terminal, also written to the log; ranks other than 0 write it to their logs alone."""
        if self.is_first:
            print(text, file=self.terminal, flush=True)
        if self.log is not None or not self.is_first:
            with contextlib.suppress(OSError):  # a full disk; what the run itself writes will raise
                print(text, file=self.log or sys.stdout, flush=True)


@dataclass(frozen=True)
class Rank:
    """One rank of a planned run, from rendezvous on."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    world: World
    process: Process


@dataclass(frozen=True)
class Data:
    """The prepared samples of a run, in the order in which they are trained."""

    store: TokenStore
    order: SampleOrder
    tokenizer: Any


@dataclass(frozen=True)
class BuiltModel:
    """The model with its parallelism, its converters and its optimizer."""

    loss_model: LossModel
    engine: RunEngine
    converters: Sequence[Converter]
    measured: Mapping[str, int]  # numbers of its parameters, for the report

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model inside every wrapper; its parameter names are the checkpoint's."""
        return self.loss_model.model
