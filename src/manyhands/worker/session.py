"""One rank as a process: its log and terminal, its signals, its heartbeat, and why it ends. Stages know none of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TextIO

from manyhands.config.schema import RunConfig
from manyhands.core import progress
from manyhands.core.errors import PeerError, UserError
from manyhands.core.text import PrintableStream
from manyhands.launch.diagnose.failure import (
    claim_terminal,
    describe_failure,
    describe_lost,
    find_cause,
    is_lost,
    looks_like_consequence,
    record_for_torch,
    wait_for_cause,
    write_failure,
)
from manyhands.launch.diagnose.stacks import listen_for_signal
from manyhands.launch.environment import Launcher
from manyhands.launch.local.heartbeat import Heartbeat
from manyhands.launch.local.rank_watch import RankWatch, start_beside
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock
from manyhands.planner.types import Plan
from manyhands.training.types import Hook
from manyhands.worker.rank import Process, Stop

DEFAULT_TIMEOUT_S = 600.0  # until the run file is known
HOST_STAGES = (
    "join",
    "agree on run and plan",
    "check machines",
    "open data",
    "build model",
    "check model",
    "report",
)  # mostly work of libraries


class Session(Process):
    """The process around the stages of one rank. ``hooks`` of the loop, besides those of the stages."""

    hooks: Sequence[Hook] = ()

    def __init__(self, launcher: Launcher, *, heartbeat: Heartbeat | None = None) -> None:
        super().__init__(is_first=launcher.rank == 0)
        self.launcher, self.heartbeat = launcher, heartbeat
        # Known from rendezvous on.
        self.folder: RunFolder | None = None
        self.config: RunConfig | None = None
        self.plan: Plan | None = None
        self.lock: FolderLock | None = None  # held while rank 0 lives, where another launcher has started it
        self.store: Any = None  # the ranks' key-value store, where the process has one already
        self.is_reporting = False  # why it ends, or has done so
        self.watch: RankWatch | None = None  # where the launcher does not watch

    def attach(self, folder: RunFolder, config: RunConfig, plan: Plan) -> None:
        """Of a planned run: output goes to the rank's log, signals end the run, and the rank beats."""
        self.terminal = redirect_output(folder.log(self.launcher.rank))
        self.log = sys.stdout
        self.start_heartbeat(folder)
        listen_for_signal(folder, self.launcher.rank)
        self.watch_signals(give_up=lambda: is_lost(folder))
        launcher, timeout_s = self.launcher, config.parallel.timeout_s
        if launcher.kind == "manyhands":
            return
        self.watch = RankWatch(
            folder,
            launcher.world_size,
            timeout_s,
            rank=launcher.rank,
            local_rank=launcher.local_rank,
            report=self.show_end,
        )
        self.watch.start()
        if launcher.world_size == 1:
            start_beside(folder, timeout_s, self.terminal)

    def start_heartbeat(self, folder: RunFolder) -> None:
        if self.heartbeat is None:
            self.heartbeat = Heartbeat(folder, self.launcher.rank)
        progress.listen(self.heartbeat.advance)

    def watch_signals(self, give_up: Callable[[], bool]) -> None:
        """From now on SIGINT and SIGTERM end the run after its step; ``give_up()``: there is no point in waiting."""
        self.stop = StopSignal(give_up=lambda: not self.is_reporting and give_up(), before_exit=self.show_lost)

    def beat(self, step: int | None = None) -> None:
        super().beat(step)
        if self.heartbeat is not None:
            # Before the first step libraries are loaded and blocks compiled.
            is_host_stage = self.stage in HOST_STAGES or (self.stage == "train" and not step)
            self.heartbeat.counts_processor = is_host_stage
            self.heartbeat.beat(self.stage, step)

    def begin_step(self, step: int) -> None:
        if self.heartbeat is not None:
            self.heartbeat.begin_step(step)

    def close_heartbeat(self) -> None:
        """This rank ends as planned: nobody need wait for it, or take it for lost."""
        if self.watch is not None:
            self.watch.close()
        if self.heartbeat is not None:
            self.heartbeat.close()

    def report_failure(self, error: BaseException) -> None:
        """Why this rank ends, for our launcher; under others the first failing rank shows it before the others end."""
        if self.is_reporting:
            return
        self.is_reporting = True
        if self.heartbeat is not None:
            self.heartbeat.flush()
        try:
            self._report(error)
        finally:
            if self.watch is not None:  # until here: a peer whose report is waited for may be stopped
                self.watch.close()

    def _report(self, error: BaseException) -> None:
        rank, world_size, stage = self.launcher.rank, self.launcher.world_size, self.stage
        is_consequence = world_size > 1 and looks_like_consequence(error)
        if not isinstance(error, UserError | PeerError):
            with contextlib.suppress(OSError):  # into the log, whose disk may be full
                traceback.print_exception(error)
        if not is_consequence:
            self._show(describe_failure(error, stage, rank, self.folder.log(rank) if self.folder is not None else None))
            record_for_torch(error, stage, rank)
        if self.folder is not None:
            write_failure(self.folder, rank, stage, error, world_size=world_size)
        if not is_consequence:
            self._write_failed(describe_failure(error, stage, rank, None), error)
        if is_consequence:
            if self.folder is not None:
                limit_s = self.config.parallel.timeout_s if self.config is not None else DEFAULT_TIMEOUT_S
                self.show_lost(error, wait_for_cause(self.folder, rank, world_size, limit_s))
                if self.folder.has_cause():  # of another machine, whose terminal is not this one
                    self._show(str(find_cause(self.folder).error))
            record_for_torch(error, stage, rank)

    def show_end(self) -> None:
        """Why the run ends, as far as any rank knows, in a rank that did not get to say it itself."""
        if self.folder is None:
            return
        if not self.folder.has_cause():
            return self.show_lost()
        cause = find_cause(self.folder).error
        self._show(str(cause))
        self._write_failed(str(cause), cause)
        record_for_torch(cause, self.stage, self.launcher.rank)

    def show_lost(self, error: BaseException | None = None, silent: Collection[int] = ()) -> None:
        """Where no rank has reported why the run ends, a surviving one reports what it has seen."""
        if self.folder is not None and not self.folder.has_cause():
            text = describe_lost(self.folder, self.launcher.rank, self.stage, error, silent)
            self._show(text)
            self._write_failed(text, error)

    def _write_failed(self, text: str, error: BaseException | None) -> None:
        """Into status.json, which our own launcher writes itself."""
        if self.launcher.kind == "manyhands" or self.folder is None or self.plan is None:
            return
        reason = error if isinstance(error, UserError) else UserError(text.removeprefix("error: "))
        with contextlib.suppress(OSError):
            self.folder.write_failed(reason, self.plan)

    def _show(self, text: str) -> None:
        if self.launcher.kind != "manyhands" and (self.folder is None or claim_terminal(self.folder)):
            print(text, file=self.terminal, flush=True)


