"""Writing safetensors files, hashed on the way; and the process that does it beside the training.

``python shard_writer.py PARENT_PID FD`` imports the standard library alone, so it starts in a few hundredths of a
second and holds no more memory than the mapping it reads. A request is a line of JSON on its input: ``{"room": bytes}``
reserves that much of the shared memory ``FD``; ``{"files": [...]}`` writes files out of it. Answers are lines too,
``{"written": bytes}`` while it writes and one with ``done`` or ``errno`` at the end. It ends with its parent, whatever
ended that.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNK_BYTES = 2**23  # between two reports of progress
PIECE_BYTES = 2**26  # hashed by itself, as in ``core.files.hash_in_pieces``
NICENESS = 5  # data workers and the training come first
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def write_file(
    path: str, parts: Iterable[Any], written: Callable[[int], object] = lambda num_bytes: None
) -> dict[str, Any]:
    """Write ``parts`` (whatever has a buffer) one after the other; return size in bytes and the SHA-256 of the digests
    of 64 MiB pieces once they are on the disk. OSError names the file. ``written`` is called with each chunk's bytes.
    """
    whole, piece, size = hashlib.sha256(), hashlib.sha256(), 0
    try:
        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    chunk = view[: min(CHUNK_BYTES, PIECE_BYTES - size % PIECE_BYTES)]
                    hashed = hasher.submit(piece.update, chunk)  # releases the GIL, as writing does
                    left = chunk
                    try:
                        while left:
                            left = left[file.write(left) :]
                    finally:
                        hashed.result()
                    view, size = view[len(chunk) :], size + len(chunk)
                    if size % PIECE_BYTES == 0:
                        whole.update(piece.digest())
                        piece = hashlib.sha256()
                    written(len(chunk))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error
    if size % PIECE_BYTES or not size:
        whole.update(piece.digest())
    return {"bytes": size, "sha256": whole.hexdigest()}


def serve(fd: int) -> None:
    """Answers requests until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _answer({"done": _carry_out(fd, request)})
        except OSError as error:
            _answer({"errno": error.errno, "why": error.strerror or str(error), "file": error.filename})


def _carry_out(fd: int, request: dict[str, Any]) -> dict[str, Any]:
    if "room" in request:
        os.posix_fallocate(fd, 0, request["room"])  # now, rather than by a signal where memory is first touched
        return {}
    entries = {}
    # The mapping goes with its last slice, which the traceback of a failed write may still hold: closing it would fail.
    view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ))
    for file in request["files"]:
        spans = (view[start : start + length] for start, length in file["spans"])
        parts = (part for group in ((file["header"].encode("latin-1"),), spans) for part in group)
        entries[os.path.basename(file["path"])] = write_file(
            file["path"], parts, lambda num_bytes: _answer({"written": num_bytes})
        )
    return entries


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def end_with(parent: int) -> None:
    """SIGKILL as soon as ``parent`` is gone: nobody would commit, and a later launch may write the same checkpoint."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # meant for the rank, which waits for the files
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    serve(int(sys.argv[2]))
