"""What the stages of one rank share."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from manyhands.config.schema import RunConfig
from manyhands.data.order import RowOrder
from manyhands.data.store import TokenStore
from manyhands.data.workers import BatchWorkers
from manyhands.errors import UserError
from manyhands.launch.failure import write_failure
from manyhands.launch.foreign import Launcher
from manyhands.launch.heartbeat import Heartbeat
from manyhands.launch.lock import FolderLock
from manyhands.launch.run_folder import RunFolder
from manyhands.model.loss import LossModel
from manyhands.parallel.model import Parallel
from manyhands.parallel.world import World
from manyhands.plan.types import Plan
from manyhands.train.types import TrainState
from manyhands.worker.signals import StopSignal


@dataclass
class Rank:
    """What the stages of one rank share. Fields are set in the order of the stages."""

    launcher: Launcher
    stage: str = "start"
    terminal: TextIO = field(default_factory=lambda: sys.stdout)
    # agree
    config: RunConfig = None  # type: ignore[assignment]
    plan: Plan = None  # type: ignore[assignment]
    folder: RunFolder = None  # type: ignore[assignment]
    heartbeat: Heartbeat | None = None
    lock: FolderLock | None = None  # held while rank 0 of a foreign launcher lives
    stop: StopSignal = None  # type: ignore[assignment]
    world: World = None  # type: ignore[assignment]
    # data
    store: TokenStore = None  # type: ignore[assignment]
    order: RowOrder = None  # type: ignore[assignment]
    tokenizer: Any = None
    workers: BatchWorkers | None = None  # processes that collate, while there are any
    # model
    loss_model: LossModel = None  # type: ignore[assignment]
    adapted: list[str] = field(default_factory=list)
    parallel: Parallel = None  # type: ignore[assignment]
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    state: TrainState = field(default_factory=TrainState)
    # results, for the report
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model inside every wrapper; its parameter names are the checkpoint's."""
        return self.loss_model.model

    @property
    def is_first(self) -> bool:
        return self.launcher.rank == 0

    def say(self, text: str) -> None:
        """A line for the person at the terminal; other ranks write it into their logs."""
        print(text, file=self.terminal if self.is_first else sys.stdout, flush=True)

    def beat(self, step: int | None = None) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(self.stage, step)

    def report_failure(self, error: BaseException) -> None:
        """Where our launcher watches, it shows the first failure; where somebody else launched us, each rank shows its own."""
        if self.folder is not None:
            write_failure(self.folder, self.launcher.rank, self.stage, error)
        if self.launcher.kind != "manyhands" and isinstance(error, UserError):
            print(error, file=self.terminal, flush=True)
