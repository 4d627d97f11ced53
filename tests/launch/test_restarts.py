"""After a fault the run is started again from its newest checkpoint: bounded, with growing pauses, and never for an
error that would only come again.
"""

from __future__ import annotations

import functools
import operator
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from manyhands.core.errors import FAULT, OUT_OF_MEMORY, UserError
from manyhands.core.files import read_json, read_rows, write_json
from manyhands.facts.types import GpuFacts
from manyhands.launch.environment import ATTEMPT
from manyhands.launch.local import start
from manyhands.launch.local.heartbeat import Beat, Heartbeat, read_beats
from manyhands.launch.local.watch import raise_when_stopped, sleep_unless_stopped
from manyhands.launch.nodes.start import PreparedLaunch
from manyhands.launch.restart import restarts as restarts_module
from manyhands.launch.restart.lost_gpus import LaunchGpus
from manyhands.launch.restart.restarts import Restarts
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import Prepared
from manyhands.planner.types import Plan, reason
from tests.launch.builders import make_config, make_plan
from tests.support.nvml import FakeEvents, fake_events

WHY = (
    reason("strategy", strategy="single", device="cpu", ranks=1, reshard=False, asked=False, replicate=1, shard=1),
    reason("batch", samples=8, loss_tokens=None, packs=None, micro_samples=None, micro_tokens=2048, accumulation=None,
           mean_tokens=10, auto=False, device="cpu", ranks=1),
)  # fmt: skip
KILLED = "rank {} was killed (SIGKILL) in stage 'train'"


def save(folder: RunFolder, step: int) -> None:
    path = folder.checkpoints / f"step-{step:06d}" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def reach(folder: RunFolder, step: int | None) -> None:
    folder.ranks.mkdir(parents=True, exist_ok=True)
    write_json(folder.beat(0), asdict(Beat(0, os.getpid(), "train", step, 0.0, 0.0)))


def killed(rank: int = 1) -> UserError:
    return UserError(KILLED.format(rank), exit_code=1, kind=FAULT)


def test_pauses_grow_and_the_number_in_a_row_is_bounded(tmp_path: Path) -> None:
    folder, waits = RunFolder(tmp_path), []
    restarts = Restarts(folder, limit=3)
    for step in (1, 2, 3):
        reach(folder, step)
        waits.append(restarts.decide(killed()).wait_s)
    assert waits == [0, 1, 2]
    reach(folder, 4)
    with pytest.raises(UserError, match="was killed") as refused:
        restarts.decide(killed())
    assert "3 restarts in a row brought no new checkpoint (launch.restarts = 3)" in str(refused.value)


def test_a_run_that_gets_on_may_be_restarted_any_number_of_times(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    restarts = Restarts(folder, limit=1)
    for step in range(10, 200, 10):
        save(folder, step)
        reach(folder, step + 7)
        made = restarts.decide(killed())
        assert (made.from_step, made.lost_steps, made.attempt, made.wait_s) == (step, 7, 1, 0)


def test_the_same_error_at_the_same_step_ends_the_run_on_whichever_rank_it_comes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    restarts = Restarts(folder, limit=9)
    reach(folder, 7)
    assert restarts.decide(killed(rank=0)).from_step is None
    with pytest.raises(UserError) as refused:
        restarts.decide(killed(rank=1))
    assert "it is the second time after step 7 in this launch" in str(refused.value)
    reach(folder, 8)
    restarts.decide(killed(rank=1))  # another step: another fault


def test_none_are_made_where_none_are_wanted(tmp_path: Path) -> None:
    error = killed()
    with pytest.raises(UserError) as refused:
        Restarts(RunFolder(tmp_path), limit=0).decide(error)
    assert refused.value is error and not error.details


def test_on_fewer_gpus_attempts_count_from_one_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 4)
    restarts = Restarts(folder, limit=1)
    restarts.decide(killed())
    made = restarts.decide(killed(), "GPU 1 (H100) is lost: it does not answer")
    assert (made.from_step, made.attempt) == (4, 1)
    assert "(SIGKILL) in stage 'train'; GPU 1 (H100) is lost: it does not answer; restarting from" in str(made)


def test_steps_that_are_done_again_are_counted_from_the_newest_that_any_rank_has_begun(tmp_path: Path) -> None:
    """A heartbeat's record is up to half a second old; the step in flight is in none."""
    folder = RunFolder(tmp_path)
    save(folder, 4)
    beats = [Heartbeat(folder, rank) for rank in (0, 1)]
    for step in range(5, 30):
        for rank, beat in enumerate(beats):
            beat.begin_step(step + rank)
            beat.beat("train", step + rank - 1)
    made = Restarts(folder, limit=3).decide(killed())
    assert (made.from_step, made.step, made.lost_steps) == (4, 29, 26)
    for beat in beats:
        beat.beat("export")
        beat.close()
    save(folder, 30)
    assert Restarts(folder, limit=3).decide(killed()).lost_steps == 0, "training had ended"


