"""A rank as a process of this launcher. One whose threads are all exiting counts as ended at once, though the last of
them gives memory back for seconds: 7 s where 44 GB were pinned. Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 0.05
GONE_S = 60.0  # for the memory of a killed process to be given back
_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # fields of /proc/PID/stat after the name
_EXITING = 0x4  # Linux's PF_EXITING


class RankProcess(subprocess.Popen[bytes]):
    """``poll`` and ``wait`` answer as soon as the process computes no more; ``is_gone`` only when nothing is left."""

    def poll(self) -> int | None:
        code = super().poll()
        return exit_code_of(self.pid) if code is None else code

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


def exit_code_of(pid: int) -> int | None:
    """The code of a process whose threads are all exiting or gone, as ``Popen.poll`` has it; None where one computes,
    or the code may not be read.

    A fatal signal and ``os._exit`` end all threads. The last one to end gives back what they share, and until then the
    parent is told nothing.
    """
    fields = _read_stat(pid)
    status = int(fields[_EXIT_CODE]) if len(fields) > _EXIT_CODE else 0  # 0 where this may not be read, or of success
    if not status or not _is_exiting(fields):
        return None
    try:
        threads = [_read_stat(pid, thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        threads = []  # gone since
    if not all(_is_exiting(thread) for thread in threads if thread):
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _is_exiting(fields: list[str]) -> bool:
    return fields[_STATE] in "ZX" or bool(int(fields[_FLAGS]) & _EXITING)


def has_released_memory(pid: int) -> bool:
    """Whether a process that has ended holds no memory any more: the last of its threads becomes a zombie, or is gone,
    after it has released what they share.
    """
    fields = _read_stat(pid)
    try:
        return not fields or (fields[_STATE] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1)
    except OSError:
        return True


def _read_stat(pid: int, thread: str = "") -> list[str]:
    """The fields of /proc/PID/stat after the name, or of a thread's; none where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat").read_text(
            encoding="utf-8", errors="replace"
        )
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
