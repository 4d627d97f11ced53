"""Snapshots in memory that outlives its writer: whole or not there, whenever the writer is killed."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from manyhands.checkpoint import in_memory
from manyhands.checkpoint.in_memory import Snapshot, SnapshotWriter, states_in
from manyhands.checkpoint.tensors import StateTensors
from manyhands.core.segments import RankSegments, Segment
from tests.support.segments import open_segments

CPU = torch.device("cpu")


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateTensors:
    from manyhands.checkpoint.tensors import checkpoint_tensors

    return checkpoint_tensors(model, optimizer)


@pytest.fixture
def segments() -> Any:
    with open_segments(1) as opened:
        if opened is None:
            pytest.skip("this system has no memfd")
        yield opened


def test_what_is_restored_trains_on_bit_for_bit(segments: RankSegments) -> None:
    model, optimizer = trained(seed=1)
    writer = SnapshotWriter(Segment(segments.paths[0]), CPU)
    for step in (6, 7):
        writer.begin(step, tensors_of(model, optimizer), {"step": step, "tokens": 10 * step}, "key").complete()
    other, its_optimizer = trained(seed=2, steps=0)
    segment = Segment(segments.paths[0])
    assert sorted(states_in(segment, "key")) == [6, 7] and states_in(segment, "another layout") == {}
    state = Snapshot.read(segment, 7).restore(other, its_optimizer)
    assert state == {"step": 7, "tokens": 70}
    for each, its in ((model, optimizer), (other, its_optimizer)):
        each(torch.ones(1, 5)).sum().backward()
        its.step()
    mine, theirs = tensors_of(model, optimizer), tensors_of(other, its_optimizer)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_one_that_is_not_complete_is_not_there_and_the_one_before_is(segments: RankSegments) -> None:
    writer = SnapshotWriter(Segment(segments.paths[0]), CPU)
    for step in (1, 2):
        writer.begin(step, tensors_of(*trained(step)), {}, "key").complete()
    writer.begin(3, tensors_of(*trained(3)), {}, "key").start()  # its writer dies here
    assert segments.newest_step() == 2
    assert Segment(segments.paths[0]).committed().keys() == {2}


def test_later_ones_are_forgotten_where_a_run_goes_back(segments: RankSegments) -> None:
    writer = SnapshotWriter(Segment(segments.paths[0]), CPU)
    for step in (8, 9):
        writer.begin(step, tensors_of(*trained(1)), {}, "key").complete()
    writer.forget_after(8)
    assert segments.newest_step() == 8


def test_all_ranks_must_have_the_step() -> None:
    with open_segments(2) as segments:
        assert segments is not None and segments.newest_step() is None
        writers = [SnapshotWriter(Segment(path), CPU) for path in segments.paths]
        for step, ranks in ((4, (0, 1)), (5, (0, 1)), (6, (0,))):
            for rank in ranks:
                writers[rank].begin(step, tensors_of(*trained(1)), {}, "key").complete()
        assert segments.newest_step() == 5


def test_where_a_larger_slot_cannot_be_had_nothing_is_mapped_any_more(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the file that has become shorter would end the process."""
    segment = Segment(segments.paths[0])
    segment.make_room(4096)
    segment.commit(0, 3, 4096)

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="no memory"):
        segment.make_room(8192)
    assert segment.committed() == {} and segment.slot_bytes == 0 and segments.newest_step() is None


def test_a_slot_that_cannot_be_read_is_no_snapshot(segments: RankSegments) -> None:
    segment = Segment(segments.paths[0])
    SnapshotWriter(segment, CPU).begin(6, tensors_of(*trained(1)), {"step": 6}, "key").complete()
    for num_bytes in (0, segment.slot_bytes):  # empty, and of zeros
        slot = segment.oldest() if num_bytes == 0 else segment.committed()[7]
        segment.clear(slot)[:8] = bytes(8)
        segment.commit(slot, 7, num_bytes)
        assert states_in(segment, "key") == {6: {"step": 6}}


