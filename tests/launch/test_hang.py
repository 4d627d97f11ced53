"""Why a run does not go on: the rules on given facts, and what real processes say of themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from manyhands.core.files import write_json
from manyhands.launch.diagnose import hang
from manyhands.launch.diagnose.hang import DISK, GONE, STOPPED, Child, RankState, find_cause
from manyhands.launch.diagnose.stacks import MAIN, Collective, Frame, RankStacks, parse_faulthandler, shorten
from manyhands.launch.local.heartbeat import SILENT_S, Beat, Heartbeat, this_host
from manyhands.launch.run.folder import RunFolder

REDUCE = Collective("all_reduce", "default_pg", 57, "[[4096]]", done=False)
GATHER = Collective("_allgather_base", "default_pg", 57, "[[512]]", done=False)
SLEEPS = [Frame("/home/me/hook.py", 12, "after_step"), Frame("/x/src/manyhands/training/loop.py", 90, "train")]
IN_DATA = [
    Frame("/usr/lib/python3.11/threading.py", 320, "wait"),
    Frame("/x/manyhands/data/batch/batches.py", 40, "get"),
]
IN_SAVE = [Frame("/x/manyhands/core/files.py", 30, "sync"), Frame("/x/manyhands/checkpoint/save.py", 80, "_write")]
IN_WRITE = [Frame("/x/manyhands/checkpoint/save.py", 80, "_write")]


def state(rank: int, *, waits: Collective | None = None, main: list[Frame] | None = None, **fields) -> RankState:
    stage = fields.pop("stage", "train")
    beat = Beat(rank, 1000 + rank, stage, 7, 0.0, 0.0, host=fields.pop("host", "here"))
    stacks = RankStacks({MAIN: main or []}, (waits,) if waits else ())
    return RankState(rank, f"rank {rank}", beat, 30.0, stacks=stacks, **fields)


WAITS = state(0, waits=REDUCE)


@pytest.mark.parametrize(
    ("culprits", "others", "words"),
    [
        ([state(1, process=STOPPED)], [WAITS], "its process is stopped (SIGSTOP), as by Ctrl-Z, a debugger or a "),
        ([state(0, waits=REDUCE)], [state(1, process=GONE)], "rank 1 ended without a report"),
        ([state(1, process=DISK, stage="checkpoint")], [WAITS], "it waits for a disk"),
        ([state(1, stage="checkpoint", main=IN_SAVE)], [WAITS],
         "files in stage 'checkpoint' and is not making progress"),
        ([state(1, main=IN_WRITE)], [WAITS], "it reads or writes files"),
        ([state(1, main=IN_DATA)], [WAITS], "its next batch does not come"),
        ([state(1, main=IN_DATA, children=(Child(77, STOPPED, "prepares batches"),))], [WAITS],
         "process 77, which prepares batches for rank 1, is stopped"),
        ([state(1, stage="checkpoint", children=(Child(78, DISK, "writes checkpoints"), Child(79, STOPPED)))], [WAITS],
         "it waits for a disk"),
        ([state(0, waits=REDUCE), state(1, waits=replace(REDUCE, started=False))], [],
         "the device of rank 1 has not come to the collective that the others' run"),
        ([state(1, is_stuck=True)], [WAITS], "it hangs in compiled code"),
        ([state(1, waits=GATHER)], [WAITS], "ranks have taken different paths"),
        ([state(0, waits=REDUCE), state(1, waits=REDUCE)], [], "the connection between them hangs"),
        ([state(0, waits=REDUCE), state(1, waits=REDUCE, host="there")], [],
         "the connection between the machines hangs"),
        (
            [state(1, main=SLEEPS)],
            [WAITS],
            "it hangs, in after_step (hook.py:12), and has not entered the collective that rank 0 waits in"
            " (all_reduce number 57",
        ),
        ([state(0), state(1)], [], "no single rank is the cause"),
        ([RankState(1, "rank 1")], [WAITS], "it never reported a start"),
        ([state(1)], [], "it hangs, or waits for an external resource"),
    ],
)  # fmt: skip
def test_the_likely_cause(culprits: list[RankState], others: list[RankState], words: str) -> None:
    assert words in find_cause(culprits, others, 2**30)


def test_a_library_is_shown_with_who_has_called_it() -> None:
    frames = [Frame("/v/lib/python3.11/site-packages/torch/cuda/streams.py", 5, "synchronize"), *SLEEPS]
    one = state(1, main=frames)
    assert one.place == "synchronize (torch/cuda/streams.py:5), called by after_step (hook.py:12)"
    assert shorten("/a/src/manyhands/training/loop.py") == "manyhands/training/loop.py"


RANK = """
import sys, time, ctypes, threading
from manyhands.launch.local.heartbeat import Heartbeat
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.diagnose.stacks import listen_for_signal
folder = RunFolder(sys.argv[1])
heartbeat = Heartbeat(folder, 0)
listen_for_signal(folder, 0)
heartbeat.read_collectives = lambda: [dict(name="all_reduce", group="default_pg", number=3, sizes="[[4]]", done=False)]
heartbeat.beat("train", 4)
def stuck_here():
    if sys.argv[2] == "holding":
        ctypes.PyDLL(None).sleep(300)  # with Python's lock: no other thread runs
    time.sleep(300)
