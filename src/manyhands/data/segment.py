"""Writing a store: segments, each by one process, joined in order. Knows neither rows' meaning nor processes.

A segment is a folder with the token files and tables of the rows of one part. Joining copies them end to end, and
forgets each once it is copied, so that the disk holds the tokens once and one segment twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from manyhands.core.hashing import hash_in_pieces
from manyhands.data.store import FORMAT_VERSION, TOKEN_FILES, checksum_of, digest_of

COPY_BYTES = 8 << 20
TABLES: dict[str, tuple[str, Any]] = {  # what array.array calls it while it grows, and the dtype on disk
    "lengths": ("i", np.int32),
    "num_loss_tokens": ("i", np.int32),
    "loss_weights": ("d", np.float64),
    "lines": ("i", np.int32),
    "continued": ("b", np.bool_),
    "checksums": ("I", np.uint32),
    "weight_checksums": ("I", np.uint32),
    "hashes": ("Q", np.uint64),  # of the ids: equal where two rows have the same tokens
}
WEIGHT_TABLES = ("loss_weights", "weight_checksums")  # beside weights.bin only


class SegmentWriter:
    """Writes rows one by one into a folder; memory holds some 30 bytes a row, no tokens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._ids = (folder / "ids.bin").open("wb")
        self._trained = (folder / "trained.bin").open("wb")
        self._weights: BinaryIO | None = None  # opened by the first row that needs it
        self._tables: dict[str, array[Any]] = {name: array(code) for name, (code, _) in TABLES.items()}
        self.num_tokens = 0

    @property
    def num_samples(self) -> int:
        return len(self._tables["lines"])

    def append(
        self,
        ids: np.ndarray,
        trained: np.ndarray,
        line: int,
        weights: np.ndarray | None = None,
        continued: bool = False,
    ) -> None:
        """One row: ``ids`` int32, ``trained`` bool, ``weights`` float32 or None where every trained token weighs 1, all
        (T).
        """
        if weights is not None and self._weights is None:
            self._trained.flush()
            self._weights = (self.folder / "weights.bin").open("wb")
            sums = write_mask_as_weights(self.folder / "trained.bin", self._tables["lengths"], self._weights)
            self._tables["weight_checksums"] = array("I", sums)
        raw_ids, raw_trained, weight_checksum = ids.astype("<i4", copy=False).tobytes(), trained.tobytes(), 0
        self._ids.write(raw_ids)
        self._trained.write(raw_trained)
        if self._weights is not None:
            raw_weights = (trained if weights is None else weights).astype("<f4", copy=False).tobytes()
            self._weights.write(raw_weights)
            weight_checksum = zlib.crc32(raw_weights)
        num_loss_tokens = int(np.count_nonzero(trained[1:]))
        loss_weight = num_loss_tokens if weights is None else float(weights[1:].sum(dtype=np.float64))
        checksum = checksum_of(raw_ids, raw_trained)
        digest = int.from_bytes(hashlib.blake2b(raw_ids, digest_size=8).digest(), "little")
        values = (len(ids), num_loss_tokens, loss_weight, line, continued, checksum, weight_checksum, digest)
        for name, value in zip(TABLES, values, strict=True):
            self._tables[name].append(value)
        self.num_tokens += len(ids)

    def finish(self) -> None:
        """Writes the tables. The segment is whole afterwards, though the disk may not have it yet."""
        self.close()
        for name, (_, dtype) in TABLES.items():
            np.save(self.folder / f"{name}.npy", np.array(self._tables[name], dtype=dtype), allow_pickle=False)

    def close(self) -> None:
        """Lets go of the files without finishing."""
        for file in (self._ids, self._trained, self._weights):
            if file is not None:
                file.close()


def write_mask_as_weights(trained: Path, lengths: Iterable[int], weights: BinaryIO) -> list[int]:
    """Appends the weights of rows that have none of their own: 1 for each trained token. Returns their checksums."""
    sums = []
    with trained.open("rb") as file:
        for length in lengths:
            raw = np.frombuffer(file.read(length), dtype=np.bool_).astype("<f4").tobytes()
            weights.write(raw)
            sums.append(zlib.crc32(raw))
    return sums


def join_segments(folder: Path, segments: Sequence[Path], sources: Sequence[int]) -> dict[str, np.ndarray]:
    """Joins segments into the token files and tables of ``folder`` and removes them; returns the tables.

    ``sources[i]`` is the source of segment i. The result does not depend on how rows were divided into segments.
    """
    weighted = any((segment / "weights.bin").exists() for segment in segments)
    parts = [{name: np.load(segment / f"{name}.npy", allow_pickle=False) for name in TABLES} for segment in segments]
    files = {name: (folder / name).open("wb") for name in TOKEN_FILES if weighted or name != "weights.bin"}
    try:
        for segment, part in zip(segments, parts, strict=True):
            for name, file in files.items():
                if (segment / name).exists():
                    with (segment / name).open("rb") as part_file:
                        shutil.copyfileobj(part_file, file, COPY_BYTES)
                else:
                    sums = write_mask_as_weights(segment / "trained.bin", part["lengths"].tolist(), file)
                    part["weight_checksums"] = np.array(sums, dtype=np.uint32)
            shutil.rmtree(segment)
        for file in files.values():
            _sync(file)
    finally:
        for file in files.values():
            file.close()
    tables = {
        name: np.concatenate([part[name] for part in parts]) for name in TABLES if weighted or name not in WEIGHT_TABLES
    }
    tables["sources"] = np.repeat(np.array(sources, dtype=np.int16), [len(part["lines"]) for part in parts])
    tables["offsets"] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(tables.pop("lengths"), dtype=np.int64)])
    save_tables(folder, tables)
    return tables


def save_tables(folder: Path, tables: Mapping[str, np.ndarray]) -> None:
    """Each as ``name.npy``, forced onto the disk."""
    for name, table in tables.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, table, allow_pickle=False)
            _sync(file)


def finish_store(folder: Path, train: np.ndarray, validation: np.ndarray, meta: Mapping[str, Any]) -> None:
    """Says which rows belong to which set, and hashes all files. ``meta.json`` comes last: a store with it is whole."""
    save_tables(folder, {"train": train.astype(np.int64), "validation": validation.astype(np.int64)})
    hashes = hash_in_pieces(sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".npy")))
    body = {
        "version": FORMAT_VERSION,
        "weighted": (folder / "weights.bin").exists(),
        "files": {path.name: digest for path, digest in hashes.items()},
        **meta,
    }
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps({"meta_digest": digest_of(body), **body}, indent=1).encode())
        _sync(file)


def link_tokens(store: Path, folder: Path) -> bool:
    """Gives ``folder`` the token files and tables of another store, by hard links; False where the disk cannot."""
    linked: list[Path] = []
    try:
        for path in store.iterdir():
            if path.suffix in (".bin", ".npy") and path.stem not in ("train", "validation"):
                os.link(path, folder / path.name)
                linked.append(folder / path.name)
    except OSError:
        for path in linked:
            path.unlink()
        return False
    return True


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
