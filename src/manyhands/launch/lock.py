"""One launch a run folder at a time. The kernel frees the lock when its holder ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable

from manyhands.core.errors import UserError
from manyhands.core.files import read_json
from manyhands.launch.run_folder import RunFolder

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """``flock`` on the folder's ``.lock``, held until ``release`` or the end of this process."""

    def __init__(self, folder: RunFolder, report: Callable[[str], None] = print) -> None:
        """Takes the lock. UserError naming the holder's pid if another launch has it."""
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
                fix="wait for it, end it, or start another run under another name=... (or --fresh)",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            report(
                f"note: {folder.path} lies on a file system without locks; a second launch of this run would not be noticed"
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """The file stays: removing a lock file lets two processes hold two locks of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
