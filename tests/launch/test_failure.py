"""Which of several failures is the cause, and that a heartbeat costs nothing."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from manyhands.core import files
from manyhands.core.errors import UserError
from manyhands.core.files import write_json
from manyhands.launch.diagnose.failure import describe_lost, find_cause, looks_like_consequence, write_failure
from manyhands.launch.local.heartbeat import Beat, Heartbeat, read_beat
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import MemoryFound
from manyhands.worker.run import explain_out_of_memory
from tests.launch.builders import make_plan


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def ended(code: int, pid: int = 1, timestamp: float | None = None):
    return SimpleNamespace(exitcode=code, pid=pid, timestamp=int(timestamp or time.time()))


LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8913")


NEW_WORDS, IDS = RuntimeError("the ring has a gap"), KeyError("ids")  # the first: of a torch to come
LATE = time.time() + 100


@pytest.mark.parametrize(
    ("written", "exits", "what"),
    [
        ({0: LOST, 1: IDS}, {0: ended(1), 1: ended(1)}, "rank 1 failed in stage 'train': KeyError: 'ids'"),
        ({1: ValueError("first"), 0: ValueError("second")}, {}, "rank 1 failed in stage 'train': ValueError: first"),
        ({0: LOST}, {0: ended(1), 1: ended(-9), 2: ended(-6), 3: ended(-15)}, "rank 1 was killed (SIGKILL)"),
        ({0: NEW_WORDS}, {0: ended(1), 1: ended(-9, timestamp=LATE)}, "rank 1 was killed (SIGKILL)"),
        ({0: NEW_WORDS, 2: IDS}, {0: ended(1)}, "rank 2 failed in stage 'train': KeyError: 'ids'"),
        ({}, {0: ended(-9, pid=7), 1: ended(4, pid=8)}, "rank 1 ended with exit code 4 and no message"),
    ],
    ids=["consequence", "earliest", "killed", "killed later", "own error", "ended by the watch"],
)
def test_which_failure_is_the_cause(folder, written, exits, what):
    for rank, error in written.items():
        write_failure(folder, rank, "train", error)
    cause = find_cause(folder, exits, ended_by_us={7}).error
    assert (cause.what, cause.exit_code) == (what, 1)


def test_a_run_of_one_process_has_no_peers_to_lose(folder):
    write_failure(folder, 0, "train", RuntimeError("connection reset"), world_size=1)
    assert find_cause(folder).error.what == "rank 0 failed in stage 'train': RuntimeError: connection reset"


def test_only_consequences_name_where_the_others_were(folder):
    Heartbeat(folder, 1).beat("save checkpoint", 12)
    write_failure(folder, 0, "train", LOST)
    text = str(find_cause(folder, {0: ended(1)}).error)
    assert "rank 0 lost its peers" in text and "rank 1 was last in stage 'save checkpoint', step 12" in text


def test_under_another_launcher_a_machine_that_is_cut_off_or_gone_is_named(folder, monkeypatch):
    folder.ranks.mkdir()
    for rank, machine in enumerate(("gpu0", "gpu0", "gpu1")):
        beat = Beat(rank, 1, "train", 7, 0.0, 0.0, host=f"boot of {machine}", machine=machine)
        write_json(folder.beat(rank), asdict(beat))
    monkeypatch.setattr(Beat, "is_gone", False)
    write_failure(folder, 0, "train", LOST, world_size=3)
    text = describe_lost(folder, 0, "train", LOST)
    assert "rank 0 lost its peers in stage 'train'" in text and "gpu" not in text, "others may still say why"
    assert "nothing was heard from gpu1 (rank 2) for 30 s: it has ended" in describe_lost(folder, 0, "train", LOST, [2])
    for rank in (1, 2):
        write_failure(folder, rank, "train", LOST, world_size=3)
    assert "a link between gpu0 and gpu1 is probably cut" in describe_lost(folder, 0, "train", LOST)
    write_json(folder.beat(2), asdict(replace(beat, machine="gpu0")))
    assert "gpu" not in describe_lost(folder, 0, "train", LOST), "all on one machine"


def test_a_user_error_keeps_everything(folder):
    error = UserError("bad row", where="a.jsonl:3", why="because", fix="mend", details=["one", "two"], exit_code=2)
    write_failure(folder, 1, "open data", error)
    write_failure(folder, 1, "end", ValueError("something that follows from it"))
    assert str(find_cause(folder, {1: ended(2)}).error) == str(error)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (LOST, True),
        (RuntimeError("Timed out waiting 20000ms for recv operation to complete"), True),
        (ConnectionResetError("x"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer is a row of the data"), False),
        (UserError("the hub timed out"), False),
    ],
)
def test_consequences_are_told_from_causes(error, consequence):
    assert looks_like_consequence(error) is consequence


def test_a_heartbeat_is_cheap_and_tells_stage_and_step(folder):
    writes = []

    class Counted(Heartbeat):
        def _write(self):
            writes.append(1)
            super()._write()

    heartbeat = Counted(folder, 3)
    for step in range(20_000):
        heartbeat.beat("train", step)
        heartbeat.advance()
    assert len(writes) < 2000, "of 40,000 beats only the ticks and a new stage are written"
    heartbeat.beat("save", 7)
    said = read_beat(folder, 3)
    assert (said.pid, said.stage, said.step, said.done) == (os.getpid(), "save", 7, False)
    heartbeat.close()
    assert read_beat(folder, 3).done


def test_on_a_full_disk_the_cause_and_the_status_are_written_all_the_same(folder, monkeypatch):
    def no_room(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    folder.create()
    folder.write_status("running", pid=1, plan=1)
    heartbeat = Heartbeat(folder, 0)  # keeps room while there is some
    monkeypatch.setattr(files, "write_atomically", no_room)
    try:
        raise RuntimeError("the writer gave up") from OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    except RuntimeError as error:
        assert files.is_disk_full(error) and not files.is_disk_full(OSError(errno.EACCES, "Permission denied"))
        write_failure(folder, 0, "train", files.explain_full_disk(error, folder.path))
    heartbeat.close()
    cause = find_cause(folder, {0: ended(1)}).error
    assert (
        (cause.what, cause.kind) == ("the disk is full", "disk_full")
        and cause.where == "metrics.jsonl"
        and "No space left on device; " in cause.why
    )
    folder.write_failed(cause, make_plan())
    assert folder.read_status()["state"] == "failed" and folder.read_status()["reason"] == "the disk is full"


def test_a_rank_that_could_not_say_that_the_disk_is_full_is_spoken_for(folder, monkeypatch):
    monkeypatch.setattr("manyhands.launch.diagnose.failure.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    assert "probably the disk is full: 0 bytes are free" in find_cause(folder, {0: ended(1)}).error.why


@pytest.mark.parametrize(("limit_s", "moves"), [(3600.0, True), (0.0, False)])
def test_processor_time_counts_as_progress_for_a_limited_time(folder, monkeypatch, limit_s, moves):
    """While libraries are loaded or compile: a rank that only spins is stuck in the end."""
    for name, value in (("TICK_S", 0.01), ("WORKING_CPU_S", 0.0), ("WORKING_LIMIT_S", limit_s)):
        monkeypatch.setattr(f"manyhands.launch.local.heartbeat.{name}", value)
    heartbeat = Heartbeat(folder, 0)
    first, ticks = read_beat(folder, 0), set()
    while len(ticks) < 5:
        last = read_beat(folder, 0)
        ticks.add(last.tick)
    heartbeat.close()
    assert (last.beat > first.beat) == moves


@pytest.mark.parametrize("kind", ["torchrun", "manyhands"])
def test_status_names_a_bug_where_another_launcher_has_started_the_rank(folder, capsys, kind):
    from manyhands.launch.environment import Launcher
    from manyhands.worker.session import Session

    folder.create()
    folder.write_status("running", pid=1, plan=1)
    session = Session(Launcher(kind, rank=0, world_size=1))
    session.folder, session.plan, session.stage = folder, make_plan(), "train"
    session.report_failure(ValueError("the cat sat on the keyboard"))
    status = folder.read_status()
    if kind == "manyhands":  # its launcher writes it, which may know of an earlier cause
        assert status["state"] == "running"
        return
    assert (status["state"], status["plan"]) == ("failed", 1)
    assert status["reason"] == "rank 0 failed in stage 'train': ValueError: the cat sat on the keyboard"


def test_what_a_gpu_held_when_memory_ran_out_reaches_the_next_plan(folder, monkeypatch):
    gib = 2**30
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 60 * gib)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 58 * gib)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (gib, 80 * gib))
    plan, process = make_plan(), SimpleNamespace(stage="train", step=0)
    world = SimpleNamespace(device=torch.device("cuda", 0), rank=1)
    rank = SimpleNamespace(world=world, plan=plan, process=process)
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB"
    error = explain_out_of_memory(rank, torch.OutOfMemoryError(text))
    assert error.where == "rank 1: 62.0 GiB needed or more, 61.0 GiB available, planned 0.0 GiB"
    write_failure(folder, 1, "train", error)
    folder.write_failed(find_cause(folder).error, plan)
    assert folder.ran_out_of_memory(plan)
    assert folder.memory_found() == MemoryFound(needed=62 * gib, available=61 * gib)
    folder.write_failed(UserError("out of memory", kind="out_of_memory"), plan)
    assert folder.memory_found() is None, "on a CPU nothing is measured"


def test_a_folder_that_is_gone_is_the_cause_and_is_not_made_again(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.create()
    assert not folder.is_gone
    folder.path.rename(tmp_path / "moved")
    write_failure(folder, 0, "train", UserError("x"))
    folder.write_failed(UserError("x"), make_plan())
    cause = find_cause(folder, {})
    assert "deleted or moved" in cause.error.what and cause.error.exit_code == 1
    assert not folder.path.exists()
    with pytest.raises(UserError, match="deleted or moved"):
        folder.refuse_gone()
