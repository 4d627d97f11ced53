"""Hashes of files, several at a time. Knows neither data nor models.

SHA-256: 1.6 GB/s per core with the processor's own instructions, twice BLAKE2b's rate, and what the hub names weights
by.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

READ_BYTES = 1 << 20
PIECE_BYTES = 64 << 20
MAX_THREADS = 8
REPORT_EVERY_S = 1.0

Progress = Callable[[int], object]


def hash_files(paths: Sequence[Path], progress: Progress = lambda num_bytes: None) -> dict[Path, str]:
    """SHA-256 of each file in hex, as ``sha256sum`` prints it. ``progress`` is called with the bytes hashed so far.

    Raises OSError.
    """
    digests = _hash_stretches([(path, 0, None) for path in paths], progress)
    return {path: digest.hex() for path, digest in zip(paths, digests, strict=True)}


def hash_in_pieces(paths: Sequence[Path]) -> dict[Path, str]:
    """For each file the SHA-256, in hex, of the digests of its 64 MiB pieces, so that all cores share a large file."""
    pieces = [
        (path, start, PIECE_BYTES) for path in paths for start in range(0, max(1, path.stat().st_size), PIECE_BYTES)
    ]
    sums = {path: hashlib.sha256() for path in paths}
    for (path, _, _), digest in zip(pieces, _hash_stretches(pieces), strict=True):
        sums[path].update(digest)
    return {path: whole.hexdigest() for path, whole in sums.items()}


def _hash_stretches(
    stretches: Sequence[tuple[Path, int, int | None]], progress: Progress = lambda num_bytes: None
) -> list[bytes]:
    """Digests of (file, first byte, number of bytes or None for the rest of the file)."""
    ended = threading.Event()
    hashed = [0] * len(stretches)

    def run(index: int) -> bytes:
        path, start, length = stretches[index]
        digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while not ended.is_set() and (length is None or hashed[index] < length):
                count = file.readinto(buffer)
                if not count:
                    break
                count = count if length is None else min(count, length - hashed[index])
                digest.update(memoryview(buffer)[:count])
                hashed[index] += count
        return digest.digest()

    threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        futures = [threads.submit(run, index) for index in range(len(stretches))]
        waiting, reported = set(futures), 0
        while waiting:
            # Not FIRST_COMPLETED: the cost of each return grows with the number of futures left.
            _, waiting = wait(waiting, REPORT_EVERY_S, FIRST_EXCEPTION)
            if sum(hashed) > reported:
                reported = sum(hashed)
                progress(reported)
        return [future.result() for future in futures]
    finally:
        ended.set()  # so that Ctrl-C does not wait for the rest
        threads.shutdown(cancel_futures=True)
