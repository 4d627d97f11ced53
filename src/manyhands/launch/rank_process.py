"""A rank as a process of this launcher. One that was killed counts as ended at once, though its last thread gives
memory back for seconds: 7 s where 44 GB were pinned. Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 0.05
GONE_S = 60.0  # for the memory of a killed process to be given back
_STATE, _EXIT_CODE = 0, 49  # fields of /proc/PID/stat after the name


class RankProcess(subprocess.Popen[bytes]):
    """``poll`` and ``wait`` answer as soon as the process computes no more; ``is_gone`` only when nothing is left."""

    def poll(self) -> int | None:
        code = super().poll()
        return killed_by(self.pid) if code is None else code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            try:
                return super().wait(max(left, 0))
            except subprocess.TimeoutExpired:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
        return code

    @property
    def is_gone(self) -> bool:
        return super().poll() is not None


def killed_by(pid: int) -> int | None:
    """Minus the signal that has ended a process whose first thread is gone; None where it runs, or ended otherwise.

    A signal that is fatal ends all threads. The last one to end gives back what they share, and until then the parent
    is told nothing.
    """
    fields = _read_stat(pid)
    code = int(fields[_EXIT_CODE]) & 0x7F if len(fields) > _EXIT_CODE else 0  # 0 where this may not be read
    return -code if code and fields[_STATE] == "Z" else None


def has_released_memory(pid: int) -> bool:
    """Whether a process that has ended holds no memory any more: the last of its threads becomes a zombie, or is gone,
    after it has released what they share.
    """
    fields = _read_stat(pid)
    try:
        return not fields or (fields[_STATE] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1)
    except OSError:
        return True


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; none where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def await_end(ending: Sequence[RankProcess]) -> None:
    """Returns once nothing of these processes is left, within ``GONE_S``."""
    deadline = time.monotonic() + GONE_S
    while not all(process.is_gone for process in ending) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def await_memory(pids: Sequence[int], needed: int, read_free: Callable[[], int], look: Callable[[], object]) -> None:
    """Returns once ``needed`` bytes are free, or all of the processes ``pids``, which may be another's children, have
    released their memory, or after ``GONE_S``. ``look`` is called each time that it looks again.
    """
    deadline = time.monotonic() + GONE_S
    while not all(has_released_memory(pid) for pid in pids) and time.monotonic() < deadline and read_free() < needed:
        look()
        time.sleep(LOOK_S)
