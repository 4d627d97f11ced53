"""Watches the ranks of a launch and ends, in bounded time, what would wait forever; Ctrl-C and SIGTERM in the process
that prepares and launches.

Works on processes and files, without torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import psutil

from manyhands.core.errors import EXIT_FAILED, FAULT, UserError
from manyhands.launch.diagnose import hang
from manyhands.launch.diagnose.failure import log_tail
from manyhands.launch.local.heartbeat import Beat, read_beat
from manyhands.launch.run.folder import RunFolder

GRACE_S = 10.0  # from the first cause until ranks that have not ended are killed
FROZEN_S = 10.0  # without a tick: nothing of Python runs in that process
FROZEN_GRACE_S = 2.0  # the same, once there is a cause
MAX_SHOWN = 8  # ranks on the terminal; the file has all
START_GRACE_S = 30.0  # ranks that wait for a missing one time out first, with a better message


class OtherNodes(Protocol):
    """What a node's watch asks of the others' launchers, where there are several nodes."""

    node: int

    def name_rank(self, rank: int) -> str:
        """``rank 3 on gpu01``."""
        ...

    def read_beats(self) -> Mapping[int, Mapping[str, Any]]:
        """By rank, what the other nodes' watches have sent of their ranks (``Watch.describe_ranks``)."""
        ...

    def kill_ranks(self, ranks: Iterable[int]) -> None:
        """Those of other nodes: their launchers end them."""
        ...


@dataclass
class _Seen:
    """How long one rank has made no progress, in seconds of observation."""

    beat: Beat | None = None
    still_s: float = 0.0
    frozen_s: float = 0.0
    is_stopped: bool = False  # its process, by SIGSTOP

    @property
    def position(self) -> tuple[int, ...]:
        return self.beat.position if self.beat is not None else ()  # less than any

    def look(self, beat: Beat | None, elapsed_s: float) -> None:
        before, self.beat = self.beat, beat if beat is not None else self.beat
        if self.beat is None or before is None:
            moved = ticked = self.beat is not None
        else:
            moved = self.beat.beat != before.beat or self.beat.position != before.position
            ticked = self.beat.tick != before.tick
        self.still_s = 0.0 if moved else self.still_s + elapsed_s
        self.frozen_s = 0.0 if ticked else self.frozen_s + elapsed_s


