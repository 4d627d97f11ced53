"""Memory that outlives the process that writes it: one file without a name for each rank of this machine, held open by
the launcher. Imports no torch.

A segment has two slots. A writer takes the slot that is not the newest, clears its commit word, writes, and sets it
again: one that is killed meanwhile leaves the other slot whole. The memory goes with the launcher, however that ends,
and no /dev/shm limits it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping

SEGMENTS = "MANYHANDS_SEGMENTS"  # environment of a rank: the files, by local rank, separated by colons
HEADER_BYTES = mmap.PAGESIZE
_SIZE = struct.Struct("<Q")  # of a slot, at the beginning
_COMMIT = struct.Struct("<QQ")  # of each slot: step + 1 (0: nothing whole), bytes


class Segment:
    """One rank's two slots, in any process that may open ``path``."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._map()

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        self._memory = mmap.mmap(self._fd, size) if size else None

    @property
    def slot_bytes(self) -> int:
        """Room for one snapshot; 0 before ``make_room``."""
        return _SIZE.unpack_from(self._memory)[0] if self._memory is not None else 0

    def make_room(self, slot_bytes: int) -> None:
        """Two slots of this size, empty. OSError where the memory cannot be had."""
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = None  # a mapping beyond the file's end kills whoever reads it
        os.ftruncate(self._fd, 0)
        os.posix_fallocate(self._fd, 0, HEADER_BYTES + 2 * slot_bytes)
        self._map()
        assert self._memory is not None
        _SIZE.pack_into(self._memory, 0, slot_bytes)

    def close(self) -> None:
        """What was read stays valid."""
        self._memory = None
        os.close(self._fd)

    def committed(self) -> dict[int, int]:
        """Steps of the snapshots that are whole, with their slots."""
        found = (self._read(slot)[0] for slot in (0, 1)) if self._memory is not None else ()
        return {step - 1: slot for slot, step in enumerate(found) if step}

    def oldest(self) -> int:
        """The slot to write next."""
        return min((0, 1), key=lambda slot: self._read(slot)[0])

    def clear(self, slot: int) -> memoryview:
        """The slot's memory, no longer valid until ``commit``."""
        assert self._memory is not None
        _COMMIT.pack_into(self._memory, self._at(slot), 0, 0)
        begin = HEADER_BYTES + slot * self.slot_bytes
        return memoryview(self._memory)[begin : begin + self.slot_bytes]

    def commit(self, slot: int, step: int, num_bytes: int) -> None:
        assert self._memory is not None
        _COMMIT.pack_into(self._memory, self._at(slot), step + 1, num_bytes)

    def slots(self) -> memoryview:
        """The memory of both."""
        assert self._memory is not None
        return memoryview(self._memory)[HEADER_BYTES:]

    def read(self, slot: int) -> memoryview:
        """What was committed."""
        assert self._memory is not None
        begin = HEADER_BYTES + slot * self.slot_bytes
        return memoryview(self._memory)[begin : begin + self._read(slot)[1]]

    def _read(self, slot: int) -> tuple[int, int]:
        assert self._memory is not None
        step, num_bytes = _COMMIT.unpack_from(self._memory, self._at(slot))
        return step, num_bytes

    @staticmethod
    def _at(slot: int) -> int:
        return _SIZE.size + slot * _COMMIT.size


class RankSegments:
    """Those of a launcher's own ranks. ``environment`` tells them where."""

    def __init__(self, num_local: int) -> None:
        """OSError where the system has none."""
        self._fds = [os.memfd_create(f"manyhands-snapshot-{rank}") for rank in range(num_local)]
        self.paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    @property
    def environment(self) -> Mapping[str, str]:
        return {SEGMENTS: ":".join(self.paths)}

    def newest_step(self) -> int | None:
        """Of a snapshot that all ranks that keep one have."""
        found = []
        for path in self.paths:
            if os.stat(path).st_size:
                with contextlib.closing(Segment(path)) as segment:
                    found.append(set(segment.committed()))
        return max(set.intersection(*found), default=None) if found else None

    def clear(self) -> None:
        """Forgets all snapshots; the ranks that wrote them have ended."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)

    def close(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds, self.paths = [], []


@contextlib.contextmanager
def open_segments(num_local: int) -> Iterator[RankSegments | None]:
    """Segments while a launch lasts; None where the system has none."""
    try:
        segments = RankSegments(num_local)
    except (OSError, AttributeError):
        yield None
        return
    try:
        yield segments
    finally:
        segments.close()
