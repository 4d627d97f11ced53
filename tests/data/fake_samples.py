"""Sample sets made by hand: what collation reads of a store, and no more. Picklable, for processes that collate."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from manyhands.data.batch.collate import Samples
from manyhands.data.store.streams import MASK, TOKENS, WEIGHTS, Sample, Stream, make_sample


@dataclass(frozen=True)
class FakeSamples:
    """``parts[i]`` is (ids, mask) of sample i; ``each_weights`` its tokens' weights."""

    parts: tuple[tuple[list[int], list[int]], ...]
    each_weights: tuple[list[float], ...] | None = None

    @property
    def streams(self) -> tuple[Stream, ...]:
        return (TOKENS, MASK) if self.each_weights is None else (TOKENS, MASK, WEIGHTS)

    def sample(self, index: int) -> Sample:
        ids, mask = self.parts[index]
        weights = None if self.each_weights is None else np.array(self.each_weights[index], dtype=np.float32)
        return make_sample(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool), weights)


SMALL = FakeSamples((([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1]), ([1, 2, 3, 4], [1, 1, 0, 1])))
WEIGHTED = FakeSamples(SMALL.parts, ([0, 0, 0.5], [0, 2.0], [1.0, 1.0, 0, 3.0]))


def drawn_samples(num_samples: int, seed: int, weighted: bool = False) -> FakeSamples:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 60, num_samples)
    parts = tuple((draw.integers(0, 1000, n).tolist(), draw.integers(0, 2, n).tolist()) for n in lengths)
    return FakeSamples(parts, tuple(draw.random(n).tolist() for n in lengths) if weighted else None)


def open_drawn() -> Mapping[str, Samples]:
    return {"train": drawn_samples(200, 0), "validation": drawn_samples(50, 1, weighted=True)}


class Deadly(FakeSamples):
    """Sample 3 kills the process that reads it."""

    def sample(self, index: int) -> Sample:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index)


def open_deadly() -> Mapping[str, Samples]:
    return {"train": Deadly(drawn_samples(10, 0).parts)}