@dataclass
class Watch:
    """A thread for the time of one launch. ``verdict`` is why it ended a rank, if it did; ``killed`` the pids it ended;
    ``pids`` all ranks' that it has seen.

    Where there are several nodes each watches its own ranks (``local``); node 0 hears of the others' and judges all.
    """

    folder: RunFolder
    world_size: int
    timeout_s: float
    local: range | None = None
    others: OtherNodes | None = None
    grace_s: float = field(default_factory=lambda: GRACE_S)
    verdict: UserError | None = None
    killed: set[int] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)

    def __enter__(self) -> Watch:
        self._ranks = [_Seen() for _ in range(self.world_size)]
        self._caused_at: float | None = None
        self._behind: tuple[tuple[int, ...], list[int]] = ((), [])
        self._behind_s = 0.0  # since it is these that the others wait for
        self._poll_s = min(1.0, self.timeout_s / 10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._poll_s):
            now = time.monotonic()
            # A launcher that was itself stopped (Ctrl-Z, a suspended laptop) must not blame its ranks for the gap.
            elapsed_s = min(now - last, 2 * self._poll_s)
            last = now
            try:
                self._look(elapsed_s)
            except OSError:  # a network file system that does not answer for once must not end the watch
                continue
            if self.verdict is None and self._caused_at is None and self._may_judge():
                self._judge(elapsed_s)
            self._end_waiting(now)

    def _look(self, elapsed_s: float) -> None:
        elsewhere = self.others.read_beats() if self.others is not None else {}
        for rank, seen in enumerate(self._ranks):
            if rank in self.local_ranks:
                seen.look(read_beat(self.folder, rank), elapsed_s)
                seen.is_stopped = seen.beat is not None and _is_stopped(seen.beat.pid)
            else:
                sent = elsewhere.get(rank)
                seen.look(Beat(**sent["beat"]) if sent else None, elapsed_s)
                seen.is_stopped = bool(sent and sent["is_stopped"])
        self._find_pids()
        if self._caused_at is None and (
            self.folder.has_cause() or any(s.beat is not None and s.beat.is_gone for s in self._ranks)
        ):
            self._caused_at = time.monotonic()

    def _find_pids(self) -> None:
        if len(self.pids) < len(self.local_ranks):
            self.pids.update(worker_pids())

    @property
    def local_ranks(self) -> range:
        return range(self.world_size) if self.local is None else self.local

    def _may_judge(self) -> bool:
        return self.others is None or self.others.node == 0

    def all_failed(self) -> bool:
        """Whether every rank of this node has reported a failure."""
        with contextlib.suppress(OSError):  # a disk that does not answer
            return set(self.local_ranks) <= self.folder.read_failures().keys()
        return False

    def describe_ranks(self) -> dict[str, Any]:
        """What node 0 is to know of this node's ranks, as JSON. Files on a network disk would tell it late."""
        seen = {rank: self._ranks[rank] for rank in self.local_ranks}
        return {
            str(rank): {"beat": asdict(one.beat), "is_stopped": one.is_stopped}
            for rank, one in seen.items()
            if one.beat is not None
        }

    def expect_end(self) -> None:
        """Another node has failed: ranks that do not end of themselves are killed after ``grace_s``."""
        if self._caused_at is None:
            self._caused_at = time.monotonic()

    def kill_ranks(self, ranks: Iterable[int] | None = None) -> None:
        """Ranks of this node, all of them by default."""
        self.expect_end()
        for rank in self.local_ranks if ranks is None else ranks:
            beat = self._ranks[rank].beat
            pid = beat.pid if beat is not None else pid_of_rank(rank)
            if pid is not None:
                self._kill(pid)

    def _judge(self, elapsed_s: float) -> None:
        """When no rank that others may wait for makes progress: names the ranks furthest behind, and kills them.

        A rank that is ahead waits for one that is behind, so how long it makes no progress does not matter; the time
        counts from when the other has caught up. A rank that has lost its peers waits for their reports: not judged.
        """
        failed = self.folder.read_failures()
        living = {
            r: s
            for r, s in enumerate(self._ranks)
            if r not in failed and not (s.beat and (s.beat.done or s.beat.is_gone))
        }
        if not living:
            return
        least = min(seen.position for seen in living.values())
        behind = [rank for rank, seen in living.items() if seen.position == least]
        self._behind_s = self._behind_s + elapsed_s if (least, behind) == self._behind else 0.0
        self._behind = (least, behind)
        stopped = [rank for rank, seen in living.items() if seen.is_stopped]
        culprits = stopped or behind
        judged = [living[rank] for rank in {*behind, *stopped}]
        if min(self._behind_s, *(seen.still_s for seen in judged)) < max(self._limit(seen) for seen in judged):
            return
        if len(culprits) > 1:  # equally far: one that does not even tick is stuck, not waiting
            culprits = [rank for rank in culprits if living[rank].frozen_s >= self.timeout_s] or culprits
        self.verdict = self._explain(culprits, living, failed)
        self.verdict.rank = culprits[0] if len(culprits) == 1 else None
        self._end_ranks(culprits)

    def _end_ranks(self, culprits: list[int]) -> None:
        self.kill_ranks(rank for rank in culprits if rank in self.local_ranks)
        if self.others is not None:
            self.others.kill_ranks(rank for rank in culprits if rank not in self.local_ranks)

    def _limit(self, seen: _Seen) -> float:
        return self.timeout_s + (START_GRACE_S if seen.beat is None else 0.0)

    def _explain(self, culprits: list[int], living: dict[int, _Seen], failed: dict[int, dict[str, Any]]) -> UserError:
        rank, seen = culprits[0], living[culprits[0]]
        several = len(culprits) > 1
        who = f"ranks {', '.join(map(str, culprits))}" if several else self._name(rank)
        what = f"{who} made no progress for {seen.still_s:.0f} s (parallel.timeout_s = {self.timeout_s:g})"
        states = {r: self._state_of(r, one) for r, one in living.items()}
        behind, others, cause, kept = hang.diagnose(self.folder, states, culprits, what)
        tail = log_tail(self.folder, rank)
        details = [str(state) for state in (behind[1:] + others)[:MAX_SHOWN]]
        details += [
            f"{self._name(r)}: lost its peers in stage '{f['stage']}': {f['summary'].splitlines()[-1]}"
            for r, f in failed.items()
        ]
        return UserError(
            f"{what} and {'were' if several else 'was'} ended",
            where=f"{seen.beat or 'not started'}; log: {self.folder.log(rank)}",
            why=f"likely cause: {cause}" + (f"; the end of its log:\n{tail}" if tail else ""),
            fix=(f"read {kept}: the stacks and last collectives of all ranks. " if kept else "")
            + "Raise parallel.timeout_s if the stage may take longer; the same command resumes",
            details=details,
            exit_code=EXIT_FAILED,
            kind=FAULT,
        )

    def _state_of(self, rank: int, seen: _Seen) -> hang.RankState:
        process = hang.STOPPED if seen.is_stopped else ""
        is_stuck = seen.beat is not None and seen.frozen_s >= min(self.timeout_s, FROZEN_S)
        return hang.RankState(rank, self._name(rank), seen.beat, seen.still_s, is_stuck, process)

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if self.others is None else self.others.name_rank(rank)

    def _end_waiting(self, now: float) -> None:
        """Ranks that live on after a cause wait for a peer that is gone; torch's agent alone would give them 30 s
        more. One that runs no Python any more handles no signal, and is killed sooner: a kernel launch that finds the
        GPU's queue full waits for the peer's collective, and may hold the GIL meanwhile.
        """
        if self._caused_at is None:
            return
        since_s = now - self._caused_at
        for pid in worker_pids() if since_s >= self.grace_s else self._frozen_pids(since_s):
            if pid not in self.killed:
                self._kill(pid)

    def _frozen_pids(self, since_s: float) -> list[int]:
        """This machine's ranks that have neither failed themselves nor ended, and whose heartbeat has stopped."""
        failed = self.folder.read_failures()
        waiting = {rank: self._ranks[rank] for rank in self.local_ranks if rank not in failed}
        frozen = [one.beat for one in waiting.values() if min(one.frozen_s, since_s) >= FROZEN_GRACE_S]
        alive = worker_pids() if frozen else []
        return [beat.pid for beat in frozen if beat is not None and not beat.done and beat.pid in alive]

    def _kill(self, pid: int) -> None:
        self.killed.add(pid)
        kill_group(pid)


