"""Host memory that a checkpoint is copied into, shared with the process that writes it to disk. One per rank.

The memory is a nameless file (``memfd_create``), which no /dev/shm limits; on a GPU's host it is pinned, so that copies
run beside the training. Nothing else of the rank is seen by the writing process, which imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint import shard_writer
from manyhands.checkpoint.pinning import align, cut, lengths_in_pieces, pin, unpin
from manyhands.checkpoint.shards import ShardFile

Spans = Mapping[str, Sequence[tuple[int, int]]]  # of each file's pieces in the memory: (start, bytes)

HUGE_PAGE = 2**21  # bytes
_MAP_FIXED = 0x10  # Linux's


class NoRoom(Exception):
    """The host memory cannot be had; ``str`` says why."""


class WriterEnded(OSError):
    """The writing process is gone: not by anything that the run did."""


class Staging:
    """``num_bytes`` of memory and its writing process. The memory is there once ``make_room`` has returned."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Starts the process. For the main thread: with the thread that starts it the process ends."""
        self.num_bytes, self._device = num_bytes, device
        self._memory: memoryview | None = None
        self._buffer: torch.Tensor | None = None
        self._is_pinned = False
        self.hurry = threading.Event()  # set by whoever waits for the room
        try:
            self._fd = os.memfd_create("manyhands-checkpoint")
        except (OSError, AttributeError) as error:  # not on this system
            raise NoRoom(str(error)) from error
        command = [sys.executable, "-S", "-I", shard_writer.__file__, str(os.getpid()), str(self._fd)]
        try:
            os.ftruncate(self._fd, num_bytes)
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(self._fd,), text=True
            )
        except OSError as error:  # no further process is allowed
            os.close(self._fd)
            raise NoRoom(f"its writing process cannot be started: {error.strerror or error}") from error

    def make_room(self) -> None:
        """Reserves and pins the memory, with pauses for training until ``hurry`` is set. Thread-safe. NoRoom."""
        try:
            self._ask({"room": self.num_bytes})
        except OSError as error:
            raise NoRoom(error.strerror or str(error)) from error
        self._memory = map_shared(self._fd, self.num_bytes)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            if status := pin(self._buffer, self._device, self.hurry):
                self._buffer = self._memory = None  # nothing will be staged: the memory is of use elsewhere
                os.ftruncate(self._fd, 0)
                raise NoRoom(f"the memory cannot be pinned (CUDA error {status})")
            self._is_pinned = True

    def copy(self, files: Sequence[ShardFile], spans: Spans, *, on_host: bool) -> None:
        """Copies the pieces on a GPU, or those ``on_host``, to ``place``; on the current stream, without waiting."""
        assert self._buffer is not None, "make_room comes first"
        for file in files:
            for piece, (begin, num_bytes) in zip(file.pieces, spans[file.name], strict=True):
                if (piece.tensor.device.type == "cpu") == on_host:
                    target = self._buffer[begin : begin + num_bytes].view(piece.tensor.dtype).view(piece.tensor.shape)
                    lengths = lengths_in_pieces(begin, piece.tensor)
                    for to, part in zip(cut(target, lengths), cut(piece.tensor, lengths), strict=True):
                        to.copy_(part, non_blocking=True)

    def write(
        self,
        folder: Path,
        files: Sequence[ShardFile],
        spans: Spans,
        written: Callable[[int], object],
    ) -> dict[str, Any]:
        """Has the process write ``files`` from ``copy``; returns size and hash of each. OSError names the file."""
        wanted = [
            {"path": str(folder / file.name), "header": file.header.decode("latin-1"), "spans": spans[file.name]}
            for file in files
        ]
        return self._ask({"files": wanted}, written, folder)

    def _ask(
        self, request: dict[str, Any], written: Callable[[int], object] = lambda _: None, folder: Path | None = None
    ) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            answer = json.loads(line)
            if "done" in answer:
                return answer["done"]
            if "errno" in answer:
                raise OSError(answer["errno"], answer["why"], answer["file"])
            written(answer["written"])
        code = self._process.wait()
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        raise WriterEnded(0, f"the process that writes checkpoints {how}", str(folder) if folder is not None else None)

    def close(self) -> None:
        """Ends the process and frees the memory."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self._is_pinned and self._buffer is not None:
            unpin(self._buffer, self._device)
        self._buffer = None  # the mapping goes with the last tensor that shares it
        self._memory = None
        os.close(self._fd)


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """A nameless file's memory at a multiple of ``HUGE_PAGE``, for huge pages. Unmapped with its last view."""
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


def place(files: Sequence[ShardFile]) -> dict[str, list[tuple[int, int]]]:
    """Where in the memory each file's pieces lie: (start, bytes)."""
    end = 0
    spans: dict[str, list[tuple[int, int]]] = {}
    for file in files:
        spans[file.name] = []
        for piece in file.pieces:
            spans[file.name].append((end, piece.num_bytes))
            end = align(end + piece.num_bytes)
    return spans


def count_staged_bytes(files: Sequence[ShardFile]) -> int:
    """Memory that ``Staging.copy`` needs for them; at least one page."""
    return max(mmap.PAGESIZE, sum(align(piece.num_bytes) for file in files for piece in file.pieces))
