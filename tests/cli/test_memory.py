"""GPUs of this machine, and what a run's ranks hold beside what was planned."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from manyhands.core.errors import EXIT_FAILED, EXIT_USAGE
from manyhands.facts import host
from manyhands.facts.types import GpuFacts, HostFacts
from manyhands.launch.local.heartbeat import SILENT_S, this_host, was_killed
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.usage import TAIL_BYTES, find_live_runs, last_row, read_usage
from manyhands.planner.types import MemoryEstimate
from tests.cli.conftest import call
from tests.launch.builders import make_config, make_plan

GIB = 2**30
GPUS = tuple(
    GpuFacts(index=index, name="NVIDIA H200", memory_bytes=140 * GIB, free_bytes=free * GIB, compute_capability=(9, 0))
    for index, free in ((0, 139), (1, 10))
)


@pytest.fixture
def two_gpus(monkeypatch):
    found = HostFacts(gpus=GPUS, num_cores=8, memory_bytes=64 * GIB, free_memory_bytes=60 * GIB)
    monkeypatch.setattr(host, "read_host_facts", lambda *_: found)


@pytest.fixture
def planned(tmp_path) -> RunFolder:
    """A run planned for two GPUs, 10 GiB each of at most 16."""
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.create()
    config = make_config(**{"output.dir": str(tmp_path / "runs")})
    folder.write_config(config)
    memory = MemoryEstimate(terms={"weights": 10 * GIB}, limit=16 * GIB)
    folder.write_plan(make_plan(config_digest=config.digest, device="cuda", memory=memory))
    return folder


def write_step(folder: RunFolder, *peaks: float, step: int = 3) -> None:
    devices = [{"memory_allocated_bytes": (peak - 1) * GIB, "peak_bytes": peak * GIB} for peak in peaks]
    with open(folder.metrics, "a") as file:
        file.write(json.dumps({"kind": "step", "step": step, "devices": devices}) + "\n")


def write_beat(folder: RunFolder, rank: int, pid: int) -> None:
    folder.ranks.mkdir(exist_ok=True)
    beat = {"rank": rank, "pid": pid, "stage": "train", "step": 3, "beat": 0.0, "tick": 0.0, "host": this_host()}
    folder.beat(rank).write_text(json.dumps(beat))


def test_gpu_info_counts_names_and_adds_up(two_gpus):
    lines = call("gpu-info").stdout.splitlines()
    assert lines[0] == "Number of GPUs: 2" and "Total VRAM: 280.0 GiB" in lines
    assert lines[2].startswith("  GPU 1: NVIDIA H200 (140.0 GiB), 10.0 GiB free")


def test_without_a_run_every_gpu_has_its_verdict(two_gpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("memory-check")
    assert result.exit_code == 0, result.output
    assert "GPU 0: NVIDIA H200, 1.0 GiB of 140.0 GiB used (1%): free" in result.stdout
    assert "GPU 1: NVIDIA H200, 130.0 GiB of 140.0 GiB used (93%): in use" in result.stdout
    assert "no run is active" in result.stdout


def test_a_finished_run_is_compared_with_its_plan(planned):
    write_step(planned, 8.0, 9.0)
    planned.write_status("finished")
    planned.report_json.write_text(json.dumps({"measured": {"peak_memory_bytes_by_rank": [8 * GIB, 9.5 * GIB]}}))
    result = call("memory-check", planned.path)
    assert result.exit_code == 0
    assert "rank 1, GPU: planned 10.0 GiB, limit 16.0 GiB; 9.5 GiB at the peak (95% of the plan)" in result.stdout
    assert result.stdout.splitlines()[-1] == "verdict: all ranks within the plan"


@pytest.mark.parametrize(
    ("peak", "verdict", "code"), [(12.0, "above the plan", 0), (17.0, "above the limit", EXIT_FAILED)]
)
def test_the_worst_rank_gives_the_verdict(planned, peak, verdict, code):
    write_step(planned, 8.0, peak)
    planned.write_status("failed")
    result = call("memory-check", planned.path)
    assert result.exit_code == code and f"verdict: rank 1 {verdict}" in result.stdout


def test_of_a_live_run_the_driver_is_asked(planned, tmp_path, monkeypatch):
    """By process: rank 1's is on GPU 5. Without a run named, the live ones are found."""
    write_step(planned, 8.0, 8.0)
    planned.write_status("running")
    write_beat(planned, 0, os.getpid())
    write_beat(planned, 1, os.getppid())
    usage = read_usage(planned, {os.getppid(): (5, 11 * GIB)})
    assert (usage.state, usage.ranks[1].gpu, usage.ranks[1].verdict) == ("running", 5, "above the plan")
    assert (usage.ranks[0].gpu, usage.ranks[0].now, usage.ranks[0].verdict) == (None, 7 * GIB, "within the plan")
    monkeypatch.chdir(tmp_path)
    assert "run demo: running, step 3 of 10" in call("memory-check").stdout


