"""Which samples every rank really trained, step by step, over all attempts of a run: read from the batches that go into
the model, and checked against what a run left alone trains.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def plant(training: Any, path: Path) -> None:
    """Makes the module ``worker.training`` append a line to ``path`` for each step whose batches were all taken."""
    iterate_steps = training.iterate_steps

    def planted(rank: Any) -> Iterator[Any]:
        for work in iterate_steps(rank):
            yield replace(work, micro_batches=_record(path, rank.world.rank, work.step + 1, work.micro_batches))

    training.iterate_steps = planted


def _record(path: Path, rank: int, step: int, batches: Iterable[Any]) -> Iterator[Any]:
    samples: list[int] = []
    for batch in batches:
        ids, bounds = batch["input_ids"].flatten().tolist(), batch["cu_seq_lens"].tolist()
        documents = (ids[begin:end] for begin, end in itertools.pairwise(bounds))
        samples += [zlib.crc32(repr(document).encode()) for document in documents if document]
        yield batch
    line = {"step": step, "rank": rank, "time": time.time(), "pid": os.getpid(), "samples": samples}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Audit:
    """What one run trained. Samples are told apart by the hash of their tokens."""

    lines: tuple[dict[str, Any], ...]

    @staticmethod
    def read(path: Path) -> Audit:
        return Audit(tuple(json.loads(line) for line in path.read_text().splitlines()))

    def steps(self) -> dict[int, Counter[int]]:
        """Samples of each step over all ranks. AssertionError where two attempts gave a rank other samples."""
        found: dict[tuple[int, int, int], list[int]] = {}
        attempts: dict[tuple[int, int], int] = {}  # those of the newest attempt count: that is what the weights have
        for line in self.lines:
            found[line["step"], line["rank"], line["pid"]] = line["samples"]
            attempts[line["step"], line["rank"]] = line["pid"]
        for (step, rank, _), samples in found.items():
            newest = found[step, rank, attempts[step, rank]]
            assert samples == newest, f"rank {rank} had other samples in step {step} when it was done again"
        steps: dict[int, Counter[int]] = {}
        for (step, rank), pid in attempts.items():
            steps.setdefault(step, Counter()).update(found[step, rank, pid])
        return dict(sorted(steps.items()))

    def check(self, reference: Audit, steps_per_epoch: int) -> None:
        """AssertionError unless every step had the samples of the reference, and each sample was seen once an epoch."""
        mine, theirs = self.steps(), reference.steps()
        assert mine == theirs, [step for step in theirs if mine.get(step) != theirs[step]]
        for first in range(1, max(mine) + 1, steps_per_epoch):
            epoch = [mine[step] for step in range(first, first + steps_per_epoch) if step in mine]
            seen = sum(epoch, Counter[int]())
            twice = [sample for sample, times in seen.items() if times != 1]
            assert not twice, f"{len(twice)} samples more than once in the epoch from step {first}"

    def resumed_at(self, after: float) -> float | None:
        """When a step was first done by a process that had done none before ``after`` (seconds since 1970)."""
        before = {line["pid"] for line in self.lines if line["time"] <= after}
        return min((line["time"] for line in self.lines if line["pid"] not in before), default=None)
