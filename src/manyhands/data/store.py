"""Tokenised rows on disk: written once in segments, then read row by row by every rank. Knows no tokenizer, no torch.

A store is a folder. End to end for all rows: ``ids.bin`` (int32), ``trained.bin`` (bool, one byte) and, only where some
trained token weighs other than 1, ``weights.bin`` (float32). One entry a row: ``offsets.npy`` (int64, rows + 1) bounds
them, ``num_targets.npy`` (int32), ``target_weights.npy`` (float64, beside weights.bin), ``lines.npy`` (int32),
``continued.npy`` (bool: the row goes on where the one before was cut) and ``sources.npy`` (int16) describe them.
``train.npy`` and ``validation.npy`` (int64) say which rows belong to which set, ``meta.json`` how it was made.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.order import EVALUATION_STREAM, RowOrder, permute
from manyhands.errors import UserError

FORMAT_VERSION = 3
TOKEN_FILES = {"ids.bin": np.dtype("<i4"), "trained.bin": np.dtype("?"), "weights.bin": np.dtype("<f4")}


class TokenFile:
    """A token file that is read by the slice.

    Read, not mapped: the pages of a mapping count as this process's memory once it has been through the rows, a page fault
    reads 4 KiB where a row has more, and a file that was cut short would be a bus error.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file, self._dtype = path.open("rb", buffering=0), dtype

    def __getitem__(self, tokens: slice) -> np.ndarray:
        size = self._dtype.itemsize
        raw = os.pread(self._file.fileno(), (tokens.stop - tokens.start) * size, tokens.start * size)  # safe in threads: no position
        if len(raw) != (tokens.stop - tokens.start) * size:
            raise UserError(
                "the token cache is damaged", where=self._file.name, why="it was cut short", fix="start again; it is made again"
            )
        return np.frombuffer(raw, dtype=self._dtype)


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some rows of a store, numbered from 0; one entry a row in each array.

    ``lengths`` int32 are tokens; ``num_targets`` int32 are trained tokens after the shift by one (``trained[1:].sum()``);
    ``target_weights`` float64 are the sums of their weights; ``sources`` int16 are positions in ``meta["sources"]``.
    """

    lengths: np.ndarray
    num_targets: np.ndarray
    target_weights: np.ndarray
    sources: np.ndarray
    seed: int
    _starts: np.ndarray
    _ids: np.ndarray | TokenFile
    _trained: np.ndarray | TokenFile
    _weights: np.ndarray | TokenFile | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def has_weights(self) -> bool:
        """Whether some trained token of the store weighs other than 1."""
        return self._weights is not None

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, trained bool) of one row, not to be written to."""
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return self._ids[start:end], self._trained[start:end]

    def weights(self, index: int) -> np.ndarray:
        """float32, one a token of the row, 0 where it is not trained; made of the mask where nothing is weighted."""
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return self._trained[start:end].astype(np.float32) if self._weights is None else self._weights[start:end]

    def prompt(self, index: int) -> np.ndarray:
        """The ids before the first trained token; of a row that is trained from its start, the first token."""
        ids, trained = self.row(index)
        return ids[: max(1, int(trained.argmax()))]

    def take_tokens(self, max_tokens: int | None) -> np.ndarray:
        """Ids of rows, sorted, that together have at most ``max_tokens`` tokens: the rows of the seeded order, each taken
        if it still fits. None takes all. Raises UserError where not even the shortest row fits."""
        if max_tokens is None:
            return np.arange(self.num_rows, dtype=np.int64)
        taken: list[int] = []
        left, shortest = max_tokens, int(self.lengths.min()) if self.num_rows else 0
        for index in permute(self.num_rows, self.seed, EVALUATION_STREAM):
            if left < shortest:
                break
            if self.lengths[index] <= left:
                taken.append(int(index))
                left -= int(self.lengths[index])
        if not taken and self.num_rows:
            raise UserError(
                f"no validation row fits into evaluate.max_tokens = {max_tokens:,}",
                why=f"the shortest has {shortest:,} tokens",
                fix="raise evaluate.max_tokens",
            )
        return np.array(sorted(taken), dtype=np.int64)


@dataclass(frozen=True)
class TokenStore:
    """An open store. ``digest`` names its content: equal digest, equal rows taken equally often."""

    folder: Path
    train: RowSet
    validation: RowSet
    meta: dict[str, Any]

    @property
    def digest(self) -> str:
        return self.meta["digest"]

    @property
    def source_weights(self) -> tuple[float, ...]:
        """How often the rows of each source are taken in an epoch."""
        return tuple(source["weight"] for source in self.meta["sources"])

    @staticmethod
    def open(folder: str | Path) -> TokenStore:
        """Opens a store; takes some 30 bytes of memory a row. Raises UserError where files are missing or cut short."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            offsets, num_targets, sources = (_load(folder, name) for name in ("offsets", "num_targets", "sources"))
            weighted = meta["weighted"]
            target_weights = _load(folder, "target_weights") if weighted else num_targets
            _check(folder, meta, int(offsets[-1]), [len(offsets) - 1, len(num_targets), len(sources), len(target_weights)], weighted)
            ids, trained, *weights = (
                TokenFile(folder / name, dtype) for name, dtype in TOKEN_FILES.items() if weighted or name != "weights.bin"
            )
            sets = [_load(folder, name)[:] for name in ("train", "validation")]
        except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                "the token cache is damaged", where=str(folder), why=str(error), fix="delete this folder; it is made again"
            ) from error
        starts = offsets[:-1]
        train, validation = (
            RowSet(
                (offsets[rows + 1] - starts[rows]).astype(np.int32),
                num_targets[rows],
                target_weights[rows].astype(np.float64),
                sources[rows],
                meta["seed"],
                starts[rows],
                ids,
                trained,
                weights[0] if weights else None,
            )
            for rows in sets
        )
        return TokenStore(folder, train, validation, meta)

    def order_rows(self, seed: int, batch_rows: int | None = None, batch_tokens: int | None = None) -> RowOrder:
        """The order of the training rows over a run, each source as often as its weight says. Raises ValueError as RowOrder."""
        train = self.train
        return RowOrder(
            train.num_rows, seed, batch_rows, batch_tokens, train.num_targets, sources=train.sources, weights=self.source_weights
        )

    def line(self, row: int) -> int:
        """The source line of a training row."""
        return int(_load(self.folder, "lines")[_load(self.folder, "train")[row]])

    def file_number(self, row: int) -> int:
        """Which file of its source, counted from 0, a training row is from."""
        place, sources = int(_load(self.folder, "train")[row]), _load(self.folder, "sources")
        bounds = np.cumsum(self.meta["made"][int(sources[place])]["rows_of_files"])
        return int(np.searchsorted(bounds, place - int(np.searchsorted(sources, sources[place])), side="right"))


def _load(folder: Path, name: str) -> np.ndarray:
    """A table, mapped: pages that are only looked at are shared by all processes."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


def _check(folder: Path, meta: dict[str, Any], num_tokens: int, lengths: list[int], weighted: bool) -> None:
    """Raises ValueError where the version or a size is not what it must be."""
    sizes = {name: (folder / name).stat().st_size for name in TOKEN_FILES if weighted or name != "weights.bin"}
    fitting = all(size == TOKEN_FILES[name].itemsize * num_tokens for name, size in sizes.items())
    if meta["version"] != FORMAT_VERSION or not fitting or len(set(lengths)) != 1 or not isinstance(meta["digest"], str):
        raise ValueError("its files do not fit together")