def worker_pids() -> list[int]:
    """This process's children that lead a session of their own, as every rank started by torch's agent does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process().children() if _leads_session(child.pid)]
    return []


def pid_of_rank(rank: int) -> int | None:
    """The child that was started as ``rank``, from its environment."""
    for pid in worker_pids():
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).environ().get("RANK") == str(rank):
                return pid
    return None


def kill_group(pid: int) -> None:
    """SIGKILL to a process and its descendants, and to its process group where it leads one."""
    kill_descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """SIGKILL to all descendants of ``pid`` but this process. Stopped ones would not notice that their parent ended."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if child.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    child.kill()


def end_all(pids: set[int]) -> None:
    """Ends whatever still lives in the sessions that the ranks led, also children of ranks that are gone."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getsid(process.pid) in pids:
                process.kill()


def _leads_session(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid) == pid
    return False


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


class StopRequested(BaseException):
    """This process was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


class Stopped(UserError):
    """``signal`` stopped what no rank was there to end: not an error, so it is not printed as one."""

    def __init__(self, request: StopRequested, what: str, fix: str) -> None:
        super().__init__(f"{request.signal.name}: {what}", fix=fix, exit_code=128 + request.signal)
        self.signal = request.signal

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


@contextlib.contextmanager
def raise_on(*numbers: int) -> Iterator[None]:
    """Within, these signals raise ``StopRequested``; afterwards their handlers are those of before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_request(number: int, frame: object) -> None:
        raise StopRequested(number)

    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, raise_request) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def raise_when_stopped(
    what: str = "stopped while data and plan were being prepared, no rank has started",
    fix: str = "the same command starts it again",
) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM raise ``Stopped``, which says what was stopped and how to go on."""
    try:
        with raise_on(signal.SIGINT, signal.SIGTERM):
            yield
    except StopRequested as asked:
        raise Stopped(asked, what, fix) from None


@contextlib.contextmanager
def on_signals(act: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within, ``act`` is called with each signal that asks this process to end, in a thread, whatever handles it: what
    the interpreter itself writes when one arrives is read there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def read_signals() -> None:
        while data := os.read(read, 16):
            for number in data:
                if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    act(signal.Signals(number))

    thread = threading.Thread(target=read_signals, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()
        os.close(read)


def sleep_unless_stopped(seconds: float) -> signal.Signals | None:
    """Sleeps; returns early with the signal that asks this process to end."""
    try:
        with raise_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            time.sleep(seconds)
    except StopRequested as asked:
        return asked.signal
    return None
