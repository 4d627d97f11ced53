"""From row ids to the arrays of one micro-batch. Pure numpy, so that processes without torch can prepare batches; knows
no model.

Names in a batch (T: tokens of all rows laid end to end; B x L: rows x longest row):

| name | packed | not packed |
|---|---|---|
| input_ids | (1, T) int64 | (B, L) int64, padded on the right with 0 |
| position_ids | (1, T) int64, from 0 in every row | (B, L) int64 |
| labels | (1, T) int64: the next token of the same row where that is trained, else -100 | (B, L) int64 |
| weights | (1, T) float32: of the labels, 0 where there is none; absent where every target weighs 1 | (B, L) float32 |
| target_rows | (m) int64: flat positions that have a target; known here, they spare the GPU a wait | likewise |
| cu_seq_lens | (rows + 1) int32: where rows begin, and T | absent |
| max_length | int: no row is longer | absent |
| row_length | int: every row, padding included, has this length; absent otherwise | absent |

Not packed needs no attention mask: attention is causal and the padding stands behind every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

IGNORED = -100
PAD_ID = 0
MIN_BOUNDS = 16  # entries of cu_seq_lens where their number is rounded up

Arrays = dict[str, Any]  # name -> array, or int


class Rows(Protocol):
    """What is read of a ``SampleSet``."""

    @property
    def has_weights(self) -> bool: ...

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...

    def weights(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Shape:
    """What shape the rows of a micro-batch are given. The defaults add nothing to them.

    ``tile``: a pack is padded to a multiple of so many tokens. ``tokens``: every pack has exactly so many. ``longest``:
    no row of the run is longer; given, ``max_length`` is the same in every batch, and ``cu_seq_lens`` has a power of
    two of entries (the last ones repeat T), at least as many as ``documents`` rows and the padding need, so that
    compiled code meets few shapes. ``row_length``: all rows of the run have this length, which batches then say,
    padding included.
    """

    packed: bool
    tile: int = 1
    tokens: int | None = None
    longest: int | None = None
    documents: int = 0
    row_length: int | None = None


def collate_samples(sample_set: Rows, rows: Sequence[int] | np.ndarray, shape: Shape) -> Arrays:
    """One micro-batch; no rows at all give one row of padding (two tokens, or what ``shape`` asks) without labels.

    Padding of a pack is one more document, without labels, at position 0. ValueError where the rows do not fit.
    """
    parts = [sample_set.row(int(row)) for row in rows]
    weights = [sample_set.weights(int(row)) for row in rows] if sample_set.has_weights else None
    return _collate_packed(parts, weights, shape) if shape.packed else _collate_padded(parts, weights)


class _Blank:
    """The arrays before any row is put into them."""

    def __init__(self, num_samples: int, width: int, weighted: bool) -> None:
        size = (num_samples, width)
        self.input_ids, self.positions = np.full(size, PAD_ID, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self.labels = np.full(size, IGNORED, dtype=np.int64)
        self.weights = np.zeros(size, dtype=np.float32) if weighted else None

    def put(self, index: int, start: int, part: tuple[np.ndarray, np.ndarray], weights: np.ndarray | None) -> None:
        ids, trained = part
        end = start + len(ids)
        self.input_ids[index, start:end] = ids
        self.positions[index, start:end] = np.arange(len(ids))
        self.labels[index, start : end - 1] = np.where(trained[1:], ids[1:], IGNORED)
        if self.weights is not None and weights is not None:
            self.weights[index, start : end - 1] = np.where(trained[1:], weights[1:], 0)

    def arrays(self) -> Arrays:
        arrays: Arrays = {"input_ids": self.input_ids, "position_ids": self.positions, "labels": self.labels}
        if self.weights is not None:
            arrays["weights"] = self.weights
        return arrays | {"target_rows": np.flatnonzero(self.labels != IGNORED)}


def _collate_packed(
    parts: list[tuple[np.ndarray, np.ndarray]], weights: list[np.ndarray] | None, shape: Shape
) -> Arrays:
    lengths = [len(ids) for ids, _ in parts]
    num_tokens = sum(lengths)
    total = shape.tokens if shape.tokens is not None else -(-max(num_tokens, 2) // shape.tile) * shape.tile
    if num_tokens > total:
        raise ValueError(f"{num_tokens} tokens do not fit into {total}")
    blank = _Blank(1, total, weights is not None)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    for index, part in enumerate(parts):
        blank.put(0, int(starts[index]), part, weights[index] if weights is not None else None)
    # Padding keeps position 0: positions beyond the longest row could outgrow a table, or change a dynamic rotary
    # scale.
    bounds = starts if num_tokens == total else np.append(starts, np.int32(total))
    max_length = max([*lengths, total - num_tokens])
    if shape.longest is not None:
        max_length = max(shape.longest, shape.tokens or shape.tile)
        num_bounds = max(MIN_BOUNDS, 1 << (max(len(bounds), shape.documents + 2) - 1).bit_length())
        bounds = np.concatenate([bounds, np.full(num_bounds - len(bounds), total, dtype=np.int32)])
    equal = {"row_length": shape.row_length} if _all_equal(lengths, total, shape.row_length) else {}
    return {**blank.arrays(), "cu_seq_lens": bounds, "max_length": max_length, **equal}


def _all_equal(lengths: list[int], total: int, row_length: int | None) -> bool:
    """Padding counts as rows too: nothing of it is trained, so that it may be cut anywhere."""
    return row_length is not None and total % row_length == 0 and all(length == row_length for length in lengths)


def _collate_padded(parts: list[tuple[np.ndarray, np.ndarray]], weights: list[np.ndarray] | None) -> Arrays:
    width = max((len(ids) for ids, _ in parts), default=2)
    blank = _Blank(max(1, len(parts)), width, weights is not None)
    blank.positions[:] = np.arange(width)
    for index, part in enumerate(parts):
        blank.put(index, 0, part, weights[index] if weights is not None else None)
    return blank.arrays()
