"""Prepared images by content, in memory and on disk, within bounds: the least recently used go first. Knows no model.

Processes share the folder on disk, and so do runs with other processors, whose images are in folders of their own in
it: the bound is that of all together. Each process counts what it writes and looks at the whole folder again after a
small part of the bound; a file appears by one rename, and one that cannot be read, or is damaged, is made again. Where
the images of a run need more than the bound, only as many are kept as fit, the same in every epoch, chosen by their
content: to keep all for a while would keep none until it is needed.
"""

import contextlib
import os
import secrets
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np

Entries = dict[str, np.ndarray]

PART_OF_BOUND = 256  # of the bound on disk, that a process writes before it looks at the folder again
KEPT_SHARE = 0.9  # of the bound, that is left when files are removed


class ImageCache:
    """Entries by key (bytes) in ``folder / preparation``. ``needed_bytes``: estimate for the run; 0 keeps all."""

    def __init__(
        self, folder: Path, preparation: str, memory_bytes: int, disk_bytes: int, needed_bytes: int = 0
    ) -> None:
        self.folder, self.preparation = folder, preparation
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._share = min(1.0, disk_bytes / needed_bytes) if needed_bytes else 1.0
        self._held: OrderedDict[bytes, Entries] = OrderedDict()
        self._lock = threading.Lock()  # the threads of training and of evaluation may share a cache
        self.held_bytes = 0
        self._written: int | None = None  # since the folder was looked at; None: not yet

    def get(self, key: bytes, make: Callable[[], Entries]) -> Entries:
        """The entries of a key, not to be written to: those kept, else made now."""
        entries = self.find(key)
        if entries is None:
            entries = make()
            self.put(key, entries)
        return entries

    def find(self, key: bytes) -> Entries | None:
        """Those that are kept, not to be written to; a damaged file is removed, and is as if there had been none."""
        with self._lock:
            entries = self._held.get(key)
            if entries is not None:
                self._held.move_to_end(key)
                return entries
        entries = self._read(key)
        if entries is not None:
            self._hold(key, entries)
        return entries

    def put(self, key: bytes, entries: Entries) -> None:
        """Keeps them as far as the bounds allow."""
        self._write(key, entries)
        self._hold(key, entries)

    def _hold(self, key: bytes, entries: Entries) -> None:
        size = _count_bytes(entries)
        if size > self._memory_bytes:
            return
        with self._lock:
            if key in self._held:
                return
            self._held[key] = entries
            self.held_bytes += size
            while self.held_bytes > self._memory_bytes:
                _, oldest = self._held.popitem(last=False)
                self.held_bytes -= _count_bytes(oldest)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / self.preparation / name[:2] / f"{name}.npz"

    def _read(self, key: bytes) -> Entries | None:
        if not self._disk_bytes:
            return None
        path = self._path(key)
        try:
            with np.load(path, allow_pickle=False) as file:  # a zip, which checks what it reads
                entries = {name: file[name] for name in file.files}
            os.utime(path)  # it was used now
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return entries

    def _write(self, key: bytes, entries: Entries) -> None:
        """A disk that is full or cannot be written keeps nothing: the run does not depend on it."""
        size = _count_bytes(entries)
        if size > self._disk_bytes or int.from_bytes(key[:4], "little") >= self._share * 2**32:
            return
        path = self._path(key)
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    np.savez(file, **entries)  # type: ignore[arg-type]
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._written = size if self._written is None else self._written + size
            if self._written == size or self._written > self._disk_bytes / PART_OF_BOUND:
                self._written = 0
                self._trim()
        except OSError:
            return

    def _trim(self) -> None:
        """Removes files that were not used for the longest time until the folder is within its bound."""
        files = []
        for path, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another process removes, too
                    status = os.stat(place := os.path.join(path, name))
                    files.append((status.st_mtime_ns, status.st_size, place))
        total = sum(size for _, size, _ in files)
        if total <= self._disk_bytes:
            return
        for _, size, path in sorted(files):
            Path(path).unlink(missing_ok=True)
            total -= size
            if total <= KEPT_SHARE * self._disk_bytes:
                return


def _count_bytes(entries: Entries) -> int:
    return sum(values.nbytes for values in entries.values())
