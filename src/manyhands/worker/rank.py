"""What the stages of one rank share."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from manyhands.config.schema import RunConfig
from manyhands.convert.protocol import Converter
from manyhands.core.errors import PeerError, UserError
from manyhands.core.world import World
from manyhands.data.collate import BatchWorkers
from manyhands.data.order import SampleOrder
from manyhands.data.store import TokenStore
from manyhands.engine.native import NativeEngine
from manyhands.launch.environment import Launcher
from manyhands.launch.failure import (
    claim_terminal,
    describe_failure,
    describe_lost,
    looks_like_consequence,
    record_for_torch,
    wait_for_cause,
    write_failure,
)
from manyhands.launch.heartbeat import Heartbeat
from manyhands.launch.run_folder import FolderLock, RunFolder
from manyhands.metrics.sinks import Sink
from manyhands.model.loss import LossModel
from manyhands.plan.types import Plan
from manyhands.train.types import TrainState
from manyhands.worker.signals import StopSignal

DEFAULT_TIMEOUT_S = 600.0  # until the run file is known
HOST_STAGES = (
    "join",
    "agree on run and plan",
    "open data",
    "build model",
    "check model",
    "report",
)  # mostly work of libraries


@dataclass
class Rank:
    """What the stages of one rank share. Fields are set in the order of the stages."""

    launcher: Launcher
    stage: str = "start"
    terminal: TextIO = field(default_factory=lambda: sys.stdout)
    is_reporting: bool = False  # why it ends, or has done so
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
    order: SampleOrder = None  # type: ignore[assignment]
    tokenizer: Any = None
    workers: BatchWorkers | None = None  # processes that collate, while there are any
    # model
    loss_model: LossModel = None  # type: ignore[assignment]
    checkpoint: Path | None = None  # the newest, which the run resumes from
    converters: Sequence[Converter] = ()
    engine: NativeEngine = None  # type: ignore[assignment]
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
        return self.launcher.rank == 0

    @property
    def log(self) -> TextIO | None:
        """This rank's log, once its output goes there and the terminal is kept apart."""
        return sys.stdout if self.terminal is not sys.stdout else None

    def say(self, text: str) -> None:
        """A line for the person at the terminal, kept in the log too; other ranks write it into their logs alone."""
        if self.is_first:
            print(text, file=self.terminal, flush=True)
        if self.log is not None or not self.is_first:
            with contextlib.suppress(OSError):  # a full disk; what the run itself writes will say so
                print(text, flush=True)

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """How far the work between two steps is, for whoever watches."""
        for sink in self.sinks:
            sink.show_progress(stage, done, total)

    def beat(self, step: int | None = None) -> None:
        if self.heartbeat is not None:
            # Before the first step libraries are loaded and blocks compiled.
            self.heartbeat.counts_processor = self.stage in HOST_STAGES or (self.stage == "train" and not step)
            self.heartbeat.beat(self.stage, step)

    def close_heartbeat(self) -> None:
        """This rank leaves in good order: nobody need wait for it, or take it for lost."""
        if self.heartbeat is not None:
            self.heartbeat.close()

    def report_failure(self, error: BaseException) -> None:
        """Why this rank ends: for our launcher, which shows the cause; where somebody else launched us, the rank that
        failed first shows it, before the others learn of it: once they end, their launcher ends this rank too.
        """
        if self.is_reporting:
            return
        self.is_reporting = True
        rank, world_size = self.launcher.rank, self.launcher.world_size
        is_consequence = world_size > 1 and looks_like_consequence(error)
        if not isinstance(error, UserError | PeerError):
            with contextlib.suppress(OSError):  # into the log, whose disk may be full
                traceback.print_exception(error)
        if not is_consequence:
            self._show(
                describe_failure(error, self.stage, rank, self.folder.log(rank) if self.folder is not None else None)
            )
            record_for_torch(error, self.stage, rank)
        if self.folder is not None:
            write_failure(self.folder, rank, self.stage, error, world_size=world_size)
        if not is_consequence:
            self._write_failed(describe_failure(error, self.stage, rank, None), error)
        if is_consequence:
            if self.folder is not None:
                limit_s = self.config.parallel.timeout_s if self.config is not None else DEFAULT_TIMEOUT_S
                wait_for_cause(self.folder, rank, world_size, limit_s)
                self.show_lost(error)
            record_for_torch(error, self.stage, rank)

    def show_lost(self, error: BaseException | None = None) -> None:
        """Where no rank has reported why the run ends, a surviving one shows what it knows."""
        if not self.folder.has_cause():
            text = describe_lost(self.folder, self.launcher.rank, self.stage, error)
            self._show(text)
            self._write_failed(text, error)

    def _write_failed(self, text: str, error: BaseException | None) -> None:
        """Into status.json, where no launcher of ours does it."""
        if self.launcher.kind == "manyhands" or self.folder is None or self.plan is None:
            return
        reason = error if isinstance(error, UserError) else UserError(text.removeprefix("error: "))
        with contextlib.suppress(OSError):
            self.folder.write_failed(reason, self.plan)

    def _show(self, text: str) -> None:
        if self.launcher.kind != "manyhands" and (self.folder is None or claim_terminal(self.folder)):
            print(text, file=self.terminal, flush=True)
