"""The hook that takes snapshots: what it keeps over a rollback, and what it says."""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.checkpoint import in_memory
from manyhands.checkpoint.in_memory import SnapshotWriter
from manyhands.checkpoint.tensors import StateTensors
from manyhands.core.segments import COPIED, SEGMENTS, Segment, SegmentReader
from manyhands.core.world import World
from manyhands.training.types import TrainState
from manyhands.worker import snapshots
from manyhands.worker.checkpoints import CheckpointHook
from manyhands.worker.context import RankContext
from manyhands.worker.snapshots import SnapshotHook
from tests.support.segments import open_segments


class HeldState:
    """Of an engine, what the hook calls."""

    def checkpoint_tensors(self) -> StateTensors:
        return StateTensors({"model.weight": torch.ones(4)})

    def before_backward(self, call: Any) -> None:
        call()

    def before_update(self, call: Any) -> None:
        call()

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankContext]:
    with open_segments(1) as segments:
        if segments is None:
            pytest.skip("this system has no memfd")
        monkeypatch.setenv(SEGMENTS, segments.environment[SEGMENTS])
        made = RankContext(terminal=io.StringIO(), world=World(0, 0, 1, torch.device("cpu")))
        section = SimpleNamespace(every_step_in_memory=True, keep_best=False)
        launch = SimpleNamespace(restarts=3)
        made.config = SimpleNamespace(checkpoint=section, launch=launch, digest="")  # type: ignore[assignment]
        layout = SimpleNamespace(strategy="single", world_size=1, mesh=None, holds_copies=True)
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


