"""What the stages of one rank share. Knows no signals, no log files, no heartbeat and no exit codes: whoever runs the
stages, a worker process or a program that imports them, hands in callables for these.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

import torch

from manyhands.config.schema import RunConfig
from manyhands.convert.protocol import Converter
from manyhands.core.world import World
from manyhands.data.collate import BatchWorkers
from manyhands.data.image_batch import FeatureWork
from manyhands.data.order import SampleOrder
from manyhands.data.store import TokenStore
from manyhands.launch.run_folder import RunFolder
from manyhands.metrics.sinks import Sink
from manyhands.model.loss import LossModel
from manyhands.planner.types import Plan
from manyhands.training.types import Batch, Engine, Hook, TrainState


class RunEngine(Engine, Protocol):
    """What the stages call of an engine beside what the loop does. ``engine.apply`` makes the one of the product.

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
        """Makes the plan's optimizer over the trained parameters, before the first ``step`` or ``load``; returns a note
        for the user, or an empty text.
        """
        ...

    def drop_gradients(self) -> None:
        """Forgets what backward passes have given since the last step."""
        ...

    def logits(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (b, t, v) of a small batch, by the model's own forward pass, without gradients."""
        ...

    def next_token_logits(self, input_ids: torch.Tensor, entries: Batch | None = None) -> torch.Tensor:
        """Logits (b, v) of the token after ``input_ids`` (b, t), without gradients. ``entries``: those of a batch
        beside the ids, such as their images and ``position_ids``."""
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


@dataclass
class RankContext:
    """Fields are set in the order of the stages. The first four are needed by all of them."""

    config: RunConfig = None  # type: ignore[assignment]
    plan: Plan = None  # type: ignore[assignment]
    folder: RunFolder = None  # type: ignore[assignment]
    world: World = None  # type: ignore[assignment]
    # of whoever runs the stages
    stop: Callable[[], bool] = lambda: False  # whether the run shall end after this step
    stop_by_file: bool = False  # of rank 0: the user's file STOP was there
    look_again_at: float = 0.0  # when it looks for that file next, on the monotonic clock
    on_beat: Callable[[str, int | None], object] = lambda stage, step: None  # this rank advances: (stage, step)
    on_step: Callable[[int], object] = lambda step: None  # this rank begins a step
    terminal: TextIO = field(default_factory=lambda: sys.stdout)
    log: TextIO | None = None  # this rank's own, where the terminal is another
    hooks: Sequence[Hook] = ()  # of the loop, beside those of the stages
    make_hooks: Sequence[Callable[[RankContext], Hook]] = ()  # further ones, made when the model is there
    stage: str = "start"
    # data
    store: TokenStore = None  # type: ignore[assignment]
    order: SampleOrder = None  # type: ignore[assignment]
    tokenizer: Any = None
    workers: BatchWorkers | None = None  # processes that collate, while there are any
    features: FeatureWork | None = None  # of images, that are kept, once the model is there
    # model
    checkpoint: Path | None = None  # the newest, which the run resumes from
    converters: Sequence[Converter] = ()
    loss_model: LossModel = None  # type: ignore[assignment]
    engine: RunEngine = None  # type: ignore[assignment]
    state: TrainState = field(default_factory=TrainState)
    sinks: Sequence[Sink] = ()  # of rank 0, while it trains
    # results, for the report
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model inside every wrapper; its parameter names are the checkpoint's."""
        return self.loss_model.model

    @property
    def is_first(self) -> bool:
        return self.world.is_first

    def print(self, text: str) -> None:
        """A line for the terminal, also written to the log; ranks other than 0 write it to their logs alone."""
        if self.is_first:
            print(text, file=self.terminal, flush=True)
        if self.log is not None or not self.is_first:
            with contextlib.suppress(OSError):  # a full disk; what the run itself writes will raise
                print(text, file=self.log or sys.stdout, flush=True)

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """How far the work between two steps is, for the sinks."""
        for sink in self.sinks:
            sink.show_progress(stage, done, total)

    def beat(self, step: int | None = None) -> None:
        """This rank advances."""
        self.on_beat(self.stage, step)
