"""A rank's heartbeat: its stage and step in a small file that the launcher reads. Imports no torch.

Two times are kept apart. ``beat`` is when the rank's own work last made progress; ``tick`` is when a background thread
last ran. A rank that waits in a collective still ticks; one that is stopped, or stuck while holding the interpreter,
does not.

What tells the rank that hangs from those that wait for it is no time at all, but its ``position`` in the program that
all ranks run: who waits in a collective has entered one more than the rank it waits for.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from manyhands.core.files import read_json
from manyhands.launch.diagnose.stacks import StackDumper
from manyhands.launch.environment import LAUNCHER_PID
from manyhands.launch.run.folder import RunFolder

TICK_S = 0.5
FRESH_S = 0.02  # writing a record takes some 30 microseconds
ORPHAN_GRACE_S = 20.0
SILENT_S = 300.0  # of a record, which is written twice a second; clocks of machines may differ
START = "start"  # the stage in which a rank imports its libraries
WORKING_CPU_S = 0.01  # between two ticks; waiting for others takes a tenth of it
# Processor time alone counts as progress for so long: compilation of a large model takes minutes, and what spins for an
# hour without another sign is stuck.
WORKING_LIMIT_S = 3600.0
RESERVE_BYTES = 32 * 1024  # for the reason of a failure, should the disk be full by then
_STEP_BYTES = 12
_RECORD_BYTES = 512  # fixed, so that one write replaces the whole record


@dataclass(frozen=True)
class Beat:
    """The last record of a rank. Times are seconds of the machine's monotonic clock."""

    rank: int
    pid: int
    stage: str
    step: int | None
    beat: float
    tick: float
    done: bool = False
    host: str = ""
    num_stages: int = 0  # entered so far, the same one again included
    num_collectives: int = 0  # entered so far
    machine: str = ""  # its name, for people
    begun: int | None = None  # the newest step that it has begun, exact however fast steps are

    @property
    def position(self) -> tuple[int, int, int]:
        """How far the rank has come in the program that all ranks run alike."""
        return self.num_stages, self.step or 0, self.num_collectives

    @property
    def is_gone(self) -> bool:
        """Whether the rank's process has ended before its work was done. Always False for another machine's."""
        if self.done or self.host != this_host():
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"stage '{self.stage}'" + ("" if self.step is None else f", step {self.step}")


