"""Tokenised rows on disk: written once as a stream, then mapped into memory by every rank. Knows no tokenizer, no torch.

A store is a folder: ``ids.bin`` (int32) and ``trained.bin`` (bool, one byte) hold the tokens of all rows end to end,
``offsets.npy`` (int64, rows + 1) bounds them, ``num_targets.npy`` (int32) and ``lines.npy`` (int32) describe them,
``train.npy`` and ``validation.npy`` (int64) say which rows belong to which set, ``meta.json`` says how it was made.
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.order import EVALUATION_STREAM, permute
from manyhands.errors import UserError

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some rows of a store, numbered from 0. ``lengths`` are tokens; ``num_targets`` are trained tokens after the shift by
    one (``trained[1:].sum()``); both int32, one a row."""

    lengths: np.ndarray
    num_targets: np.ndarray
    seed: int
    _starts: np.ndarray
    _ids: np.ndarray
    _trained: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, trained bool) of one row, both views of the mapped files."""
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return self._ids[start:end], self._trained[start:end]

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
    """An open store. ``digest`` names its content: equal digest, equal rows."""

    folder: Path
    train: RowSet
    validation: RowSet
    meta: dict[str, Any]

    @property
    def digest(self) -> str:
        return self.meta["digest"]

    @staticmethod
    def open(folder: str | Path) -> TokenStore:
        """Maps a store; takes some MiB of memory whatever its size. Raises UserError where files are missing or cut short."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            offsets = np.load(folder / "offsets.npy", allow_pickle=False)
            num_targets = np.load(folder / "num_targets.npy", allow_pickle=False)
            num_tokens = int(offsets[-1])
            sizes = [(folder / name).stat().st_size for name in ("ids.bin", "trained.bin")]
            if meta.get("version") != FORMAT_VERSION or sizes != [4 * num_tokens, num_tokens] or len(num_targets) != len(offsets) - 1:
                raise ValueError("its files do not fit together")
            ids = np.memmap(folder / "ids.bin", dtype=np.int32, mode="r")
            trained = np.memmap(folder / "trained.bin", dtype=np.bool_, mode="r")
            sets = [np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("train", "validation")]
        except (OSError, ValueError, IndexError) as error:
            raise UserError(
                "the token cache is damaged", where=str(folder), why=str(error), fix="delete this folder; it is made again"
            ) from error
        lengths = np.diff(offsets).astype(np.int32)
        # np.asarray: a plain view, because slicing a memmap object costs ten times as much.
        train, validation = (
            RowSet(lengths[rows], num_targets[rows], meta["seed"], offsets[:-1][rows], np.asarray(ids), np.asarray(trained))
            for rows in sets
        )
        return TokenStore(folder, train, validation, meta)

    def line(self, row: int) -> int:
        """The source line of a training row."""
        rows = np.load(self.folder / "train.npy", mmap_mode="r", allow_pickle=False)
        return int(np.load(self.folder / "lines.npy", mmap_mode="r", allow_pickle=False)[rows[row]])


class StoreWriter:
    """Writes a store row by row into a folder; memory holds some 16 bytes a row, no tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ids = (folder / "ids.bin").open("wb")
        self._trained = (folder / "trained.bin").open("wb")
        self._offsets, self._num_targets, self._lines = array("q", [0]), array("i"), array("i")

    @property
    def num_rows(self) -> int:
        return len(self._lines)

    @property
    def num_tokens(self) -> int:
        return self._offsets[-1]

    def append(self, ids: np.ndarray, trained: np.ndarray, line: int) -> None:
        self._ids.write(ids.astype("<i4", copy=False).tobytes())
        self._trained.write(trained.tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self._num_targets.append(int(np.count_nonzero(trained[1:])))
        self._lines.append(line)

    def finish(self, train: np.ndarray, validation: np.ndarray, meta: dict[str, Any]) -> None:
        """Writes the tables and forces everything onto the disk; ``meta.json`` comes last."""
        for file in (self._ids, self._trained):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        tables: dict[str, np.ndarray] = {
            "offsets": np.array(self._offsets, dtype=np.int64),
            "num_targets": np.array(self._num_targets, dtype=np.int32),
            "lines": np.array(self._lines, dtype=np.int32),
            "train": train.astype(np.int64),
            "validation": validation.astype(np.int64),
        }
        for name, table in tables.items():
            with (self.folder / f"{name}.npy").open("wb") as file:
                np.save(file, table, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with (self.folder / "meta.json").open("w", encoding="utf-8") as text:
            json.dump({"version": FORMAT_VERSION, **meta}, text, indent=1)
            text.flush()
            os.fsync(text.fileno())

    def close(self) -> None:
        """Lets go of the files without finishing."""
        self._ids.close()
        self._trained.close()
