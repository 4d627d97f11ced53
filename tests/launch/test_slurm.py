"""SLURM's environments, as a cluster with SLURM 22.05 has set them, and starts that would leave tasks or GPUs idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.diagnose.failure import write_failure
from manyhands.launch.environment import Launcher, detect_launcher, refuse_silent_single
from manyhands.launch.local.workers import signal_of_end
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.slurm import expand_hosts, read_place, refuse_outside_step, refuse_unknown_host
from tests.launch.builders import make_config

JOB = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "mh[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SALLOC = JOB  # its shell, on the login node
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "2"}
TASK = {
    **JOB,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "mh[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_STEP_GPUS": "0,1",
}
ONE_TASK = {**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "mh1"}
ONE_TASK |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


@pytest.fixture
def environ(monkeypatch):
    """``environ(BATCH)``: this process's variables of SLURM."""
    for name in (*TASK, "RANK", "WORLD_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_a_task_of_srun():
    assert detect_launcher(TASK) == Launcher("slurm", 3, 1, 4, 2, "mh0", 20001)
    assert detect_launcher(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}).master_addr == "10.0.0.1"
    of_the_job = BATCH | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "4,3"}
    assert detect_launcher(of_the_job) == Launcher("slurm", 0, 0, 7, 4, "mh0", 20001), "no variables of the step"


def test_a_step_may_be_smaller_than_its_job():
    assert detect_launcher(ONE_TASK) == Launcher("slurm", 0, 0, 1, 1, "127.0.0.1", 20001)


@pytest.mark.parametrize(
    "variables", [BATCH, SALLOC, {**BATCH, "SLURM_STEP_ID": "4294967291"}, {**ONE_TASK, "SLURM_STEP_ID": "4294967290"}]
)
def test_batch_scripts_and_shells_are_no_tasks(variables):
    """Though SLURM_PROCID=0 and SLURM_NTASKS=4 look like the first of four."""
    assert detect_launcher(variables).kind == "none"


def test_a_worker_without_srun_is_refused(environ):
    """It waited for three tasks that nobody had started."""
    environ(BATCH)
    with pytest.raises(UserError, match="would train alone") as refused:
        refuse_silent_single(detect_launcher(), make_config(), num_gpus=0)
    assert "SLURM job 1: 4 tasks" in str(refused.value) and "srun python -m manyhands.worker" in str(refused.value)
    refuse_silent_single(detect_launcher(), make_config(**{"parallel.gpus": 1}), num_gpus=2)


def test_one_task_with_several_gpus_is_refused(environ):
    environ(ONE_TASK)
    with pytest.raises(UserError, match="1 of 2 GPUs of this node would be idle"):
        refuse_silent_single(detect_launcher(), make_config(), num_gpus=2)
    refuse_silent_single(detect_launcher(), make_config(**{"parallel.gpus": 1}), num_gpus=2)
    refuse_silent_single(detect_launcher(), make_config(**{"parallel.device": "cpu"}), num_gpus=2)


def test_fewer_tasks_than_gpus_are_refused(environ):
    """A task a node is what torchrun wants."""
    environ({**TASK, "SLURM_GPUS_ON_NODE": "8"})
    with pytest.raises(UserError, match="6 of 8 GPUs of this node would be idle") as refused:
        refuse_silent_single(detect_launcher(), make_config())
    assert "--ntasks-per-node=8" in str(refused.value)
    refuse_silent_single(detect_launcher(), make_config(**{"parallel.gpus": 4}))
    environ(TASK)
    refuse_silent_single(detect_launcher(), make_config())


@pytest.mark.parametrize(
    ("variables", "words"), [(TASK, "srun has started it several times"), (BATCH, "one node of this job")]
)
def test_train_in_every_task_is_refused(variables, words):
    with pytest.raises(UserError, match=words):
        refuse_outside_step(variables)


