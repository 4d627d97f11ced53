"""Processes that collate batches ahead. They import no torch, map the same files, and end when their pipe closes.

A batch is a function of (samples, shape) alone, so it does not matter which process makes it, nor in which attempt of the
run: results are taken in the order in which they were asked. Knows nothing of steps, ranks or devices.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.data.collate import Arrays, Samples, Shape, collate_samples

OpenSamples = Callable[[], Mapping[str, Samples]]  # called once in each process; pickled to get there


def open_store_samples(folder: str | Path) -> Mapping[str, Samples]:
    """The sample sets of a token store, by name."""
    from manyhands.data.store import TokenStore

    store = TokenStore.open(folder)
    return {"train": store.train, "validation": store.validation}


class BatchWorkers:
    """``num_workers`` processes, started once and used by every stream of batches until ``close``."""

    def __init__(self, open_samples: OpenSamples, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would carry threads' locks and the device's state along
        self._lock = threading.Lock()
        self._pipes: list[Connection] = []
        self._processes = []
        self._busy: dict[int, int] = {}  # process -> the ticket whose result it owes; it gets no other before
        self._done: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._next_ticket = 0
        for number in range(num_workers):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(open_samples, theirs), name=f"{number}-manyhands-collate", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        atexit.register(self.close)  # before multiprocessing's own, which would wait for processes that wait for us

    @property
    def num_workers(self) -> int:
        return len(self._pipes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def collate(self, name: str, shape: Shape, units: Iterable[np.ndarray]) -> Generator[Arrays, None, None]:
        """The batches of sample set ``name``, one for each unit of sample numbers, in order; ``num_workers`` units are in work at
        once.

        Raises what collation raised, and UserError where a process has died.
        """
        tickets: deque[int] = deque()
        try:
            for rows in units:
                tickets.append(self._submit((name, rows, shape)))
                if len(tickets) == self.num_workers:
                    yield self._receive(tickets.popleft())
            while tickets:
                yield self._receive(tickets.popleft())
        finally:
            with self._lock:
                self._dropped.update(ticket for ticket in tickets if self._done.pop(ticket, None) is None)

    def close(self) -> None:
        """Ends the processes. Nothing can be asked afterwards."""
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _submit(self, task: tuple[str, np.ndarray, Shape]) -> int:
        with self._lock:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            number = ticket % self.num_workers
            self._collect(number)
            try:
                self._pipes[number].send(task)
            except OSError:
                raise self._why_dead(number) from None
            self._busy[number] = ticket
            return ticket

    def _receive(self, ticket: int) -> Arrays:
        with self._lock:
            if ticket not in self._done:
                self._collect(ticket % self.num_workers)
            result = self._done.pop(ticket)
        if isinstance(result, BaseException):
            raise result
        return result

    def _collect(self, number: int) -> None:
        """Takes the result that process ``number`` owes, if it owes one: another stream may have asked for it."""
        ticket = self._busy.pop(number, None)
        if ticket is None:
            return
        try:
            result = self._pipes[number].recv()
        except (EOFError, OSError):
            raise self._why_dead(number) from None
        if ticket in self._dropped:
            self._dropped.discard(ticket)
        else:
            self._done[ticket] = result

    def _why_dead(self, number: int) -> UserError:
        process = self._processes[number]
        process.join(timeout=5.0)
        code = process.exitcode
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        return UserError(
            f"a process that prepares batches {how}",
            where=f"data.workers, process {process.pid}",
            why="something outside the run ended it; where memory is short, the system does",
            fix="start again: the run goes on from its newest checkpoint; or lower data.workers (0: one thread of the rank itself)",
            exit_code=EXIT_FAILED,
        )


def _serve(open_samples: OpenSamples, pipe: Connection) -> None:
    # Ctrl-C and a cluster's SIGTERM reach the whole group; the rank finishes its step and saves, and needs its batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sample_sets: Mapping[str, Samples] | None = None
    while True:
        try:
            name, rows, shape = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            sample_sets = open_samples() if sample_sets is None else sample_sets
            result: Any = collate_samples(sample_sets[name], rows, shape)
        except Exception as error:
            result = _portable(error)
        try:
            pipe.send(result)
        except OSError:
            return


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