def test_a_look_at_the_newest_step_leaves_no_file_open(segments: RankSegments) -> None:
    SnapshotWriter(Segment(segments.paths[0]), CPU).begin(6, tensors_of(*trained(1)), {}, "key").complete()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert [segments.newest_step() for _ in range(5)] == [6] * 5
    assert len(os.listdir("/proc/self/fd")) == before


def like_on_a_gpu(segment: Segment, monkeypatch: pytest.MonkeyPatch, pin: Callable[[], int]) -> SnapshotWriter:
    """A writer whose slots are pinned by a call of ``pin`` each."""
    monkeypatch.setattr(in_memory, "pin", lambda memory, device, hurry: pin())
    writer = SnapshotWriter(segment, CPU)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(writer, "_stream", SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(writer, "_copy", lambda to, parts: None)
    return writer


def test_memory_is_registered_once_and_no_more_before_it_grows(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with its calls written down, one a slot: one that fails is tried again."""
    calls: list[str] = []
    answers = iter([2, 0, 2, 0, 0, 0, 0])
    monkeypatch.setattr(in_memory, "unpin", lambda memory, device: calls.append("unpin"))
    segment = Segment(segments.paths[0])
    make_room = segment.make_room
    monkeypatch.setattr(segment, "make_room", lambda size: (calls.append("room"), make_room(size)))
    writer = like_on_a_gpu(segment, monkeypatch, lambda: calls.append("pin") or next(answers))
    for _ in range(2):  # the first slot, the second
        with pytest.raises(OSError, match="CUDA error 2"):
            writer.begin(1, tensors_of(*trained(1)), {}, "key")
    for step in (2, 3):
        writer.begin(step, tensors_of(*trained(1)), {}, "key").complete()
    writer.begin(4, StateTensors({"large": torch.zeros(2**20)}), {}, "key").complete()
    failed = ["room", "pin", "pin", "pin", "unpin"]
    assert calls == [*failed, "pin", "pin", "unpin", "unpin", "room", "pin", "pin"]


def test_memory_is_registered_ahead_beside_other_work(segments: RankSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, calls = threading.Event(), []
    segment = Segment(segments.paths[0])
    writer = like_on_a_gpu(segment, monkeypatch, lambda: calls.append(may_end.wait(60)) or 0)
    assert not writer.has_asked and not writer.is_ready
    writer.pin_ahead(tensors_of(*trained(1)))
    assert calls == [] and writer.has_asked and not writer.is_ready, "it has not been waited for"
    may_end.set()
    for step in (2, 3):
        writer.begin(step, tensors_of(*trained(1)), {}, "key").complete()
        assert writer.is_ready
    assert calls == [True, True] and sorted(segment.committed()) == [2, 3]


def test_a_snapshot_is_whole_as_soon_as_its_copies_have_arrived(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host has not come to the next update yet: a rank that is killed then loses that step alone."""
    arrived, segment = threading.Event(), Segment(segments.paths[0])
    writer = like_on_a_gpu(segment, monkeypatch, int)
    monkeypatch.setattr(writer, "_copy", lambda to, parts: arrived.wait(60))
    pending = writer.begin(1, tensors_of(*trained(1)), {}, "key")
    pending.start()
    assert segment.committed() == {}
    arrived.set()
    while not segment.committed():
        time.sleep(0.001)  # nobody asks; pytest's timeout is the limit
    pending.complete()
    assert segments.newest_step() == 1


def test_copies_start_when_the_training_says_so_and_once(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To launch them takes the host a while, which the device is to spend computing."""
    started: list[float] = []
    writer = like_on_a_gpu(Segment(segments.paths[0]), monkeypatch, int)
    monkeypatch.setattr(writer, "_copy", lambda to, parts: started.append(float(parts[0].flatten()[0])))
    for step in (1, 2, 3):
        model, optimizer = trained(1)
        with torch.no_grad():
            model[0].weight.fill_(step)
        pending = writer.begin(step, tensors_of(model, optimizer), {}, "key")
        assert len(started) == step - 1
        if step == 2:
            continue  # its update is skipped, and the next one begins
        pending.start()
        pending.start()
        pending.complete()
    assert started == [1.0, 2.0, 3.0] and sorted(Segment(segments.paths[0]).committed()) == [2, 3]


def test_a_copy_that_fails_is_said_before_the_update(segments: RankSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment(segments.paths[0])
    writer = like_on_a_gpu(segment, monkeypatch, int)

    monkeypatch.setattr(writer, "_copy", Mock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        writer.begin(1, tensors_of(*trained(1)), {}, "key").complete()
    assert segment.committed() == {}


def test_a_run_that_goes_back_while_memory_is_registered_forgets_later_ones(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment(segments.paths[0])
    for step in (8, 9):  # of the launch before
        SnapshotWriter(segment, CPU).begin(step, tensors_of(*trained(1)), {}, "key").complete()
    writer = like_on_a_gpu(segment, monkeypatch, int)
    monkeypatch.setattr(in_memory, "pin", lambda memory, device, hurry: 2 if hurry is None or hurry.wait(60) else 0)
    writer.pin_ahead(tensors_of(*trained(1)))
    writer.forget_after(8)
    assert segments.newest_step() == 8
    with pytest.raises(OSError, match="CUDA error 2"):  # said by the next one
        writer.begin(9, tensors_of(*trained(1)), {}, "key")


def _write_forever(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.set_num_threads(1)
    writer = SnapshotWriter(Segment(path), CPU)
    with torch.no_grad():
        for step in range(1, 10**9):
            for parameter in model.parameters():
                parameter.fill_(step)
            writer.begin(step, tensors_of(model, optimizer), {"step": step}, "key").complete()


def test_killed_at_any_moment_what_is_there_is_whole(segments: RankSegments) -> None:
    """Every value of the weights is the step's number."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    before, steps = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(10):
            process = context.Process(target=_write_forever, args=(segments.paths[0], model, optimizer))
            process.start()
            while segments.newest_step() is None or (steps and segments.newest_step() == steps[-1]):
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.01))
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            segment = Segment(segments.paths[0])
            for step in states_in(segment, "key"):
                found = Snapshot.read(segment, step)
                assert found.state == {"step": step}
                assert all((part == step).all() for name, part in found.parts.items() if name.startswith("model."))
            steps.append(segments.newest_step())
    finally:
        torch.set_num_threads(before)
    assert len(steps) == 10


@pytest.mark.gpu
def test_on_a_gpu_the_copies_are_of_the_moment_and_from_pinned_memory(segments: RankSegments) -> None:
    """Work that is queued after ``begin`` and waits for the commit does not show in the snapshot."""
    device = torch.device("cuda")
    model = nn.Linear(4096, 4096, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    writer, segment = SnapshotWriter(Segment(segments.paths[0]), device), None
    for step in (1, 2, 3):
        model(torch.randn(8, 4096, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.fill_(step)
        pending = writer.begin(step, tensors_of(model, optimizer), {"step": step}, "key")
        torch.cuda._sleep(10**9)  # half a second, which the copies do not wait for
        later = torch.cuda.Event()
        later.record()
        pending.complete()
        assert not later.query()
        with torch.no_grad():
            model.weight.fill_(-1)
        segment = Segment(segments.paths[0])
        found = Snapshot.read(segment, step)
        assert (found.parts["model.weight"] == step).all() and not found.parts["model.weight"].is_cuda
        assert torch.equal(found.parts["optim.exp_avg.weight"], optimizer.state[model.weight]["exp_avg"].cpu())
    assert segment is not None and sorted(segment.committed()) == [2, 3]
    writer.close()
    model.weight.data.zero_()
    assert Snapshot.read(segment, 3).restore(model, optimizer) == {"step": 3}
    assert (model.weight == 3).all()
    begin, num_bytes = time.monotonic(), segment.slot_bytes
    writer.begin(4, tensors_of(model, optimizer), {}, "key").complete()
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    print(f"{num_bytes / 2**20:.0f} MiB in {1e3 * seconds:.1f} ms: {num_bytes / seconds / 1e9:.1f} GB/s")
    writer.close()  # else the next test's memory may be mapped where this one's is registered
