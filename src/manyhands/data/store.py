"""Tokenized rows on disk: written once in segments, then read row by row by every rank. Knows no tokenizer, no torch.

A store is a folder. End to end for all rows: ``ids.bin`` (int32), ``trained.bin`` (bool, one byte) and, only where some
trained token weighs other than 1, ``weights.bin`` (float32). One entry a row: ``offsets.npy`` (int64, rows + 1) bounds
them, ``num_loss_tokens.npy`` (int32), ``loss_weights.npy`` (float64, beside weights.bin), ``lines.npy`` (int32),
``continued.npy`` (bool: the row goes on where the one before was cut), ``hashes.npy`` (uint64, of the ids) and
``sources.npy`` (int16) describe them. ``train.npy`` and ``validation.npy`` (int64) say which rows belong to which set,
``meta.json`` how it was made.

Nothing is taken on trust. ``meta.json`` holds a hash of itself and of every file. Whoever prepares a run hashes them
all (``check_tokens``); every process that opens the store hashes the tables it reads; and each row has a checksum
(CRC-32; ``checksums.npy``, ``weight_checksums.npy``, uint32) that is compared whenever it is read, so that damage on
another machine's disk, or while the run lasts, is an error and not another row.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.hashing import hash_in_pieces
from manyhands.data.order import EVALUATION_STREAM, SampleOrder, permute

FORMAT_VERSION = 5
TOKEN_FILES = {"ids.bin": np.dtype("<i4"), "trained.bin": np.dtype("?"), "weights.bin": np.dtype("<f4")}


class TokenFile:
    """A token file that is read by the slice.

    Read, not mapped: the pages of a mapping count as this process's memory once it has been through the rows, a page
    fault reads 4 KiB where a row has more, and a file that was cut short would be a bus error.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self._file, self._dtype = path, path.open("rb", buffering=0), dtype

    def __getitem__(self, tokens: slice) -> np.ndarray:
        size = self._dtype.itemsize
        raw = os.pread(
            self._file.fileno(), (tokens.stop - tokens.start) * size, tokens.start * size
        )  # safe in threads: no position
        if len(raw) != (tokens.stop - tokens.start) * size:
            raise damaged_while_open(self, "it was cut short")
        return np.frombuffer(raw, dtype=self._dtype)


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Some rows of a store, numbered from 0; one entry a row in each array.

    ``lengths`` int32 are tokens; ``num_loss_tokens`` int32 are trained tokens after the shift by one
    (``trained[1:].sum()``); ``loss_weights`` float64 are the sums of their weights; ``sources`` int16 are positions in
    ``meta["sources"]``.
    """

    lengths: np.ndarray
    num_loss_tokens: np.ndarray
    loss_weights: np.ndarray
    sources: np.ndarray
    seed: int
    _starts: np.ndarray
    _checksums: np.ndarray
    _ids: np.ndarray | TokenFile
    _trained: np.ndarray | TokenFile
    _weights: np.ndarray | TokenFile | None = None
    _weight_checksums: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def has_weights(self) -> bool:
        """Whether some trained token of the store weighs other than 1."""
        return self._weights is not None

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, trained bool) of one row, not to be written to. UserError where they are not what was written."""
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        ids, trained = self._ids[start:end], self._trained[start:end]
        if checksum_of(ids.data, trained.data) != self._checksums[index]:
            raise damaged_while_open(self._ids, f"{len(ids):,} tokens from token {start:,} on are not what was written")
        return ids, trained

    def weights(self, index: int) -> np.ndarray:
        """float32, one a token of the row, 0 where it is not trained; made of the mask where nothing is weighted."""
        if self._weights is None or self._weight_checksums is None:
            return self.row(index)[1].astype(np.float32)
        start = int(self._starts[index])
        weights = self._weights[start : start + int(self.lengths[index])]
        if zlib.crc32(weights.data) != self._weight_checksums[index]:
            raise damaged_while_open(
                self._weights, f"{len(weights):,} weights from token {start:,} on are not what was written"
            )
        return weights

    def prompt(self, index: int) -> np.ndarray:
        """The ids before the first trained token; of a row that is trained from its start, the first token."""
        ids, trained = self.row(index)
        return ids[: max(1, int(trained.argmax()))]

    def take_tokens(self, max_tokens: int | None) -> np.ndarray:
        """Ids of rows, sorted, that together have at most ``max_tokens`` tokens: the rows of the seeded order, each
        taken if it still fits. None takes all. Raises UserError where not even the shortest row fits."""
        if max_tokens is None:
            return np.arange(self.num_samples, dtype=np.int64)
        taken: list[int] = []
        left, shortest = max_tokens, int(self.lengths.min()) if self.num_samples else 0
        for index in permute(self.num_samples, self.seed, EVALUATION_STREAM):
            if left < shortest:
                break
            if self.lengths[index] <= left:
                taken.append(int(index))
                left -= int(self.lengths[index])
        if not taken and self.num_samples:
            raise UserError(
                f"no validation row fits into evaluate.max_tokens = {max_tokens:,}",
                why=f"the shortest has {shortest:,} tokens",
                fix="raise evaluate.max_tokens",
            )
        return np.array(sorted(taken), dtype=np.int64)


