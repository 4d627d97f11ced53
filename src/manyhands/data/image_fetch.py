"""Images at addresses while rows are prepared: each address is asked once, whatever number of rows name it, by all
processes of the preparation together. Copies lie in its folder, within a bound, and go with it: the next preparation
asks again.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from collections import OrderedDict
from functools import cached_property
from pathlib import Path

from manyhands.data.image_files import BadImage, read_bytes

MAX_COPIES_BYTES = 16 << 30  # on disk, by all processes
MAX_FAILED = 65_536  # addresses that gave no image, which each process remembers


class FetchedImages:
    """Encoded images by address. ``folder``: of the preparation; None: one of this object's own.

    ``max_bytes``: of copies that are written; what is beyond that is fetched for each row.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_COPIES_BYTES) -> None:
        self._given, self._max_bytes = folder, max_bytes
        self._failed: OrderedDict[str, str] = OrderedDict()

    @cached_property
    def _folder(self) -> Path:
        if self._given is None:
            self._own = tempfile.TemporaryDirectory(prefix="manyhands-images-")  # goes with this object
            return Path(self._own.name)
        self._given.mkdir(parents=True, exist_ok=True)
        return self._given

    def read(self, address: str) -> bytes:
        """The encoded image at an address. Raises BadImage, for each row that names it."""
        if address in self._failed:
            raise BadImage(self._failed[address])
        copy = self._folder / hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
        try:
            with copy.open("ab+", buffering=0) as file:  # others wait for whoever fetches it
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                raw = file.readall()
                if not raw:
                    raw = read_bytes(address)
                    if self._claim(len(raw)) and file.write(raw) != len(raw):
                        file.truncate(0)  # the disk is full
                return raw
        except BadImage as bad:
            self._failed[address] = str(bad)
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            raise
        except OSError:  # a disk that is full or cannot be written keeps nothing
            return read_bytes(address)

    def _claim(self, num_bytes: int) -> bool:
        """Whether so many bytes more are within the bound; then they count."""
        with (self._folder / "bytes").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            total = int(file.read() or b"0") + num_bytes
            if total > self._max_bytes:
                return False
            file.truncate(0)
            file.write(str(total).encode())
        return True
