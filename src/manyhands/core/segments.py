"""Memory that outlives the process that writes it: one file without a name for each rank of this machine, held open by
the launcher. Imports no torch.

A segment has two slots. A writer takes the slot that is not the newest, clears its commit word, writes, and sets it
again: one that is killed meanwhile leaves the other slot whole. The memory goes with the launcher, however that ends,
and no /dev/shm limits it. Where another node keeps copies (``launch/neighbors.py``), the segment says which step has
been copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

SEGMENTS = "MANYHANDS_SEGMENTS"  # environment of a rank: the files, by local rank, separated by colons
COPIED = "MANYHANDS_SEGMENTS_COPIED"  # set where another node keeps copies
HEADER_BYTES = mmap.PAGESIZE
_SIZE = struct.Struct("<Q")  # of a slot, at the beginning
_COMMIT = struct.Struct("<QQ")  # of each slot: step + 1 (0: nothing whole), bytes
_COPIED = struct.Struct("<Q")  # step + 1 of the snapshot that was copied last
_COPIED_AT = _SIZE.size + 2 * _COMMIT.size
_NO_MORE = 2**64 - 1  # nobody copies any more
_DIGEST_AT = 1024  # of each slot: SHA-256
UNKNOWN = bytes(32)  # in place of a digest
HUGE_PAGE = 2**21  # bytes
_MAP_FIXED = 0x10  # Linux's, as all that is used here


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """A nameless file's memory, mapped at a multiple of ``HUGE_PAGE``, without which the kernel cannot give it huge
    pages. Unmapped when the last view of it is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def map_at(address: int | None, size: int, *flags: int) -> int:
        found = int(libc.mmap(address, size, *flags, 0) or 0)
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    room = map_at(None, num_bytes + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    begin = -(-room // HUGE_PAGE) * HUGE_PAGE
    map_at(begin, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    memory = (ctypes.c_char * num_bytes).from_address(begin)
    weakref.finalize(memory, libc.munmap, room, num_bytes + HUGE_PAGE).atexit = False  # others may still use it then
    return memoryview(memory).cast("B")


class Segment:
    """One rank's two slots, in any process that may open ``path``."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: memoryview | None = None
        self._map()

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        self._memory = map_shared(self._fd, size) if size else None

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

    def free_if_empty(self) -> None:
        """Frees the memory if it holds no snapshot; else it stays until the launcher ends. No view may be in use."""
        if not self.committed():
            self._memory = None
            os.ftruncate(self._fd, 0)

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
        self._set_digest(slot, UNKNOWN)
        begin = HEADER_BYTES + slot * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def commit(self, slot: int, step: int, num_bytes: int, digest: bytes = UNKNOWN) -> None:
        """The slot's first ``num_bytes`` are the snapshot of ``step``; ``digest`` is their SHA-256."""
        assert self._memory is not None
        self._set_digest(slot, digest)
        _COMMIT.pack_into(self._memory, self._at(slot), step + 1, num_bytes)

    def is_copied(self) -> bool:
        """Whether the newest snapshot has been copied, or none is copied any more."""
        newest = max((self._read(slot)[0] for slot in (0, 1)), default=0) if self._memory is not None else 0
        return newest == 0 or self._copied() in (newest, _NO_MORE)

    def _copied(self) -> int:
        assert self._memory is not None
        return int(_COPIED.unpack_from(self._memory, _COPIED_AT)[0])

    def digest(self, slot: int) -> bytes:
        """SHA-256 of what was committed, or ``UNKNOWN``."""
        assert self._memory is not None
        return bytes(self._memory[_digest_at(slot) : _digest_at(slot) + len(UNKNOWN)])

    def _set_digest(self, slot: int, digest: bytes) -> None:
        assert self._memory is not None
        self._memory[_digest_at(slot) : _digest_at(slot) + len(UNKNOWN)] = digest

    def clear_damaged(self) -> list[int]:
        """Clears slots whose content is not what was copied of them; returns their steps. Those of which no digest is
        known are taken as they are.
        """
        damaged = []
        for step, slot in self.committed().items():
            if self.digest(slot) not in (UNKNOWN, hashlib.sha256(self.read(slot)).digest()):
                self.clear(slot).release()
                damaged.append(step)
        return damaged

    def slots(self) -> memoryview:
        """The memory of both."""
        assert self._memory is not None
        return self._memory[HEADER_BYTES:]

    def read(self, slot: int) -> memoryview:
        """What was committed."""
        assert self._memory is not None
        begin = HEADER_BYTES + slot * self.slot_bytes
        return self._memory[begin : begin + self._read(slot)[1]]

    def _read(self, slot: int) -> tuple[int, int]:
        assert self._memory is not None
        step, num_bytes = _COMMIT.unpack_from(self._memory, self._at(slot))
        return step, num_bytes

    @staticmethod
    def _at(slot: int) -> int:
        return _SIZE.size + slot * _COMMIT.size


def _digest_at(slot: int) -> int:
    return _DIGEST_AT + slot * len(UNKNOWN)


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot as another process finds it."""

    slot: int
    step: int
    num_bytes: int
    slot_bytes: int


class SegmentReader:
    """Reads a segment that a rank is using. By calls and not by a mapping: the rank may make the file shorter at any
    moment, and what a mapping has beyond a file's end kills whoever touches it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def newest(self) -> StoredSnapshot | None:
        header = os.pread(self._fd, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES:
            return None
        (slot_bytes,) = _SIZE.unpack_from(header)
        found = [(*_COMMIT.unpack_from(header, _SIZE.size + slot * _COMMIT.size), slot) for slot in (0, 1)]
        step, num_bytes, slot = max(found)
        return StoredSnapshot(slot, step - 1, num_bytes, slot_bytes) if step else None

    def read_into(self, memory: memoryview, of: StoredSnapshot, begin: int) -> int:
        """Bytes of the snapshot from ``begin`` on; how many there were."""
        wanted = min(len(memory), of.num_bytes - begin)
        at = HEADER_BYTES + of.slot * of.slot_bytes + begin
        return os.preadv(self._fd, [memory[:wanted]], at)

    def last_copied(self) -> int | None:
        """The step."""
        word = os.pread(self._fd, _COPIED.size, _COPIED_AT)
        step = _COPIED.unpack(word)[0] if len(word) == _COPIED.size else 0
        return step - 1 if step not in (0, _NO_MORE) else None

    def mark_copied(self, of: StoredSnapshot, digest: bytes) -> None:
        os.pwrite(self._fd, digest, _digest_at(of.slot))
        os.pwrite(self._fd, _COPIED.pack(of.step + 1), _COPIED_AT)

    def begin_copies(self) -> None:
        """Nothing is copied yet."""
        if os.fstat(self._fd).st_size >= HEADER_BYTES:
            os.pwrite(self._fd, _COPIED.pack(0), _COPIED_AT)

    def end_copies(self) -> None:
        """Nobody copies any more: nothing is to be waited for."""
        if os.fstat(self._fd).st_size >= HEADER_BYTES:
            os.pwrite(self._fd, _COPIED.pack(_NO_MORE), _COPIED_AT)


class RankSegments:
    """Those of a launcher's own ranks, or those that it keeps for another's. ``environment`` tells ranks where."""

    def __init__(self, num_local: int) -> None:
        """OSError where the system has none."""
        self._fds = [os.memfd_create(f"manyhands-snapshot-{rank}") for rank in range(num_local)]
        self.paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def reader(self, rank: int) -> SegmentReader:
        """Of a local rank's, for as long as these are open."""
        return SegmentReader(self._fds[rank])

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