@dataclass(frozen=True)
class TokenStore:
    """An open store. ``digest`` names what it was made of, ``content`` what it holds: equal content, equal tokens and
    sets.
    """

    folder: Path
    train: SampleSet
    validation: SampleSet
    meta: dict[str, Any]

    @property
    def digest(self) -> str:
        return self.meta["digest"]

    @property
    def content(self) -> str:
        """16 hex digits of the hashes of all files."""
        return digest_of(self.meta["files"])[:16]

    @property
    def source_weights(self) -> tuple[float, ...]:
        """How often the rows of each source are taken in an epoch."""
        return tuple(source["weight"] for source in self.meta["sources"])

    @staticmethod
    def open(folder: str | Path, *, check_tokens: bool = False) -> TokenStore:
        """Opens a store; takes some 35 bytes of memory a row. Raises UserError where files are missing or not what was
        written.

        With ``check_tokens`` every file is hashed, else only the tables: rows are checked as they are read.
        """
        folder = Path(folder)
        try:
            meta = _read_meta(folder)
            weighted = meta["weighted"]
            names = ["offsets", "num_loss_tokens", "sources", "checksums", "train", "validation"]
            names += ["loss_weights", "weight_checksums"] if weighted else []
            _compare_hashes(
                folder, meta["files"], list(meta["files"]) if check_tokens else [f"{name}.npy" for name in names]
            )
            tables = {name: _load(folder, name) for name in names}
            offsets = tables["offsets"]
            _check_sizes(folder, meta, int(offsets[-1]))
            ids, trained, *weights = (
                TokenFile(folder / name, dtype)
                for name, dtype in TOKEN_FILES.items()
                if weighted or name != "weights.bin"
            )
        except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                "the token cache is damaged",
                where=str(folder),
                why=str(error),
                fix="delete this folder; it is made again",
            ) from error
        train, validation = (
            SampleSet(
                (offsets[rows + 1] - offsets[rows]).astype(np.int32),
                tables["num_loss_tokens"][rows],
                tables["loss_weights" if weighted else "num_loss_tokens"][rows].astype(np.float64),
                tables["sources"][rows],
                meta["seed"],
                offsets[rows],
                tables["checksums"][rows],
                ids,
                trained,
                weights[0] if weighted else None,
                tables["weight_checksums"][rows] if weighted else None,
            )
            for rows in (tables["train"][:], tables["validation"][:])
        )
        return TokenStore(folder, train, validation, meta)

    def order_samples(
        self, seed: int, batch_samples: int | None = None, batch_loss_tokens: int | None = None
    ) -> SampleOrder:
        """The order of the training rows over a run, each source as often as its weight says. Raises ValueError as
        SampleOrder.
        """
        train = self.train
        return SampleOrder(
            train.num_samples,
            seed,
            batch_samples,
            batch_loss_tokens,
            train.num_loss_tokens,
            sources=train.sources,
            weights=self.source_weights,
        )

    def line(self, row: int) -> int:
        """The source line of a training row."""
        return int(_load(self.folder, "lines")[_load(self.folder, "train")[row]])

    def file_number(self, row: int) -> int:
        """Which file of its source, counted from 0, a training row is from."""
        place, sources = int(_load(self.folder, "train")[row]), _load(self.folder, "sources")
        bounds = np.cumsum(self.meta["made"][int(sources[place])]["rows_of_files"])
        return int(np.searchsorted(bounds, place - int(np.searchsorted(sources, sources[place])), side="right"))


def checksum_of(ids: bytes | memoryview, trained: bytes | memoryview) -> int:
    """CRC-32 of one row's ids and mask, as they lie in the files."""
    return zlib.crc32(trained, zlib.crc32(ids))


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def damaged_while_open(tokens: np.ndarray | TokenFile, why: str) -> UserError:
    """For a process that reads rows: only one that prepares a run can make the cache again."""
    return UserError(
        "the token cache is damaged",
        where=f"{tokens.path} on {socket.gethostname()}" if isinstance(tokens, TokenFile) else "",
        why=why,
        fix="start again: the cache is checked, and made again where it is damaged; a copy on another machine is to be copied again",
    )


def _load(folder: Path, name: str) -> np.ndarray:
    """A table, mapped: pages that are only looked at are shared by all processes."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


def _read_meta(folder: Path) -> dict[str, Any]:
    """Raises ValueError where it is another version's or not what was written."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if meta["version"] != FORMAT_VERSION:
        raise ValueError("it is of another version of manyhands")
    digest = meta.pop("meta_digest")
    if digest_of(meta) != digest:
        raise ValueError("meta.json is not what was written")
    return meta


def _compare_hashes(folder: Path, written: dict[str, str], names: list[str]) -> None:
    """Raises ValueError with the names of the files that are not what was written."""
    found = hash_in_pieces([folder / name for name in names])
    if wrong := [name for name in names if found[folder / name] != written[name]]:
        raise ValueError(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what was written")


def _check_sizes(folder: Path, meta: dict[str, Any], num_tokens: int) -> None:
    """Raises ValueError where a token file does not hold as many entries as there are tokens."""
    for name, dtype in TOKEN_FILES.items():
        if (meta["weighted"] or name != "weights.bin") and (
            folder / name
        ).stat().st_size != dtype.itemsize * num_tokens:
            raise ValueError(f"{name} was cut short")
