"""A rank as a process of this launcher. One that was killed counts as ended at once, though its last thread gives
memory back for seconds: 7 s where 44 GB were pinned. Imports no torch.
"""

from __future__ import annotations

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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    code = int(fields[_EXIT_CODE]) & 0x7F if len(fields) > _EXIT_CODE else 0  # 0 where this may not be read
    return -code if fields[_STATE] == "Z" and code else None


def await_end(ending: Sequence[RankProcess]) -> None:
    """Returns once nothing of these processes is left, within ``GONE_S``."""
    deadline = time.monotonic() + GONE_S
    while not all(process.is_gone for process in ending) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def await_memory(pids: Sequence[int], needed: int, read_free: Callable[[], int], look: Callable[[], object]) -> None:
    """Returns once ``needed`` bytes are free, or all of the processes ``pids`` have given their memory back, within
    ``GONE_S``. Their parent may be another process. ``look`` is called at each look.
    """
    deadline = time.monotonic() + GONE_S
    while not all(has_given_back(pid) for pid in pids) and time.monotonic() < deadline and read_free() < needed:
        look()
        time.sleep(LOOK_S)


def has_given_back(pid: int) -> bool:
    """Whether a process that has ended holds nothing any more: the last of its threads becomes a zombie, or goes, after
    it has given back what they share.
    """
    folder = Path(f"/proc/{pid}")
    try:
        state = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[_STATE]
        return state in "ZX" and len(list((folder / "task").iterdir())) <= 1
    except (OSError, IndexError):
        return True
