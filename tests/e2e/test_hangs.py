"""Runs that stand still: under every launcher they end in bounded time, and name the rank, where it is, and why."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.e2e.runs import NO_VERIFY, WORKER, Place, at_step

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
TIMEOUT_S = 8
BOUND_S = 30.0  # after the limit, that nothing waits any more
LIMIT = f"parallel.timeout_s={TIMEOUT_S}"


def stamp(place: Place, name: str) -> str:
    """An ``act`` before the fault: when it happens."""
    return f"pathlib.Path({str(place.folder / name)!r}).touch()\n"


def seconds_since(place: Place, name: str) -> float:
    return time.time() - (place.folder / name).stat().st_mtime


def read_hang(place: Place, name: str) -> str:
    (path,) = place.run(name).folder.glob("logs/hang-*.txt")
    return path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_torchrun(place: Place, rank: int) -> None:
    name = f"torchrun-{rank}"
    plant = at_step(2, stamp(place, name) + "os.kill(os.getpid(), signal.SIGSTOP)", rank=rank)
    ended = place.call(*TORCHRUN, *WORKER, f"name={name}", LIMIT, plant=plant | NO_VERIFY)
    assert ended.code != 0 and seconds_since(place, name) < TIMEOUT_S + BOUND_S
    assert ended.output.count("error: ") == 1, ended.output
    assert f"error: rank {rank} made no progress for " in ended.output, ended.output
    assert "its process is stopped (SIGSTOP)" in ended.output and "waiting in" in ended.output
    text = read_hang(place, name)
    assert f"rank {1 - rank}: stage 'train'" in text and "last collectives" in text
    status = place.run(name).read("status.json")
    assert status["state"] == "failed" and f"rank {rank} made no progress" in status["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_stopped_process_that_has_no_peer(place: Place, launcher: str) -> None:
    """Nobody but a process of its own can tell."""
    name = f"alone-{launcher}"
    plant = at_step(2, stamp(place, name) + "os.kill(os.getpid(), signal.SIGSTOP)") | NO_VERIFY
    if launcher == "srun":
        (ended,) = place.by_srun(f"name={name}", LIMIT, plant=plant, num_tasks=1)
    else:
        one = ("-m", "torch.distributed.run", "--nproc_per_node=1")
        ended = place.call(*one, *WORKER, f"name={name}", LIMIT, plant=plant)
    assert ended.code != 0 and seconds_since(place, name) < TIMEOUT_S + BOUND_S
    assert ended.output.count("error: ") == 1 and "error: rank 0 made no progress for " in ended.output, ended.output
    assert "its process is stopped (SIGSTOP)" in ended.output, ended.output
    status = place.run(name).read("status.json")
    assert status["state"] == "failed" and "rank 0 made no progress" in status["reason"]


@pytest.mark.slow
def test_a_rank_that_hangs_in_code_of_the_users_under_srun(place: Place) -> None:
    act = stamp(place, "srun") + "def my_own_function(): time.sleep(900)\nmy_own_function()"
    tasks = place.by_srun("name=srun", LIMIT, plant=at_step(2, act, rank=1) | NO_VERIFY)
    assert all(task.code != 0 for task in tasks) and seconds_since(place, "srun") < TIMEOUT_S + BOUND_S
    output = tasks[0].output + tasks[1].output
    assert output.count("error: ") == 1 and "error: rank 1 made no progress for " in output, output
    assert "my_own_function" in output and "has not entered the collective that rank 0 waits in" in output, output


@pytest.mark.slow
def test_a_stopped_process_that_prepares_batches_is_named(place: Place) -> None:
    act = stamp(place, "worker") + "import psutil\nfor child in psutil.Process().children(recursive=True):\n"
    act += "    if 'spawn_main' in ' '.join(child.cmdline()): child.suspend()"
    keys = ("data.workers=1", LIMIT, "launch.restarts=0")
    ended = place.train("worker", "--gpus", "2", *keys, plant=at_step(2, act, rank=1) | NO_VERIFY)
    assert ended.code == 1 and seconds_since(place, "worker") < TIMEOUT_S + BOUND_S
    assert "error: rank 1 made no progress for " in ended.output, ended.output
    assert "which prepares batches for rank 1, is stopped (SIGSTOP)" in ended.output, ended.output
    assert "rank 0: stage 'train'" in ended.output and "hang-1.txt" in ended.output


@pytest.mark.slow
def test_a_stopped_process_that_prepares_batches_is_not_left_under_torchrun(place: Place) -> None:
    """It would not see that its rank is gone."""
    act = "import psutil\nfor child in psutil.Process().children(recursive=True):\n"
    act += "    if 'spawn_main' in ' '.join(child.cmdline()):\n        child.suspend()\n"
    act += f"        pathlib.Path({str(place.folder / 'stopped')!r}).write_text(str(child.pid))"
    one = ("-m", "torch.distributed.run", "--nproc_per_node=1")
    ended = place.call(*one, *WORKER, "name=left", LIMIT, "data.workers=1", plant=at_step(2, act) | NO_VERIFY)
    assert ended.code != 0 and "error: rank 0 made no progress for " in ended.output, ended.output
    pid = int((place.folder / "stopped").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_stopped_process_that_writes_checkpoints_is_named(place: Place) -> None:
    """It writes beside the training, which stands still when the next checkpoint is due."""
    act = "import psutil\nfor child in psutil.Process().children(recursive=True):\n"
    act += "    if 'shard_writer' in ' '.join(child.cmdline()): child.suspend()"
    keys = (LIMIT, "launch.restarts=0")
    ended = place.train("writer", "--gpus", "2", *keys, plant=at_step(6, act, rank=1) | NO_VERIFY)
    assert ended.code == 1 and "error: rank 1 made no progress for " in ended.output, ended.output
    assert "which writes checkpoints for rank 1, is stopped (SIGSTOP)" in ended.output, ended.output


@pytest.mark.slow
def test_ranks_that_take_different_paths_are_told_apart(place: Place) -> None:
    act = (
        "import torch\n"
        "import torch.distributed as dist\n"
        "if self.rank.world.rank:\n"
        "    dist.all_reduce(torch.ones(3))\n"
        "else:\n"
        "    dist.all_gather([torch.ones(7), torch.ones(7)], torch.ones(7))"
    )
    ended = place.train("paths", "--gpus", "2", LIMIT, "launch.restarts=0", plant=at_step(2, act) | NO_VERIFY)
    assert ended.code == 1, ended.output
    assert "different" in ended.output and "uneven data" in ended.output, ended.output