def test_a_run_from_before_a_restart_of_the_machine_is_not_live(planned, monkeypatch, tmp_path):
    write_step(planned, 8.0, 8.0)
    planned.write_status("running")
    write_beat(planned, 0, os.getpid())
    monkeypatch.setattr("manyhands.launch.local.heartbeat.this_host", lambda: "after the restart")
    assert read_usage(planned).state == "running", "it may be on another machine"
    os.utime(planned.beat(0), (time.time() - 2 * SILENT_S,) * 2)
    assert read_usage(planned).state == "killed" and read_usage(planned).ranks[0].now is None
    monkeypatch.chdir(tmp_path)
    assert "no run is active" in call("memory-check").stdout


def test_a_killed_run_holds_nothing_now(planned):
    write_step(planned, 8.0, 8.0)
    planned.write_status("running")
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_beat(planned, 0, gone.pid)
    usage = read_usage(planned)
    assert usage.state == "killed" and usage.ranks[0].now is None and usage.ranks[0].peak == 8 * GIB


@pytest.mark.parametrize("left", [False, True], ids=["nothing left", "last heartbeat left"])
def test_a_run_whose_launcher_alone_was_killed_is_no_longer_running(planned, left: bool):
    """Its ranks then end by themselves; `doctor --run` called it killed, others running."""
    write_step(planned, 8.0, 8.0)
    if left:
        write_beat(planned, 0, os.getpid())
        planned.beat(0).write_text(json.dumps(json.loads(planned.beat(0).read_text()) | {"done": True}))
    gone = subprocess.Popen(["true"])
    planned.write_status("running", pid=gone.pid)
    gone.wait()
    assert read_usage(planned).state == "killed" and find_live_runs(planned.path.parent) == []
    assert "demo: killed, step 3 of" in call("runs", "show", planned.path).stdout
    assert " killed " in call("runs", "list", "--dir", planned.path.parent).stdout
    planned.write_status("running", pid=os.getpid())
    assert read_usage(planned).state == "running"
    planned.write_status("running", pid=gone.pid, host="another machine")
    assert read_usage(planned).state == "running", "nothing is known of a launcher there"


def test_between_two_attempts_a_run_goes_on(planned):
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_beat(planned, 0, gone.pid)
    planned.write_status("running", pid=os.getpid())
    assert read_usage(planned).state == "running"
    assert [folder.path for folder in find_live_runs(planned.path.parent)] == [planned.path]


def test_a_run_that_ends_while_it_is_looked_at_was_not_killed(planned):
    gone = subprocess.Popen(["true"])
    gone.wait()
    planned.write_status("running", pid=gone.pid)
    before = planned.read_status()
    assert was_killed(planned, before, {})
    planned.write_status("finished")
    assert not was_killed(planned, before, {})


def test_before_the_first_step_nothing_is_claimed(planned):
    assert "verdict: all ranks unmeasured" in call("memory-check", planned.path).stdout


def test_the_run_file_names_the_run(planned, tmp_path):
    run = tmp_path / "demo.yaml"
    run.write_text(f"model: {{name: tiny}}\ndata: {{train: rows.jsonl}}\noutput: {{dir: {tmp_path / 'runs'}}}\n")
    assert "run demo" in call("memory-check", run).stdout
    run.write_text(run.read_text() + "name: other\n")
    missing = call("memory-check", run)
    assert missing.exit_code == EXIT_USAGE and "has not been started" in missing.stderr


def test_a_line_that_was_cut_off_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"kind": kind, "step": step}) for step in (1, 2) for kind in ("step", "evaluation")]
    path.write_text("x" * TAIL_BYTES + "\n" + "\n".join(rows) + '\n{"kind": "st')
    assert last_row(path) == {"kind": "step", "step": 2}
    assert last_row(Path("none")) == {}


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"kind": "step", "step": 1, "devices": ["x"]}', '{"kind": "step", "step": 1, "devices": "x"}'],
)
@pytest.mark.parametrize("measured", ['"x"', '{"peak_memory_bytes_by_rank": ["x"]}'])
def test_damaged_measurements_are_none(planned: RunFolder, line: str, measured: str):
    planned.metrics.write_text(line + "\n")
    planned.report_json.write_text('{"measured": ' + measured + "}")
    planned.status_json.write_text('{"state": "finished"}')
    shown = call("memory-check", planned.path)
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert "rank 0" in shown.output and "Traceback" not in shown.output
