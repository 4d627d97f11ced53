"""Who may write into a run's folder: one launch at a time, also where another machine's has ended without a word."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_json
from manyhands.launch.run.folder import RunFolder

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
TOUCH_S, QUIET_S = 2.0, 10.0  # between two heartbeats of a lock's holder; without one for so long it is gone


class FolderLock:
    """``flock`` on the folder's ``.lock``, held until ``release`` or the end of this process."""

    def __init__(self, folder: RunFolder, report: Callable[[str], None] = print) -> None:
        """Takes the lock. UserError naming the holder's pid if another launch has it."""
        self._released, self._beats = threading.Event(), False
        self._fd: int | None = os.open(folder.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            holder = read_json(folder.lock_file) or {}
            raise UserError(
                "this run is already running",
                where=str(folder.path),
                why=f"process {holder.get('pid', '?')} on {holder.get('host', '?')} holds it",
                fix="wait for it, stop it, or start another run under another name=... (or --fresh)",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            report(
                f"note: {folder.path} is on a file system without locks;"
                " a second launch of this run would not be noticed"
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def start_heartbeat(self) -> None:
        """Touches the file every ``TOUCH_S`` until ``release``: other machines may not share its lock."""
        if not self._beats:
            self._beats = True
            threading.Thread(target=self._touch, name="lock", daemon=True).start()

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_S):
            with contextlib.suppress(OSError, TypeError):  # a disk that does not answer; released meanwhile
                os.utime(self._fd)  # type: ignore[arg-type]

    def release(self) -> None:
        """The file stays: removing a lock file lets two processes hold two locks of one name."""
        if self._fd is not None:
            self._released.set()
            os.close(self._fd)
            self._fd = None


TakeLock = Callable[[RunFolder, Callable[[str], None]], FolderLock]


def take_over(folder: RunFolder, wait_s: float, report: Callable[[str], None] = print) -> FolderLock:
    """Take the lock of a launch whose node 0 is lost, once it is free and its heartbeat has stopped for ``QUIET_S``.

    Retries for ``wait_s``, because a file server may take a while to notice that a machine is gone. UserError if the
    lock is still held after that: node 0 is alive, and the run continues there.
    """
    deadline, quiet_since, newest = time.monotonic() + wait_s, time.monotonic(), -1
    while True:
        touched = _touched_at(folder.lock_file)
        now = time.monotonic()
        if touched != newest:
            newest, quiet_since = touched, now
        if now - quiet_since >= QUIET_S:
            try:
                return FolderLock(folder, report)
            except UserError as error:
                if now >= deadline:
                    raise _left_out(folder, error.why) from None
        elif now >= deadline:
            raise _left_out(folder, "the process that holds its lock still updates it")
        time.sleep(0.5)


def _touched_at(file: Path) -> int:
    """In nanoseconds of the disk's clock; the file is opened, as a network disk may show what it knew before else."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def _left_out(folder: RunFolder, why: str) -> UserError:
    return UserError(
        "this node has lost contact with the others, and the run continues without it",
        where=str(folder.path),
        why=why,
        fix="see why this machine cannot reach node 0; once the run has ended, the same command on every node resumes",
        exit_code=EXIT_FAILED,
    )
