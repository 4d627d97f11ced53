"""The worker under other launchers gives the losses that ``manyhands train --gpus 2`` gives."""

from __future__ import annotations

import pytest

from tests.e2e.runs import NO_VERIFY, WORKER, Ended, Place, Run, at_step, free_port

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
CAT = "error: rank 1 failed in stage 'train': ValueError: the cat sat on the keyboard; log: "


@pytest.mark.slow
def test_two_processes_under_accelerate(place: Place, whole: tuple[Ended, Run]) -> None:
    """Under torchrun: ``test_resume``."""
    command = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command += [f"--main_process_port={free_port()}", *WORKER, "name=accelerate"]
    ended = place.call(*command, plant=NO_VERIFY)
    assert ended.code == 0 and ended.output.count("finished: ") == 1, ended.output
    assert place.run("accelerate").read("plans/001.json")["layout"]["mesh"]["replicate"] == 2
    assert place.run("accelerate").course() == whole[1].course()
    again = place.call(*command)
    assert again.code == 0 and place.run("accelerate").course() == whole[1].course()


@pytest.mark.slow
def test_the_file_stop_ends_a_run_that_torchrun_would_start_again(place: Place) -> None:
    plant = NO_VERIFY | at_step(3, "self.rank.folder.stop_file.touch()\nself.rank.process.look_again_at = 0.0", rank=0)
    ended = place.call(*TORCHRUN, "--max-restarts=1", *WORKER, "name=stopped-under-torchrun", plant=plant)
    run = place.run("stopped-under-torchrun")
    assert ended.code == 0 and ended.output.count("stopped after step 4;") == 1, ended.output
    assert run.read("status.json")["reason"] == "STOP" and "finished: " not in ended.output
    assert run.steps_saved()[-1] == 4 and not (run.folder / "STOP").exists()


@pytest.mark.slow
def test_a_mistake_is_shown_once_under_torchrun(place: Place) -> None:
    ended = place.call(*TORCHRUN, *WORKER, "data.train=none.jsonl")
    assert ended.code != 0 and ended.output.count("error: no such data file") == 1, ended.output


@pytest.mark.slow
def test_a_failure_is_shown_once_under_torchrun_with_its_rank_stage_reason_and_log(place: Place) -> None:
    """And torch's own table at the end has the traceback, from the error file that the rank has written."""
    plant = at_step(3, "raise ValueError('the cat sat on the keyboard')", rank=1)
    ended = place.call(*TORCHRUN, *WORKER, "name=cat-by-torchrun", plant=plant)
    log = place.run("cat-by-torchrun").folder / "logs/rank-1.log"
    assert ended.code != 0 and ended.output.count(f"{CAT}{log}") == 1 == ended.output.count("error: "), ended.output
    table = ended.output.partition("multiprocessing.errors.ChildFailedError")[2]
    assert "Traceback (most recent call last)" in table and "ValueError: the cat sat on the keyboard" in table


@pytest.mark.slow
def test_a_killed_rank_is_named_by_one_that_lives_on(place: Place) -> None:
    plant = at_step(3, "os.kill(os.getpid(), signal.SIGKILL)", rank=1)
    tasks = place.by_srun("name=killed-under-srun", plant=plant)
    assert (tasks[0].code, tasks[1].code) == (1, -9), tasks
    under_torchrun = place.call(*TORCHRUN, *WORKER, "name=killed-under-torchrun", plant=plant)
    for output in (tasks[0].output, under_torchrun.output):
        # the step is of the rank's last tick, which may lie before its first step
        assert (
            output.count("error: rank 1 ended without an error message in stage 'train'")
            == 1
            == output.count("error: ")
        ), output


@pytest.mark.slow
def test_rank_0_killed_while_it_prepares_is_reported_by_the_others(place: Place) -> None:
    source = "import os\ndef gather_facts(*arguments, **options): os.kill(os.getpid(), 9)\n"
    plant = {"manyhands.launch.run.prepare": source}
    tasks = place.by_srun("name=killed-preparing", plant=plant)
    assert [task.code for task in tasks] == [-9, 1], tasks
    output = tasks[1].output  # beside it stands a warning of torch's own
    assert output.count("error: rank 0 ended before it had a plan for all") == 1 and "Traceback" not in output


@pytest.mark.slow
def test_where_rank_0_serves_the_store_all_ranks_end_as_it_does(place: Place, whole: tuple[Ended, Run]) -> None:
    """A refused run, a finished one that is started again, and one that breaks."""
    refused = place.by_srun("name=refused", "data.train=none.jsonl")
    assert [rank.code for rank in refused] == [2, 2], refused
    assert sum(rank.output.count("error: ") for rank in refused) == 1 and "no such data file" in refused[0].output
    finished = place.by_srun("name=whole")
    assert [rank.code for rank in finished] == [0, 0], finished
    assert "is finished; nothing to do" in finished[0].output
    broken = place.by_srun(
        "name=cat-by-hand", plant=at_step(3, "raise ValueError('the cat sat on the keyboard')", rank=1)
    )
    assert [rank.code for rank in broken] == [1, 1] and CAT in broken[1].output, broken
    assert sum(rank.output.count("error: ") for rank in broken) == 1
    assert "Traceback" not in "".join(rank.output for rank in (*refused, *finished, *broken))


@pytest.mark.slow
def test_one_process_by_hand(place: Place) -> None:
    ended = place.call(*WORKER, "name=by-hand")
    assert ended.code == 0 and "reopened by PeftModel.from_pretrained" in ended.output, ended.output
    assert len(place.run("by-hand").losses()) == 12