GRACE_S = 20.0  # below the 30 s after which torch's agent kills, so that the last checkpoint is our own doing


class StopSignal(Stop):
    """Set by the first SIGINT or SIGTERM; and by SIGUSR1, SLURM's notice, where that is blocked: then saving may take
    as long as it does.

    Python runs signal handlers in the main thread only, and that thread may wait inside a collective for a peer that is
    gone. The interpreter's wake-up pipe is written by the C handler itself, so a thread reading it notices at once.
    """

    def __init__(
        self, give_up: Callable[[], bool] = lambda: False, before_exit: Callable[[], object] = lambda: None
    ) -> None:
        """``give_up()``: true when another rank has failed; then ``before_exit()`` is called."""
        self.number = 0
        self._give_up, self._before_exit = give_up, before_exit
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()
        if signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            threading.Thread(target=self._await_notice, name="save-signal", daemon=True).start()

    def _remember(self, number: int, frame: object) -> None:
        self.number = number

    def _await_notice(self) -> None:
        signal.sigwait({signal.SIGUSR1})
        self.number = self.number or signal.SIGUSR1

    def _watch(self) -> None:
        while (first := os.read(self._read, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        for _ in range(int(GRACE_S / 0.5)):
            if self._give_up():
                self._before_exit()
                break
            time.sleep(0.5)
        os._exit(128 + first)


def redirect_output(log: Path) -> TextIO:
    """Sends file descriptors 1 and 2 (C++ too) to ``log``; returns the old stdout, for printable text."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = PrintableStream(os.fdopen(os.dup(1), "wb"), sys.stdout.encoding)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return terminal
