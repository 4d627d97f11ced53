"""This process as one rank of a run, where torchrun, accelerate or SLURM has started it with a script of the user's.

The script's output, signals and environment are its own: they are as before when the run ends, and the process lives
on. Imports torch.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.api.callbacks import Callbacks
from manyhands.config.schema import RunConfig
from manyhands.core import progress
from manyhands.core.errors import EXIT_INTERRUPTED, PeerError
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import Launcher, detect_launcher
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.resume import identify_rows
from manyhands.metrics.sinks import JsonlSink, Outcome
from manyhands.planner.types import Plan
from manyhands.worker.rank import Stop
from manyhands.worker.rendezvous import PREPARE_TIMEOUT_S, FirstRankFailed, broadcast_from_rank0, open_store
from manyhands.worker.run import run_rank
from manyhands.worker.session import DEFAULT_TIMEOUT_S, Session

_STORE: list[Any] = []  # of all runs of this process: rank 0 may serve it, at one port
_NUM_RUNS = 0
HEAD_START_S = 5.0  # of rank 0 with its error: launchers end all ranks as soon as one has ended


def run_as_rank(
    load: Callable[[], LoadedRun],
    *,
    fresh: bool,
    callbacks: Callbacks,
    hooks: Sequence[Any] = (),
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Runs every stage in this process; returns the run's folder. ``load`` is called by rank 0 alone.

    Raises ``UserError``, ``PeerError`` on ranks that another one has failed, ``KeyboardInterrupt`` and ``SystemExit``
    where this process was asked to end, when the state is saved.
    """
    launcher = detect_launcher()
    session = RankInProcess(launcher, callbacks)
    session.store = _open_store(launcher)
    arguments = argparse.Namespace(run=None, overrides=[], run_folder=None, fresh=fresh)
    arguments.load, arguments.hook, arguments.metric = lambda arguments, launcher: load(), hooks, metrics
    with _restored():
        try:
            code = run_rank(session, arguments)
        except BaseException as error:
            _keep(session)
            session.report_failure(error)
            if isinstance(error, FirstRankFailed):
                time.sleep(HEAD_START_S)
                raise PeerError("rank 0 could not start the run; its own message says why") from None
            raise
        finally:
            session.close()
    assert session.folder is not None
    if callbacks.error is not None:
        raise callbacks.error
    if code == 0:
        return session.folder.path
    number = session.stop.number
    if number == 0:
        raise PeerError("another rank was asked to end the run; its state is saved")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(code)


def run_on_first_rank(launcher: Launcher, work: Callable[[], object]) -> None:
    """Rank 0 works; the others return when it has, or raise where it could not."""

    def run() -> str:
        work()
        return ""

    try:
        broadcast_from_rank0(_open_store(launcher), launcher.rank, "work", run, PREPARE_TIMEOUT_S)
    except FirstRankFailed:
        time.sleep(HEAD_START_S)
        raise PeerError("rank 0 has failed; its own message says why") from None


class RankInProcess(Session):
    """The session of a rank whose process belongs to somebody else."""

    def __init__(self, launcher: Launcher, callbacks: Callbacks) -> None:
        super().__init__(launcher)
        self.sink = CallbackSink(callbacks)
        self.stop: StopAsked = StopAsked(callbacks)
        if self.is_first:
            self.hooks = (self.sink,)
        else:
            self.terminal = open(os.devnull, "w")

    def attach(self, folder: RunFolder, config: RunConfig, plan: Plan) -> None:
        folder.logs.mkdir(parents=True, exist_ok=True)
        self.log = log = open(folder.log(self.launcher.rank), "a", encoding="utf-8")
        self.sink.explain = lambda: self.sink.callbacks.explain(folder, log)
        self.sink.every_steps = config.log.every_steps
        self.sink.run = identify_rows(config, plan)
        self.start_heartbeat(folder)
        self.stop.listen()

    def close(self) -> None:
        """Releases what the run held in this process."""
        self.close_heartbeat()
        progress.listen(None)
        if self.lock is not None:
            self.lock.release()
        for file in (self.log, self.terminal if not self.is_first else None):
            if file is not None:
                file.close()

    def _keep_traceback(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            traceback.print_exception(error, file=self.log)

    def _show(self, text: str) -> None:
        """The error is raised, which shows it."""


class StopAsked(Stop):
    """Ctrl-C, SIGTERM or a callback's error end the run after its step. A second signal acts as outside of a run."""

    def __init__(self, callbacks: Callbacks) -> None:
        self.number, self.callbacks = 0, callbacks
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return bool(self.number) or self.callbacks.error is not None

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.number = number
        signal.signal(number, self._before[number])


class CallbackSink(JsonlSink):
    """The caller's functions, with the rows of metrics.jsonl."""

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks, self.every_steps, self.run, self._devices = callbacks, 1, "", []
        self.explain: Callable[[], None] = lambda: None  # what a callback has raised, once the folder is known

    def close(self, outcome: Outcome = "finished") -> None:
        pass

    def _put(self, row: dict[str, Any]) -> None:
        before = self.callbacks.error
        self.callbacks(row)
        if self.callbacks.error is not before:
            self.explain()


def _open_store(launcher: Launcher) -> Any:
    """The store of all ranks, with keys of its own for each run of this process."""
    global _NUM_RUNS
    _NUM_RUNS += 1
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        if not _STORE:
            _STORE.append(open_store(launcher, DEFAULT_TIMEOUT_S))
        store = _STORE[0]
    return dist.PrefixStore(f"run-{_NUM_RUNS}", store)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Afterwards the environment, the threads and the handlers of signals are those of before."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _keep(session: Session) -> None:
    """Never freed: freeing a gloo group while its peer lives on was seen to hang, also as the interpreter ends."""
    for kept in (session, dist.group.WORLD if dist.is_initialized() else None):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
