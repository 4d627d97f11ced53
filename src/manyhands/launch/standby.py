"""Processes that stand by to become ranks of this machine, with everything imported that a rank needs and no GPU
touched. A restart would otherwise begin with some ten seconds of imports. Imports no torch.

Those for a restart are started once the ranks have trained for a while, so that a short run does not pay for them, and
after a restart as soon as they train again; as many at once as there are cores for. Each takes a few hundred MiB of
host memory. The first ranks of a launch stand by while it imports torch's agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.files import read_json, write_json
from manyhands.core.machine import count_cores
from manyhands.launch.environment import ATTEMPT, ENDING
from manyhands.launch.heartbeat import read_beat
from manyhands.launch.rank_process import RankProcess, await_end
from manyhands.launch.restarts import TRAINING
from manyhands.launch.run_folder import RunFolder

AFTER_S = 10.0  # of training, of the first attempt
CORES_EACH = 8  # of the machine, for each that imports: four H200s with 64 cores are ready after 14 s in place of 56
LOOK_S = 1.0
IMPORT_S = 120.0  # a machine that takes longer has other troubles
ANSWER_S = 5.0  # of a process that waits
COMMAND = ("-u", "-m", "manyhands.worker")
READY, BEGUN = b"r", b"b"  # what it answers
AGENT = "torch.distributed.launcher.api"
MODULES = ("torch", "transformers", "manyhands", "triton", "numpy", "safetensors", "tokenizers", "pyarrow", "pydantic")
# What torch's agent and the launcher set anew for each attempt. Everything else may be read when a library is imported.
_OF_ATTEMPT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", ATTEMPT, ENDING)  # beginnings of names


@dataclass
class _Standby:
    """One process, and the channel on which it is told to begin."""

    process: RankProcess
    channel: socket.socket
    environment: Mapping[str, str]
    is_ready: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the channel

    def becomes_ready(self) -> bool:
        """Waits for it: a new process would have to import the same."""
        if not self.lock.acquire(timeout=IMPORT_S):  # somebody else waits
            return False
        try:
            self.is_ready = self.is_ready or self.answers(READY, IMPORT_S)
        finally:
            self.lock.release()
        return self.is_ready

    def answers(self, word: bytes, limit_s: float) -> bool:
        """For who has the lock."""
        self.channel.settimeout(limit_s)
        try:
            return self.channel.recv(len(word)) == word
        except OSError:
            return False

    def end(self) -> None:
        self.process.kill()  # after which nobody waits for an answer
        await_end([self.process])
        with self.lock:
            self.channel.close()


class Standbys:
    """Those of one launch, over all of its attempts, and the ranks that they or new processes have become."""

    def __init__(self, after_s: float = AFTER_S) -> None:
        self.after_s = after_s
        self.for_restarts = True  # else for the first ranks alone
        self._waiting: dict[int, _Standby] = {}  # by local rank
        self._environments: dict[int, Mapping[str, str]] = {}  # of the ranks that run
        self._ranks: list[RankProcess] = []
        self._lock = threading.Lock()
        self._attempt: tuple[RunFolder, range] | None = None
        self._num_attempts = 0
        self._closed = threading.Event()
        # Linux takes a child's parent for gone when the thread that started it is: this one stays until the end.
        self._thread = threading.Thread(target=self._run, name="standbys", daemon=True)

    @contextlib.contextmanager
    def serving(self, folder: RunFolder, local: range) -> Iterator[None]:
        """Within, torch's agent gets a process that waits where there is one, and others are made ready for the next
        attempt. ``local``: this machine's ranks, in the order of their local ranks.
        """
        handlers = _handlers()
        if handlers is None:
            yield
            return
        start_anew = handlers._popen

        def start(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
            rank, arguments = handler.local_rank_id, command[1 + len(COMMAND) :]
            if command[: 1 + len(COMMAND)] != (sys.executable, *COMMAND):
                return start_anew(handler, command, environment)
            found = self.take(rank, environment, arguments) or start_anew(handler, command, environment)
            if type(found) is subprocess.Popen:
                found.__class__ = RankProcess  # which adds nothing to what torch has started
            self._environments[rank] = environment
            self._ranks += [found] if isinstance(found, RankProcess) else []
            return found

        handlers._popen = start
        self._attempt = (folder, local)
        self._num_attempts += 1
        if self.for_restarts and not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()
        try:
            yield
        finally:
            self._attempt = None
            handlers._popen = start_anew

    def start_before_agent(self, folder: RunFolder, environments: Sequence[Mapping[str, str]]) -> None:
        """The first ranks: they import while this process imports torch's agent, rather than afterwards.

        ``environments``: of each local rank, as torch's agent is expected to set it.
        """
        if AGENT in sys.modules:
            return
        for local_rank, environment in enumerate(environments):
            if local_rank in self._waiting:  # of an attempt that ended before it had an agent
                continue
            with self._lock, contextlib.suppress(OSError):  # no room for a process: the agent says so
                self._waiting[local_rank] = _start(environment, folder)

    def take(self, local_rank: int, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess | None:
        """The process that stands by for this local rank, which is a rank from now on; None where there is none, or
        none in the same environment. One that still imports is waited for.
        """
        with self._lock:
            found = self._waiting.pop(local_rank, None)
        if found is None:
            return None
        order = json.dumps({"environment": dict(environment), "arguments": list(arguments)}).encode() + b"\n"
        with contextlib.ExitStack() as ending, contextlib.suppress(OSError):
            ending.callback(found.end)
            if _lasting(found.environment) == _lasting(environment) and found.becomes_ready():
                with found.lock:
                    found.channel.sendall(order)
                    has_begun = found.answers(BEGUN, ANSWER_S)  # it leads a session of its own, as every rank does
                if has_begun:
                    ending.pop_all()
                    found.channel.close()
                    return found.process
        return None

    def list_ending(self) -> list[RankProcess]:
        """Ranks that have ended and still give memory back."""
        self._ranks = [rank for rank in self._ranks if not rank.is_gone]
        return [rank for rank in self._ranks if rank.poll() is not None]

    def close(self) -> None:
        """After the last attempt; nothing is left then."""
        self._closed.set()
        with self._lock:
            for one in self._waiting.values():
                one.end()
            self._waiting.clear()
        await_end(self.list_ending())

    def _run(self) -> None:
        trains_since: float | None = None
        while not self._closed.wait(LOOK_S):
            # A disk that does not answer for once, or no room for a process: a restart is slower. But if this thread
            # ended, ranks that it has started would be signalled.
            with contextlib.suppress(OSError):
                attempt = self._attempt
                if attempt is None or not all(_is_training(attempt[0], rank) for rank in attempt[1]):
                    trains_since = None
                    continue
                trains_since = time.monotonic() if trains_since is None else trains_since
                if self._num_attempts > 1 or time.monotonic() - trains_since >= self.after_s:
                    self._make_ready(attempt)

    def _make_ready(self, attempt: tuple[RunFolder, range]) -> None:
        """Those that are missing, a few at once: they share the cores with ranks that train."""
        folder, num_local = attempt[0], len(attempt[1])
        at_once = max(1, count_cores() // CORES_EACH)
        for first in range(0, num_local, at_once):
            local_ranks = range(first, min(first + at_once, num_local))
            for one in [one for rank in local_ranks if (one := self._start_missing(rank, folder)) is not None]:
                one.becomes_ready()
            if self._attempt is not attempt:
                return

    def _start_missing(self, local_rank: int, folder: RunFolder) -> _Standby | None:
        environment = self._environments.get(local_rank)
        with self._lock:
            known = self._waiting.get(local_rank)
            is_there = known is not None and known.process.poll() is None
            if self._closed.is_set() or is_there or environment is None:
                return None
            if known is not None:
                known.end()
            one = self._waiting[local_rank] = _start(environment, folder)
        return one


def write_modules(folder: RunFolder) -> None:
    """In the order in which this process, a rank, has imported them."""
    names = [name for name in sys.modules if name.partition(".")[0] in MODULES]
    write_json(folder.modules, names)


def read_modules(folder: RunFolder) -> list[str]:
    """Of the run's latest ranks; none where they have not come so far."""
    found = read_json(folder.modules)
    return found if isinstance(found, list) else []


def _handlers() -> Any:
    """Torch's class whose ``_popen`` starts a rank; None in a version that has another."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        return SubprocessHandler if callable(SubprocessHandler._popen) else None
    return None


def _start(environment: Mapping[str, str], folder: RunFolder) -> _Standby:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid()), str(folder.path)]
        command = [sys.executable, "-u", "-m", "manyhands.worker.standby", *arguments]
        process = RankProcess(command, env=dict(environment), pass_fds=[theirs.fileno()])
    return _Standby(process, ours, environment)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OF_ATTEMPT)}


def _is_training(folder: RunFolder, rank: int) -> bool:
    beat = read_beat(folder, rank)
    return beat is not None and beat.stage in TRAINING and beat.step is not None and not beat.is_gone