def test_a_signal_ends_the_pause() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    assert sleep_unless_stopped(60) == signal.SIGTERM and time.monotonic() - begin < 30
    assert sleep_unless_stopped(0) is None


@pytest.fixture
def launch(planned, monkeypatch: pytest.MonkeyPatch):
    """``launch("end", "kill once")``: (exit code or error, what was reported, the folder)."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(restarts_module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(start, "run_workers", functools.partial(start.run_workers, module="fake_worker"))
    monkeypatch.setattr("manyhands.launch.local.watch.GRACE_S", 1.0)

    def plan_fewer(prepared: Prepared, num_left: int) -> Prepared:
        prepared.folder.write_plan(plan := make_plan(num_left, number=2, cause="resize", why=WHY))
        return replace(prepared, plan=plan)

    monkeypatch.setattr(start, "plan_fewer", plan_fewer)

    def run(*acts: str, **keys: object) -> tuple[int | UserError, str, RunFolder]:
        folder, plan = planned(*acts)
        found = PreparedLaunch(Prepared(folder, make_config(**keys), plan, resume=False, finished=False), None)
        try:
            code: int | UserError = start._launch(found, (), start.LaunchState())
        except UserError as error:
            code = error
        log = folder.launcher_log
        return code, log.read_text() if log.exists() else "", folder

    return run


def test_a_killed_rank_is_started_again_and_both_say_so_in_one_line(launch, capfd: pytest.CaptureFixture[str]) -> None:
    code, log, folder = launch("wait unless killed once", "kill once")
    assert code == 0
    line = "rank 1 was killed (SIGKILL) in stage 'train', step 1; restarting from the start in 0.01 s, 1 step lost"
    assert capfd.readouterr().out.splitlines() == [f"{line} (attempt 1 of 3)"]
    assert line in log and "often the kernel when the host runs out of memory" in log, "the log has the whole cause"
    [row] = read_rows(folder.restarts)
    assert (row["step"], row["from_step"], row["lost_steps"], row["attempt"]) == (1, None, 1, 1)
    assert folder.read_status()["restarts"] == 1


@pytest.mark.ci
def test_ranks_know_the_attempt(launch) -> None:
    code, _, folder = launch("environment", "kill once")
    seen = read_json(folder.path / "environment-0.json")
    assert code == 0 and seen[ATTEMPT] == "2" and ATTEMPT not in os.environ


@pytest.mark.ci
def test_a_signal_while_fewer_gpus_are_planned_for_ends_the_run(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    @raise_when_stopped()
    def plan_fewer(prepared: Prepared, num_left: int) -> Prepared:
        signal.raise_signal(signal.SIGTERM)
        return prepared

    monkeypatch.setattr(start, "plan_fewer", plan_fewer)
    code, log, folder = launch("lost peer", "bad device", **{"launch.min_gpus": 1})
    assert code == 143 and folder.read_status()["state"] == "interrupted"
    assert "SIGTERM: the run has ended, nothing was saved yet; the same command starts it again" in log


def test_a_signal_while_a_smaller_plan_is_made_ends_the_run_which_the_next_start_plans_smaller(
    launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(folder: RunFolder, plan: Plan, **options: object) -> int:
        folder.write_failed(error := UserError("out of memory", kind=OUT_OF_MEMORY, data={"needed": 2}), plan)
        raise error

    @raise_when_stopped()
    def plan_smaller(prepared: Prepared) -> Prepared:
        signal.raise_signal(signal.SIGINT)
        return prepared

    monkeypatch.setattr(start, "run_workers", run_out)
    monkeypatch.setattr(start, "plan_smaller", plan_smaller)
    code, _, folder = launch("beat")
    assert code == 130 and folder.read_status()["state"] == "interrupted"
    assert folder.ran_out_of_memory(folder.read_plan()) and folder.read_status()["measured"] == {"needed": 2}


def test_a_signal_while_gpus_are_tested_ends_the_run(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def test(*_: object) -> dict[int, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return {}

    monkeypatch.setattr(LaunchGpus, "find_lost", test)
    code, log, folder = launch("wait unless killed once", "kill once")
    assert code == 143 and folder.read_status()["state"] == "interrupted"
    assert "SIGTERM: the run has ended, nothing was saved yet; the same command starts it again" in log


@pytest.mark.ci
def test_what_fails_at_each_attempt_ends_at_the_second(launch) -> None:
    error, log, folder = launch("lost peer", "raise")
    assert isinstance(error, UserError) and error.exit_code == 1
    assert "ValueError: the cat sat on the keyboard" in str(error) and "it is the second time after step 1" in str(
        error
    )
    assert log.count("restarting") == 1 and len(read_rows(folder.restarts)) == 1
    assert folder.read_status()["state"] == "failed"


@pytest.mark.ci
def test_a_device_that_fails_twice_is_lost_and_the_run_goes_on_with_what_is_left(launch) -> None:
    code, log, folder = launch("lost peer", "bad device", **{"launch.min_gpus": 1})
    assert code == 0, code
    first, second = [line for line in log.splitlines() if "restarting" in line]
    assert "is lost" not in first and "(attempt 1 of 3)" in first
    lost = "the device of rank 1 is lost: it has failed 2 times in this launch"
    assert f"busy or unavailable; {lost}; restarting from the start" in second
    assert "plan 2: single, one process, nothing sharded; 8 samples" in log
    rows = read_rows(folder.restarts)
    assert [row.get("lost", "") for row in rows] == ["", lost]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeEvents:
    """Of two GPUs, whose ranks run on the CPU."""
    fake = fake_events(monkeypatch, ["GPU-a", "GPU-b"])
    pairs = enumerate(fake.uuids)
    made = tuple(GpuFacts(index=i, name="H100", memory_bytes=1, free_bytes=1, uuid=uuid) for i, uuid in pairs)
    num = operator.attrgetter("layout.world_size")
    monkeypatch.setattr(LaunchGpus, "of", lambda plan: LaunchGpus(num(plan), made[: num(plan)]))
    monkeypatch.setattr("manyhands.facts.health.find_lost", lambda uuids: {})
    return fake


def report_once(driver: FakeEvents, folder: Path, number: int) -> None:
    """While the first attempt of a run in ``folder`` is going on; its rank 1 fails when that is heard."""

    def before() -> None:
        if logs := [*folder.rglob("rank-1.log")]:
            driver.report("GPU-b", number)
            driver.before = (logs[0].parent.parent / "heard").touch

    driver.before = before


@pytest.mark.ci
def test_the_drivers_report_names_the_lost_gpu_and_the_run_goes_on_without_it(launch, driver, tmp_path: Path) -> None:
    report_once(driver, tmp_path, 79)
    code, log, folder = launch("lost peer", "raise when heard", **{"launch.min_gpus": 1})
    assert code == 0, code
    what = "ValueError: the cat sat on the keyboard; the driver reports of its GPU: Xid 79, it has fallen off the bus"
    assert f"{what}; GPU 1 (H100) is lost: Xid 79, it has fallen off the bus; restarting from the start" in log
    assert "  - the driver reports of GPU 1 (H100): Xid 79, it has fallen off the bus" in log
    [row] = read_rows(folder.restarts)
    assert row["lost"] == "GPU 1 (H100) is lost: Xid 79, it has fallen off the bus"


@pytest.mark.ci
def test_a_kernels_fault_is_named_and_no_gpu_is_lost_by_it(launch, driver, tmp_path: Path) -> None:
    report_once(driver, tmp_path, 31)
    error, log, folder = launch("lost peer", "raise when heard", **{"launch.min_gpus": 1, "launch.restarts": 1})
    assert isinstance(error, UserError) and "Xid 31, a kernel accessed memory that is not mapped; restarting" in log
    assert "is lost" not in log and not any(row.get("lost") for row in read_rows(folder.restarts))


def test_a_rank_that_crashes_when_the_run_is_finished_is_a_warning(launch, capfd: pytest.CaptureFixture[str]) -> None:
    code, log, folder = launch("end", "fail when finished")
    assert code == 0, "every result is written and verified"
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("warning: rank 1 failed in stage 'train': ValueError: the cat sat on the keyboard, after")
    assert line.endswith(f"its results are complete; log: {folder.log(1)}") and line in log
    assert "restarting" not in log and folder.is_finished and not folder.restarts.exists()


def test_what_the_user_must_change_is_never_tried_again(launch) -> None:
    error, log, folder = launch("wait", "user error")
    assert isinstance(error, UserError) and error.exit_code == 2
    assert "restarting" not in log and not folder.restarts.exists()


def test_the_report_says_how_often_and_why() -> None:
    from manyhands.metrics.report import _restart_lines

    lost = "GPU 0 (H100) is lost: it does not answer"
    rows = [{"cause": killed().what, "lost_steps": 2}, {"cause": "rank 0 hangs", "lost_steps": 1, "lost": lost}]
    assert _restart_lines([]) == []
    assert "Restarted 2 times after a fault, 3 steps done again: rank 1 was killed" in _restart_lines(rows)[1]
    assert f"rank 0 hangs ({lost})" in _restart_lines(rows)[1]


def test_ranks_may_be_looked_at_while_a_launcher_removes_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    """As status, list and a benchmark do."""
    folder, done = RunFolder(tmp_path), threading.Event()

    def restart_all_the_time() -> None:
        while not done.is_set():
            folder.ranks.mkdir()
            folder.clear_ranks()

    thread = threading.Thread(target=restart_all_the_time)
    thread.start()
    try:
        for _ in range(5000):
            assert read_beats(folder) == {} and folder.read_failures() == {}
    finally:
        done.set()
        thread.join()
