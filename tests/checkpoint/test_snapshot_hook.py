"""The hook that takes snapshots: what it keeps over a rollback, and what it says."""

from __future__ import annotations

import errno
import io
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.checkpoint.in_memory import SnapshotWriter
from manyhands.core.segments import SEGMENTS, open_segments
from manyhands.core.world import World
from manyhands.train.types import TrainState
from manyhands.worker import snapshots
from manyhands.worker.context import RankContext
from manyhands.worker.snapshots import SnapshotHook


class HeldState:
    """Of an engine, what the hook calls."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {"model.weight": torch.ones(4)}

    def before_update(self, call: Any) -> None:
        call()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankContext]:
    with open_segments(1) as segments:
        if segments is None:
            pytest.skip("this system has no memfd")
        monkeypatch.setenv(SEGMENTS, segments.environment[SEGMENTS])
        made = RankContext(terminal=io.StringIO(), world=World(0, 0, 1, torch.device("cpu")))
        section = SimpleNamespace(every_step_in_memory=True, keep_best=False)
        made.config = SimpleNamespace(checkpoint=section, digest="")  # type: ignore[assignment]
        layout = SimpleNamespace(strategy="single", world_size=1, mesh=None)
        made.plan = SimpleNamespace(layout=layout)  # type: ignore[assignment]
        made.engine = HeldState()  # type: ignore[assignment]
        yield made


def test_after_a_rollback_the_same_memory_is_written_and_failures_are_said_again(
    rank: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SnapshotHook(rank)
    first.between_steps(TrainState(step=1))
    second = SnapshotHook(rank)
    assert second.writer is first.writer is not None

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(SnapshotWriter, "begin", fail)
    second.between_steps(TrainState(step=2))
    second.between_steps(TrainState(step=3))
    assert rank.terminal.getvalue() == "no snapshots in memory: rank 0: no memory\n"  # type: ignore[attr-defined]
    assert not second.is_on


def test_the_wait_for_copies_is_part_of_the_stall(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(snapshots.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(SnapshotWriter, "begin", lambda *arguments: lambda: [next(clock) for _ in range(10)])
    SnapshotHook(rank).between_steps(TrainState(step=1))
    assert rank.measured["snapshot_stalls_s"] == [12]  # one tick to begin; ten, and one, to complete
