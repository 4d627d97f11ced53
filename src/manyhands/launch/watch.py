"""The launcher's eye on its ranks: ends, in bounded time, what would wait forever. Knows processes and files, no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field

import psutil

from manyhands.errors import EXIT_FAILED, UserError
from manyhands.launch.failure import log_tail
from manyhands.launch.heartbeat import Beat, read_beat
from manyhands.launch.run_folder import RunFolder

GRACE_S = 10.0  # from the first failure until ranks that have not ended are killed
START_GRACE_S = 30.0  # ranks that wait for a missing one give up by themselves first, and say so better
FROZEN_S = 5.0  # without a tick; a rank that only waits ticks twice a second


@dataclass
class _Seen:
    """How long one rank has not moved, in seconds during which we were looking."""

    beat: Beat | None = None
    still_s: float = 0.0
    frozen_s: float = 0.0

    def look(self, beat: Beat | None, elapsed_s: float) -> None:
        before, self.beat = self.beat, beat if beat is not None else self.beat
        moved = self.beat is not None and (before is None or self.beat.beat != before.beat)
        ticked = self.beat is not None and (before is None or self.beat.tick != before.tick)
        self.still_s = 0.0 if moved else self.still_s + elapsed_s
        self.frozen_s = 0.0 if ticked else self.frozen_s + elapsed_s


@dataclass
class Watch:
    """A thread for the time of one launch. ``verdict`` is why it ended a rank, if it did; ``killed`` the pids it ended;
    ``pids`` all ranks' that it has seen.
    """

    folder: RunFolder
    world_size: int
    timeout_s: float
    grace_s: float = field(default_factory=lambda: GRACE_S)
    verdict: UserError | None = None
    killed: set[int] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)

    def __enter__(self) -> Watch:
        self._ranks = [_Seen() for _ in range(self.world_size)]
        self._first_failure: float | None = None
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
            self._look(min(now - last, 2 * self._poll_s))
            last = now
            if self.verdict is None and self._first_failure is None:
                self._judge()
            self._end_waiting(now)

    def _look(self, elapsed_s: float) -> None:
        for rank, seen in enumerate(self._ranks):
            seen.look(read_beat(self.folder, rank), elapsed_s)
        if len(self.pids) < self.world_size:
            self.pids.update(worker_pids())
        if self._first_failure is None and self.folder.has_failure():
            self._first_failure = time.monotonic()

    def _limit(self, seen: _Seen) -> float:
        return self.timeout_s + (START_GRACE_S if seen.beat is None else 0.0)

    def _judge(self) -> None:
        """Once a rank has not moved for too long: name the one that all others wait for, and kill it."""
        waiting = {r: s for r, s in enumerate(self._ranks) if not (s.beat and (s.beat.done or _is_gone(s.beat.pid)))}
        if not any(seen.still_s >= self._limit(seen) for seen in waiting.values()):
            return
        rank = min(waiting, key=lambda r: self._order(waiting[r]))
        seen = waiting[rank]
        pid = seen.beat.pid if seen.beat else pid_of_rank(rank)
        self.verdict = self._explain(rank, seen, pid, waiting)
        self._first_failure = time.monotonic()
        if pid is not None:
            self._kill(pid)

    def _order(self, seen: _Seen) -> tuple[bool, bool, float]:
        """The culprit sorts first: never started, then frozen, then the one whose work stopped earliest."""
        if seen.beat is None:
            return (False, False, 0.0)
        return (True, seen.frozen_s < min(FROZEN_S, self.timeout_s / 2), seen.beat.beat)

    def _explain(self, rank: int, seen: _Seen, pid: int | None, waiting: dict[int, _Seen]) -> UserError:
        stopped = pid is not None and _is_stopped(pid)
        why = "its process is stopped (SIGSTOP)" if stopped else "it hangs, or waits for something outside"
        if seen.beat is None:
            why = "it never said that it had started"
        others = [f"rank {r}: {s.beat or 'not started'}, still for {s.still_s:.0f} s" for r, s in waiting.items() if r != rank]
        tail = log_tail(self.folder, rank)
        return UserError(
            f"rank {rank} made no progress for {seen.still_s:.0f} s (parallel.timeout_s = {self.timeout_s:g}) and was ended",
            where=f"{seen.beat or 'not started'}; log: {self.folder.log(rank)}",
            why=why + (f"; the end of its log:\n{tail}" if tail else ""),
            fix="read that log; if the stage may take longer than that, raise parallel.timeout_s. The same command resumes",
            details=others,
            exit_code=EXIT_FAILED,
        )

    def _end_waiting(self, now: float) -> None:
        """Ranks that live on after a failure wait for a peer that is gone; torch's agent alone would give them 30 s more."""
        if self._first_failure is None or now - self._first_failure < self.grace_s:
            return
        for pid in worker_pids():
            if pid not in self.killed:
                self._kill(pid)

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
    """SIGKILL to the process and, where it leads its group, to all it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def end_all(pids: set[int]) -> None:
    """After the launch: whatever still lives in the sessions that the ranks led (also children of ranks that are gone)."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getsid(process.pid) in pids:
                process.kill()


def _leads_session(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid) == pid
    return False


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False