class Heartbeat:
    """One rank's heartbeat. ``beat`` costs about a microsecond: a thread writes, twice a second."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        folder.ranks.mkdir(parents=True, exist_ok=True)
        folder.failure(rank).unlink(missing_ok=True)  # of an earlier launch, on a disk its launcher does not see
        folder.reserve(rank).write_bytes(b" " * RESERVE_BYTES)
        self.rank = rank
        self._fd = os.open(folder.beat(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._step_fd = os.open(folder.begun(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._now: tuple[str, int | None, float, int] = (START, None, time.monotonic(), 0)
        self._advanced = 0.0
        self._worked = 0.0  # when processor time last counted as progress
        self.count_collectives: Callable[[], int] = lambda: 0
        self.read_collectives: Callable[[], list[dict[str, Any]]] = list  # the last ones, for ``stacks.Collective``
        self._stack_dumper = StackDumper(folder, rank)
        self.counts_processor = (
            True  # its processor time is a sign of work: where libraries are at work, and no device is waited for
        )
        self._num_collectives = 0
        self._cpu_s = time.process_time()
        self._done = threading.Event()
        self._writing = threading.Lock()
        self._launcher = int(os.environ.get(LAUNCHER_PID, 0))
        self._write()
        threading.Thread(target=self._tick, name="heartbeat", daemon=True).start()

    def beat(self, stage: str, step: int | None = None) -> None:
        """Records progress: new stages at once, steps ``FRESH_S`` apart, the rest with the next tick."""
        before, _, last, num_stages = self._now
        now = time.monotonic()
        self._now = (stage, step, now, num_stages + (stage != before))
        if stage != before or now - last > FRESH_S:
            self._write()

    def begin_step(self, step: int) -> None:
        """Records that a step begins, at once (17 microseconds on a busy core), as steps may be faster than records."""
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._step_fd, f"{step:>{_STEP_BYTES}}".encode(), 0)

    def advance(self) -> None:
        """Records progress in code that knows neither stage nor step."""
        self._advanced = time.monotonic()  # from any thread, so apart from what ``beat`` writes

    def flush(self) -> None:
        """Writes what was recorded last: this rank is about to fail."""
        self._write()

    def close(self) -> None:
        """This rank's work is done: no further beat is expected."""
        if not self._done.is_set():
            self._done.set()
            self._write()

    def _write(self) -> None:
        with self._writing:
            stage, step, beat, num_stages = self._now
            record: dict[str, Any] = {"rank": self.rank, "pid": os.getpid(), "stage": stage[:100], "step": step}
            record["beat"] = max(beat, self._advanced, self._worked)
            record |= {"tick": time.monotonic(), "done": self._done.is_set(), "host": this_host()}
            if not self._done.is_set():
                self._num_collectives = self.count_collectives()
            record |= {"num_stages": num_stages, "num_collectives": self._num_collectives}
            record["machine"] = socket.gethostname()[:64]
            with contextlib.suppress(OSError):  # a full disk: the next tick tries again
                os.pwrite(self._fd, json.dumps(record).encode().ljust(_RECORD_BYTES), 0)

    def _tick(self) -> None:
        while not self._done.wait(TICK_S):
            before, self._cpu_s = self._cpu_s, time.process_time()
            now, last = time.monotonic(), max(self._now[2], self._advanced)
            works = self.counts_processor and self._cpu_s - before > WORKING_CPU_S
            if works and now - last < WORKING_LIMIT_S:  # libraries are at work; unless nothing else moves for too long
                self._worked = now
            self._write()
            self._stack_dumper.dump_if_requested(self.read_collectives)
            if self._launcher and os.getppid() != self._launcher:  # it was killed, and cannot end this rank
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(ORPHAN_GRACE_S)
                os._exit(128 + signal.SIGTERM)


@functools.cache
def this_host() -> str:
    """Equal for two processes exactly if each can see the other; in containers a host name is not enough."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()[:100]


def read_beat(folder: RunFolder, rank: int) -> Beat | None:
    """The rank's last record, or None before its first."""
    fields = read_json(folder.beat(rank))
    return replace(Beat(**fields), begun=read_begun(folder, rank)) if isinstance(fields, dict) else None


def read_beats(folder: RunFolder) -> dict[int, Beat]:
    """The last record of each rank that has written one."""
    beats = (read_json(path) for path in folder.list_ranks("beat-*.json"))
    found = [Beat(**fields) for fields in beats if isinstance(fields, dict)]
    return {beat.rank: replace(beat, begun=read_begun(folder, beat.rank)) for beat in found}


def lives(folder: RunFolder, beat: Beat) -> bool:
    """Whether the rank lives; on another machine, or before a reboot, until its record is ``SILENT_S`` old."""
    if beat.host == this_host():
        return not beat.is_gone
    with contextlib.suppress(OSError):
        return time.time() - folder.beat(beat.rank).stat().st_mtime < SILENT_S
    return False


def was_killed(folder: RunFolder, status: Mapping[str, Any], beats: Mapping[int, Beat]) -> bool:
    """Whether the status is ``running`` though neither rank nor launcher lives (elsewhere: ranks alone)."""
    at_work = [beat for beat in beats.values() if not beat.done]
    if status.get("state") != "running" or any(lives(folder, beat) for beat in at_work):
        return False
    launcher, is_gone = status.get("pid"), bool(at_work)
    if status.get("host", this_host()) == this_host() and isinstance(launcher, int):
        is_gone = not psutil.pid_exists(launcher)
    return is_gone and folder.read_status() == status  # else it has ended by itself since ``status`` was read


def read_begun(folder: RunFolder, rank: int) -> int | None:
    """The newest step that the rank has begun; None before the first."""
    step = read_json(folder.begun(rank))
    return step if isinstance(step, int) else None
