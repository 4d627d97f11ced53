"""Reading other launchers' environments, and refusing those that make no sense."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.environment import (
    Launcher,
    detect_launcher,
    refuse_silent_single,
    worker_environment,
)
from tests.launch.builders import make_config, make_plan
from tests.launch.test_slurm import TASK

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29401",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_nobody():
    assert detect_launcher({}) == Launcher("none", 0, 0, 1, 1)


def test_torchrun_and_those_that_speak_like_it():
    assert detect_launcher(TORCHRUN) == Launcher("torchrun", 3, 1, 4, 2, "node7", 29401)
    assert detect_launcher(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}).kind == "accelerate"
    assert detect_launcher(TORCHRUN | {"MANYHANDS_LAUNCHER_PID": "1"}).kind == "manyhands"
    assert detect_launcher(TORCHRUN | TASK).kind == "torchrun", "torchrun inside a SLURM job"


def test_one_process_of_accelerates_several_does_not_train_alone():
    alone = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}
    assert detect_launcher(alone).kind == "none"
    with pytest.raises(UserError, match="accelerate launch has started one process of several") as refused:
        detect_launcher(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert "parallel.device=cpu parallel.gpus=N" in refused.value.fix


def test_kubernetes_sets_no_local_rank():
    pod = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert detect_launcher(pod) == Launcher("torchrun", 2, 0, 3, 1, "job-master-0", 23456)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE is not a number: 'four'"),
        (TASK | {"SLURM_STEP_NODELIST": "gpu[1-"}, "cannot read the host list"),
    ],
)
def test_contradictions_are_named(environ, words):
    with pytest.raises(UserError, match=words):
        detect_launcher(environ)


def test_one_process_never_leaves_gpus_idle_silently():
    with pytest.raises(UserError, match="would train alone") as refused:
        refuse_silent_single(Launcher("none"), make_config(), num_gpus=8)
    assert (
        "manyhands train" in str(refused.value)
        and "torchrun" in str(refused.value)
        and "parallel.gpus=1" in str(refused.value)
    )
    with pytest.raises(UserError, match="would train alone"):
        refuse_silent_single(Launcher("none"), make_config(**{"parallel.gpus": 2, "parallel.device": "cpu"}))
    refuse_silent_single(Launcher("none"), make_config(**{"parallel.gpus": 1}), num_gpus=8)
    refuse_silent_single(Launcher("none"), make_config(**{"parallel.device": "cpu"}), num_gpus=8)
    refuse_silent_single(Launcher("none"), make_config(), num_gpus=1)
    refuse_silent_single(Launcher("torchrun"), make_config(), num_gpus=8)


def test_ranks_share_the_cores_of_their_own_machine(monkeypatch):
    monkeypatch.setattr("manyhands.launch.environment.count_cores", lambda: 128)
    plan = make_plan(64)
    torchrun = detect_launcher(TORCHRUN | {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"})
    assert worker_environment(plan, torchrun.num_sharing_cores, {})["OMP_NUM_THREADS"] == "16"
    monkeypatch.setattr(
        "manyhands.launch.environment.count_cores", lambda: 16
    )  # what srun leaves to one of eight tasks
    bound = detect_launcher(
        TASK | {"SLURM_STEP_NUM_TASKS": "64", "SLURM_STEP_TASKS_PER_NODE": "8(x8)", "SLURM_CPUS_PER_TASK": "16"}
    )
    assert worker_environment(plan, bound.num_sharing_cores, {})["OMP_NUM_THREADS"] == "16"
