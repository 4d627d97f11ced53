"""Row sets made by hand: what collation reads of a store, and nothing else. Picklable, for processes that collate."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from manyhands.data.collate import Rows


@dataclass(frozen=True)
class FakeRows:
    """``parts[i]`` is (ids, trained) of row i; ``each_weights`` its tokens' weights."""

    parts: tuple[tuple[list[int], list[int]], ...]
    each_weights: tuple[list[float], ...] | None = None

    @property
    def has_weights(self) -> bool:
        return self.each_weights is not None

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, trained = self.parts[index]
        return np.array(ids, dtype=np.int32), np.array(trained, dtype=bool)

    def weights(self, index: int) -> np.ndarray:
        assert self.each_weights is not None
        return np.array(self.each_weights[index], dtype=np.float32)


SMALL = FakeRows((([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1]), ([1, 2, 3, 4], [1, 1, 0, 1])))
WEIGHTED = FakeRows(SMALL.parts, ([0, 0, 0.5], [0, 2.0], [1.0, 1.0, 0, 3.0]))


def drawn_rows(num_samples: int, seed: int, weighted: bool = False) -> FakeRows:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 60, num_samples)
    parts = tuple((draw.integers(0, 1000, n).tolist(), draw.integers(0, 2, n).tolist()) for n in lengths)
    return FakeRows(parts, tuple(draw.random(n).tolist() for n in lengths) if weighted else None)


def open_drawn() -> Mapping[str, Rows]:
    return {"train": drawn_rows(200, 0), "validation": drawn_rows(50, 1, weighted=True)}


class Deadly(FakeRows):
    """Row 3 kills the process that reads it."""

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().row(index)


def open_deadly() -> Mapping[str, Rows]:
    return {"train": Deadly(drawn_rows(10, 0).parts)}