def test_without_restarts_nobody_would_read_them(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launcher keeps none then, on Linux too."""
    monkeypatch.delenv(SEGMENTS)
    rank.config.launch.restarts = 0  # type: ignore[misc]
    assert not SnapshotHook(rank).is_on
    said = "no snapshots in memory: launch.restarts is 0, so no rank would resume from them\n"
    assert rank.terminal.getvalue() == said  # type: ignore[attr-defined]


def test_the_wait_for_copies_is_part_of_the_stall(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(snapshots.time, "monotonic", lambda: next(clock))
    pending = SimpleNamespace(complete=lambda: [next(clock) for _ in range(10)])
    monkeypatch.setattr(SnapshotWriter, "begin", lambda *arguments: pending)
    SnapshotHook(rank).between_steps(TrainState(step=1))
    assert rank.measured["snapshot_stalls_s"] == [12]  # one tick to begin; ten, and one, to complete


def test_a_snapshot_that_is_not_copied_yet_is_not_written_over(
    rank: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both slots in use, the older one is the newest of which another node has a copy for sure."""
    monkeypatch.setenv(COPIED, "1")
    path = os.environ[SEGMENTS]
    hook, reader = SnapshotHook(rank), SegmentReader(os.open(path, os.O_RDWR))

    def copy() -> None:
        newest = reader.newest()
        assert newest is not None
        reader.mark_copied(newest, bytes(32))

    def steps() -> list[int]:
        return sorted(Segment(path).committed())

    hook.between_steps(TrainState(step=1))
    copy()
    for step in (2, 3, 4):
        hook.between_steps(TrainState(step=step))
    assert steps() == [1, 2] and rank.measured["snapshots_left_out"] == 2
    copy()
    hook.between_steps(TrainState(step=5))
    assert steps() == [2, 5]
    reader.end_copies()  # the next node takes none any more
    for step in (6, 7):
        hook.between_steps(TrainState(step=step))
    assert steps() == [6, 7]
    said = rank.terminal.getvalue()  # type: ignore[attr-defined]
    assert said.count("as fast as the next node gets its copies") == 1


@pytest.fixture
def pinning(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[int]]:
    """As on a GPU, where the memory is pinned when the test says so: the result is CUDA's error."""
    answer: Future[int] = Future()
    monkeypatch.setattr(in_memory, "pin", lambda memory, device, hurry: answer.result(60))
    monkeypatch.setattr(in_memory, "unpin", lambda memory, device: None)
    yield answer
    if not answer.done():
        answer.set_result(0)


def hook_as_on_a_gpu(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> SnapshotHook:
    hook = SnapshotHook(rank)
    hook.are_ready = False
    assert hook.writer is not None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(hook.writer, "_stream", stream)
    monkeypatch.setattr(hook.writer, "_copy", torch._foreach_copy_)
    return hook


def take_step(hook: SnapshotHook, step: int, *others: float) -> None:
    """What the loop does; ``others`` is what further ranks report."""
    hook.on_gathered([hook.local_values(), *((other,) for other in others)])
    hook.between_steps(TrainState(step=step))


def settle(hook: SnapshotHook) -> None:
    assert hook.writer is not None and hook.writer._pinning is not None
    hook.writer._pinning.exception(60)


def test_the_first_steps_have_none_while_their_memory_is_pinned(
    rank: RankContext, pinning: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, path = hook_as_on_a_gpu(rank, monkeypatch), os.environ[SEGMENTS]
    for step in (1, 2, 3):
        take_step(hook, step, 1.0)
    assert "snapshot_stalls_s" not in rank.measured
    pinning.set_result(0)
    settle(hook)
    assert Segment(path).committed() == {}
    take_step(hook, 4, 0.0)  # another rank is not ready
    assert Segment(path).committed() == {}
    for step in (5, 6):
        take_step(hook, step, 1.0)
    assert sorted(Segment(path).committed()) == [5, 6] and len(rank.measured["snapshot_stalls_s"]) == 2
    assert rank.terminal.getvalue() == "snapshots in memory from step 5 on: before it their memory was pinned\n"  # type: ignore[attr-defined]
    after = SnapshotHook(rank)  # of a rollback
    take_step(after, 6, 1.0)
    assert len(rank.measured["snapshot_stalls_s"]) == 3


def test_memory_of_checkpoints_is_pinned_after_that_of_snapshots(
    rank: RankContext, pinning: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, asked = hook_as_on_a_gpu(rank, monkeypatch), []
    rank.plan.async_checkpoints, rank.plan.checkpoint_every = False, None  # type: ignore[misc]
    checkpoints = CheckpointHook(rank)
    monkeypatch.setattr(checkpoints, "engine", rank.engine)
    monkeypatch.setattr(checkpoints, "_is_due", lambda state: False)
    checkpoints.saver = SimpleNamespace(has_asked=False, make_room=asked.append)  # type: ignore[assignment]
    for step in (1, 2):
        checkpoints.between_steps(TrainState(step=step))
        take_step(hook, step, 1.0)
    assert not asked
    pinning.set_result(0)
    settle(hook)
    checkpoints.between_steps(TrainState(step=3))
    assert len(asked) == 1


def test_memory_that_cannot_be_pinned_turns_snapshots_off(
    rank: RankContext, pinning: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hook_as_on_a_gpu(rank, monkeypatch)
    take_step(hook, 1)
    pinning.set_result(2)
    settle(hook)
    for step in (2, 3):
        take_step(hook, step)
    said = rank.terminal.getvalue()  # type: ignore[attr-defined]
    assert said == "no snapshots in memory: rank 0: the memory cannot be pinned (CUDA error 2)\n"
    assert not hook.is_on and "snapshot_stalls_s" not in rank.measured
    assert os.stat(os.environ[SEGMENTS]).st_blocks == 0, "the launcher would hold the memory to its end"


def test_snapshots_of_the_launch_before_stay_where_none_can_be_pinned(
    rank: RankContext, pinning: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart may resume from them."""
    SnapshotHook(rank).between_steps(TrainState(step=1))
    rank.snapshots = None
    hook = hook_as_on_a_gpu(rank, monkeypatch)
    take_step(hook, 1)
    pinning.set_result(2)
    settle(hook)
    take_step(hook, 2)
    assert not hook.is_on and list(Segment(os.environ[SEGMENTS]).committed()) == [1]


def test_what_another_rank_cannot_pin_turns_snapshots_off_here_too(
    rank: RankContext, pinning: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hook_as_on_a_gpu(rank, monkeypatch)
    monkeypatch.setattr(snapshots, "run_on_all_ranks", lambda work: [work(), "rank 1: no memory"])
    take_step(hook, 1, 0.0)
    pinning.set_result(0)
    settle(hook)
    for step in (2, 3):
        take_step(hook, step, 1.0)
    assert rank.terminal.getvalue() == "no snapshots in memory: rank 1: no memory\n"  # type: ignore[attr-defined]
    assert not hook.is_on and Segment(os.environ[SEGMENTS]).committed() == {}
    assert os.stat(os.environ[SEGMENTS]).st_blocks == 0


def test_a_rank_that_keeps_none_is_ready(rank: RankContext) -> None:
    hook = SnapshotHook(rank)
    hook.writer, hook.are_ready = None, False
    take_step(hook, 1, 0.0)
    assert not hook.are_ready
    take_step(hook, 2, 1.0)
    assert hook.are_ready and hook.has_room


def test_a_copy_of_a_step_that_was_done_again_is_not_used(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have snapshots of step 6, of which one was taken before a rollback; both have step 5."""
    looks = []
    for num_rollbacks in (1, 0):
        states = {5: {"best_step": None}, 6: {"best_step": None, "num_rollbacks": num_rollbacks}}
        monkeypatch.setattr(snapshots, "states_in", lambda segment, key, states=states: states)
        rank.folder = SimpleNamespace(checkpoints=Path("none"))  # type: ignore[assignment]
        looks.append(snapshots._look(rank, object()))  # type: ignore[arg-type]
    monkeypatch.setattr(snapshots, "run_on_all_ranks", lambda look: looks)
    monkeypatch.setattr(snapshots.Snapshot, "read", lambda segment, step: SimpleNamespace(step=step))
    snapshots.find_snapshot(rank)
    assert rank.snapshot is not None and rank.snapshot.step == 5