def test_one_task_on_each_node_is_a_run_over_them():
    """srun --ntasks-per-node=1 manyhands train."""
    one_each = {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    one_each["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    assert read_place(one_each) == (1, 2, "mh0", 20001)
    assert [read_place(variables) for variables in ({}, TASK, ONE_TASK, BATCH, SALLOC)] == [None] * 5


@pytest.mark.parametrize("variables", [{}, ONE_TASK, {**BATCH, "SLURM_JOB_NUM_NODES": "1"}])
def test_train_on_one_node_is_not(variables):
    refuse_outside_step(variables)


def test_a_task_with_a_gpu_of_its_own_takes_that():
    """srun --gpus-per-task=1: each task sees one GPU, its number 0."""
    bound = {**TASK, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert detect_launcher(bound).device_index == 0 and detect_launcher(TASK).device_index == 1
    shared = {**bound, "SLURM_GPUS_ON_NODE": "1"}
    assert detect_launcher(shared).device_index == 1, "two tasks never share one GPU in silence"


def test_a_job_queued_again_meets_nobody_of_before():
    ports = {
        detect_launcher({**TASK, **changes}).master_port
        for changes in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"}, {"SLURM_STEP_ID": "1"})
    }
    assert len(ports) == 4 and all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ["localhost"]),
        ("node[1-3,5]", ["node1", "node2", "node3", "node5"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("login1,gpu[2,4-5],big9", ["login1", "gpu2", "gpu4", "gpu5", "big9"]),
        ("r[1-2]n[3-4].cluster", ["r1n3.cluster", "r1n4.cluster", "r2n3.cluster", "r2n4.cluster"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


def test_a_first_host_without_an_address_is_named():
    with pytest.raises(UserError, match=r"rank 0's host mh0\.invalid has no address"):
        refuse_unknown_host("mh0.invalid", attempts=1)
    refuse_unknown_host("127.0.0.1", attempts=1)


NOTICED = """
import os, signal, subprocess, sys, time
from manyhands.launch.slurm import block_save_signal

block_save_signal()  # before what starts threads, as a rank does
from manyhands.worker import session

session.GRACE_S = 0.0  # of SIGTERM
stop = session.StopSignal()
child = subprocess.Popen(["sleep", "60"])
assert not stop()
os.killpg(0, signal.SIGUSR1)
while not stop():
    time.sleep(0.01)
time.sleep(0.2)
print(stop.exit_code, child.poll())
child.kill()
"""


@pytest.mark.ci
def test_slurm_s_notice_stops_the_run_and_ends_no_process():
    """It reaches every process of a step; by default each of them would end."""
    command = [sys.executable, "-c", NOTICED]
    done = subprocess.run(command, env=environment(), process_group=0, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["138", "None"], 0), done.stderr
    assert signal.SIGUSR1 == 10, "138 - 128"


def environment() -> dict[str, str]:
    """Of a step, in which numpy starts a thread for each core."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | TASK


PASSED_ON = """
import os, signal, subprocess, sys, time
from manyhands.launch.slurm import block_save_signal

block_save_signal()
from manyhands.launch.local.workers import _passing_on_notice

os.kill(os.getpid(), signal.SIGUSR1)  # before there is a worker
with _passing_on_notice():
    worker = [sys.executable, "-c", "import signal, sys; signal.sigwait({signal.SIGUSR1}); sys.exit(138)"]
    print(subprocess.Popen(worker, start_new_session=True).wait(timeout=60))
"""


def test_the_launcher_passes_the_notice_on_to_its_workers():
    """Also to those that start after it: before they wait for it, it must not end them."""
    done = subprocess.run(
        [sys.executable, "-c", PASSED_ON], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("138", 0), done.stderr


@pytest.mark.parametrize(
    ("codes", "received"),
    [
        ([138, 138], signal.SIGUSR1),
        ([138, 130, -15, 143], signal.SIGUSR1),
        ([130], None),
        ([138, 1], None),
        ([138, -9], None),
    ],
)
def test_workers_that_have_saved_are_no_failure(tmp_path, codes, received):
    folder = RunFolder(tmp_path)
    assert signal_of_end(folder, codes) == received
    write_failure(folder, 1, "train", UserError("the disk is full"))
    assert signal_of_end(folder, codes) is None


BLOCKED = """
import pathlib, signal, sys
from manyhands.cli import run_file
from manyhands.cli.main import app

def load_run(*_, **__):
    import numpy

    threads = [status.read_text() for status in pathlib.Path("/proc/self/task").glob("*/status")]
    masks = [int(thread.split("SigBlk:")[1].split()[0], 16) for thread in threads]
    print([bool(mask & 1 << signal.SIGUSR1 - 1) for mask in masks])
    sys.exit()

run_file.load_run = load_run
app(["train", "run.yaml"])
"""


def test_no_thread_of_the_launcher_is_ended_by_the_notice(tmp_path):
    """numpy's threads block no signal of their own: one that is not blocked before they start ends the process."""
    (tmp_path / "run.yaml").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert set(json.loads(done.stdout.lower())) == {True}, done.stderr
