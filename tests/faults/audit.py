"""Which samples every rank really trained, step by step, over all attempts of a run: read from the batches that go into
the model, and checked against what a run left alone trains.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BEGINNING = (
    threading.RLock()
)  # held while a step is recorded as begun, by the run and here: both know of it, or neither


def plant(training: Any, path: Path) -> None:
    """Makes the module ``worker.training`` append a line to ``path`` for each step that a rank begins, and for each
    whose batches were all taken.
    """
    iterate_steps, record = training.iterate_steps, training.record_step_starts

    def planted(rank: Any, *given: Any) -> Iterator[Any]:
        for work in iterate_steps(rank, *given):
            yield replace(work, micro_batches=_record(path, rank.world.rank, work.step + 1, work.micro_batches))

    def announced(rank: Any, works: Any) -> Iterator[Any]:
        begin_step = rank.process.begin_step

        def begin(step: int) -> None:
            with BEGINNING:
                begin_step(step)
                _append(path, {"begun": step, "rank": rank.world.rank})

        rank.process.begin_step = begin
        try:
            yield from record(rank, works)
        finally:
            rank.process.begin_step = begin_step

    training.iterate_steps, training.record_step_starts = planted, announced


def _append(path: Path, fields: dict[str, Any]) -> None:
    """A line, in one write: all ranks append to one file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**fields, "time": time.time(), "pid": os.getpid()}) + "\n")


def _record(path: Path, rank: int, step: int, batches: Iterable[Any]) -> Iterator[Any]:
    samples: list[int] = []
    for batch in batches:
        ids, bounds = batch["input_ids"].flatten().tolist(), batch["cu_seq_lens"].tolist()
        documents = (ids[begin:end] for begin, end in itertools.pairwise(bounds))
        samples += [zlib.crc32(repr(document).encode()) for document in documents if document]
        yield batch
    _append(path, {"step": step, "rank": rank, "samples": samples})


@dataclass(frozen=True)
class Audit:
    """What one run trained. Samples are told apart by the hash of their tokens. ``begun``: steps that a rank began,
    also one that it did not get the batches of.
    """

    lines: tuple[dict[str, Any], ...]
    begun: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def read(path: Path) -> Audit:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return Audit(
            tuple(line for line in lines if "samples" in line), tuple(line for line in lines if "begun" in line)
        )

    def num_lost(self) -> int:
        """Steps that were done again, the one in flight included: those that a rank began in more than one attempt,
        each as often as it was begun again.
        """
        attempts = {(line["begun"], line["rank"], line["pid"]) for line in self.begun}
        times = Counter((step, rank) for step, rank, _ in attempts)
        again: dict[int, int] = {}
        for (step, _), count in times.items():
            again[step] = max(again.get(step, 0), count - 1)
        return sum(again.values())

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