print("ready", flush=True)
stuck_here()
"""


def look_at(folder: RunFolder, how: str, *, stop: bool = False) -> RankState:
    from manyhands.launch.local.heartbeat import read_beat

    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder.path), how], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            if stop:
                os.kill(process.pid, signal.SIGSTOP)
                while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
            return hang.collect_stacks(folder, {0: RankState(0, "rank 0", read_beat(folder, 0))})[0]
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["sleeping", "holding"])
def test_a_rank_shows_its_stack_and_collectives_also_when_python_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PATH", "")  # no py-spy
    monkeypatch.setattr(hang, "ANSWER_S", 60.0 if how == "sleeping" else 1.0)
    folder = RunFolder(tmp_path / "run")
    found = look_at(folder, how)
    assert "stuck_here" in [frame.function for frame in found.stacks.main]
    if how == "sleeping":
        assert found.stacks.waits_in == Collective("all_reduce", "default_pg", 3, "[[4]]", done=False)
    path = hang.keep(folder, "rank 0 made no progress", "it hangs", [found])
    text = path.read_text() if path else ""
    assert "likely cause: it hangs" in text and "stuck_here" in text and "stage 'train', step 4" in text
    assert hang.keep(folder, "again", "it hangs", [found]).name == "hang-2.txt"


def test_two_who_look_at_once_keep_what_each_has_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(lambda number: hang.keep(folder, f"title {number}", "it hangs", []), range(24)))
    assert sorted(path.read_text().splitlines()[1] for path in kept if path) == sorted(f"title {n}" for n in range(24))


def test_a_stopped_process_is_seen_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(hang, "ANSWER_S", 200.0)
    found = look_at(RunFolder(tmp_path / "run"), "sleeping", stop=True)
    assert found.process == STOPPED


def test_a_process_that_does_not_listen_gets_no_signal(tmp_path: Path) -> None:
    """It would be ended by it."""
    from manyhands.launch.diagnose.stacks import signal_for_stack

    folder = RunFolder(tmp_path / "run")
    Heartbeat(folder, 0).close()
    assert not signal_for_stack(folder, 0, os.getpid())


def test_the_newest_dump_of_several_is_read() -> None:
    text = (
        "Thread 0x00007 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
        "Current thread 0x00008 (most recent call first):\n"
        '  File "a.py", line 3 in first\n'
        "Current thread 0x00008 (most recent call first):\n"
        '  File "a.py", line 4 in second\n'
    )
    assert parse_faulthandler(text)[MAIN] == [Frame("a.py", 4, "second")]


def test_a_live_run_is_examined_without_being_ended(planned) -> None:
    """While it works, and when one rank stands still."""
    from typer.testing import CliRunner

    from manyhands.cli.main import app
    from manyhands.launch.diagnose.hang import examine

    folder, _ = planned("wait", "end")
    call = CliRunner().invoke
    told = call(app, ["doctor", "--run", str(folder.path)])
    assert told.exit_code == 0 and "no rank is at work" in told.output
    ahead, behind = Heartbeat(folder, 0), Heartbeat(folder, 1)
    ahead.counts_processor = behind.counts_processor = False  # the processor works here, for this test
    try:
        ahead.beat("train", 8)
        behind.beat("train", 7)
        told = examine(folder, look_s=0.0, still_s=3600.0)
        assert not told.stands_still and "is making progress: stage 'train', step 7" in told.lines[0]
        told = examine(folder, look_s=1.2, still_s=1.0)
        text = "\n".join(told.lines)
        assert told.stands_still and "rank 1 has made no progress for " in text and "likely cause: it hangs" in text
        assert "test_a_live_run_is_examined" in text, "the stack of this very process"
        assert "rank 0: stage 'train', step 8" in text and (folder.logs / "hang-1.txt").exists()
    finally:
        ahead.close()
        behind.close()


def test_a_run_that_has_failed_is_not_taken_for_one_that_hangs(planned) -> None:
    """Heartbeats of its killed ranks are still there; with the launcher, or from before a reboot, too."""
    from manyhands.launch.diagnose.hang import examine

    folder, _ = planned("wait", "end")
    with subprocess.Popen(["sleep", "60"]) as killed:
        killed.kill()
    folder.ranks.mkdir()

    def told(host: str, state: str, **fields: object) -> tuple[str, ...]:
        write_json(folder.beat(0), asdict(Beat(0, killed.pid, "train", 7, 0.0, 0.0, host=host)))
        os.utime(folder.beat(0), (time.time() - 2 * SILENT_S,) * 2)
        folder.write_status(state, **fields)
        found = examine(folder, look_s=0.0, still_s=0.0)
        assert not found.stands_still and not list(folder.logs.glob("hang-*"))
        return found.lines

    reason = "rank 0 was killed (SIGKILL)"
    assert told(this_host(), "failed", reason=reason) == (f"{folder.path}: failed ({reason}); no rank is at work",)
    assert told(this_host(), "running", pid=killed.pid) == (f"{folder.path}: killed; no rank is at work",)
    assert told("before", "running", pid=killed.pid) == (f"{folder.path}: killed; no rank is at work",)


def with_killed_rank(planned) -> RunFolder:
    """A run that is running, whose one rank was killed in training and whose launcher, this process, lives."""
    folder, _ = planned("wait", "end")
    with subprocess.Popen(["sleep", "60"]) as killed:
        killed.kill()
    folder.ranks.mkdir()
    write_json(folder.beat(0), asdict(Beat(0, killed.pid, "train", 7, 0.0, 0.0, host=this_host())))
    folder.write_status("running", pid=os.getpid())
    return folder


def test_a_run_whose_ranks_are_gone_is_examined_as_long_as_its_launcher_lives(planned) -> None:
    from manyhands.launch.diagnose.hang import examine

    folder = with_killed_rank(planned)
    assert examine(folder, look_s=0.0, still_s=0.0).stands_still


def test_a_run_that_ends_or_restarts_meanwhile_does_not_hang(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.launch.diagnose.hang import examine

    folder = with_killed_rank(planned)
    folder.add_restart({"cause": "rank 0 was killed (SIGKILL)", "wait_s": 60.0})
    told = examine(folder, look_s=0.0, still_s=0.0)
    why = "restarting (rank 0 was killed (SIGKILL)); no rank is at work"
    assert told.lines == (f"{folder.path}: {why}",) and not told.stands_still

    record = folder.beat(0).read_text()
    folder.clear_ranks()
    folder.write_status("running", pid=os.getpid())
    assert examine(folder, look_s=0.0).lines == (f"{folder.path}: running; its ranks are starting",)
    folder.ranks.mkdir()
    folder.beat(0).write_text(record)

    def finish(seconds: float) -> None:
        folder.write_status("finished")
        folder.clear_ranks()

    monkeypatch.setattr(hang.time, "sleep", finish)
    told = examine(folder, look_s=0.0, still_s=0.0)
    assert told.lines == (f"{folder.path}: finished; no rank is at work",) and not told.stands_still
    assert not list(folder.logs.glob("hang-*"))


def test_of_queued_collectives_the_oldest_is_waited_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's recorder has them: many are queued while the device hangs in one."""
    from manyhands.launch.diagnose.stacks import MAX_COLLECTIVES
    from manyhands.worker import collectives

    def entry(number: int, state: str, retired: bool) -> dict[str, object]:
        fields = {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "input_sizes": [[4]]}
        return fields | {"collective_seq_id": number, "time_created_ns": number, "state": state, "retired": retired}

    recorded = [entry(1, "completed", True), entry(2, "started", False)]
    recorded += [entry(number, "scheduled", False) for number in range(3, 40)]
    monkeypatch.setattr(collectives, "_dump", lambda recorder: recorded if "nccl" in recorder else [])
    found = RankStacks(collectives=tuple(Collective(**one) for one in collectives.read_collectives()))
    assert len(found.collectives) == 2 * MAX_COLLECTIVES and found.collectives[-1].number == 39
    assert found.waits_in == Collective("all_reduce", "default_pg", 2, "[[4]]", done=False)


def test_this_torch_records_collectives(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    from manyhands.worker.collectives import count_collectives, read_collectives

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = count_collectives()
        dist.all_reduce(torch.ones(3))
        assert count_collectives() == before + 1
        deadline = time.monotonic() + 60  # the recorder is told by another thread that it has ended
        while not (last := Collective(**read_collectives()[-1])).done and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (last.name, last.sizes, last.done) == ("all_reduce", "[[3]]", True)
    finally:
        dist.destroy_process_group()
