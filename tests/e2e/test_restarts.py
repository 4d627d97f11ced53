"""A rank that dies costs the steps since the last checkpoint and nothing else, in the same launch: ours starts the
ranks again, torchrun and accelerate do with their own option.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.runs import NO_VERIFY, WAIT_S, WORKER, Ended, Place, Run, at_any_step, at_step, kill_once, train_command

pytestmark = pytest.mark.slow  # whole runs in processes of their own


def check_undisturbed(run: Run, whole: Run) -> None:
    assert run.course() == whole.course() and run.seen() == whole.seen()
    assert run.evaluations() == whole.evaluations()
    adapters = [(each.folder / "adapter/adapter_model.safetensors").read_bytes() for each in (run, whole)]
    assert adapters[0] == adapters[1]
    assert run.read("status.json")["state"] == "finished"


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(place: Place, whole: tuple[Ended, Run]) -> None:
    plant = NO_VERIFY | at_step(7, kill_once(place.folder / "again", saved=4), rank=1)
    ended = place.train("again", "--gpus", "2", "launch.restarts=3", plant=plant)
    assert ended.code == 0 and "error" not in ended.output, ended.output
    [line] = [line for line in ended.output.splitlines() if "restarting" in line]
    assert line.startswith("rank 1 was killed (SIGKILL) in stage 'train'")
    assert "restarting from step 4, 3 steps lost" in line and line.endswith("(attempt 1 of 3)")
    assert "resumed after step 4 from step-000004" in ended.output
    run = place.run("again")
    check_undisturbed(run, whole[1])
    assert run.read("report.json")["restarts"][0]["from_step"] == 4
    assert "Restarted once after a fault" in (run.folder / "report.md").read_text()


@pytest.mark.timeout(1200)  # five starts
def test_without_a_lost_gpu_the_run_goes_on_and_with_it_back_it_grows_again(place: Place) -> None:
    """Rank 1's device fails twice; one process goes on, is stopped, and the same command takes two again."""
    keys = ("--gpus", "2", "launch.restarts=3", "launch.min_gpus=1", "method.dropout=0")
    act = (
        "if self.rank.world.world_size == 1 and state.step == 9:\n    os.kill(os.getppid(), signal.SIGTERM)\n"
        "if self.rank.world.rank == 1 and state.step == 7:\n    raise RuntimeError('uncorrectable ECC error')"
    )
    plant = NO_VERIFY | at_any_step(act)
    ended = place.train("fewer", *keys, plant=plant)
    assert ended.code == 143 and "error:" not in ended.output, ended.output
    assert "the device of rank 1 is lost: it has failed 2 times in this launch; restarting from step 4" in ended.output
    assert "plan 2: single, one process" in ended.output and "resumed after step 4 from step-000004" in ended.output
    again = place.train("fewer", *keys, plant=plant)
    assert again.code == 0, again.output
    run, alone = place.run("fewer"), place.run("not-fewer")
    made = [run.read(f"plans/{number:03d}.json") for number in (1, 2, 3)]
    assert [plan["layout"]["mesh"]["replicate"] for plan in made] == [2, 1, 2]
    assert [plan["cause"] for plan in made] == ["first", "resize", "resize"]
    assert len({plan["batch_samples"] for plan in made}) == 1
    assert place.train("not-fewer", "--gpus", "2", "method.dropout=0", plant=NO_VERIFY).code == 0
    assert run.seen() == alone.seen() and run.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert run.read("status.json")["state"] == "finished"


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.ci), "accelerate"])  # of CI: one
def test_under_another_launcher_its_own_restarts_resume(place: Place, whole: tuple[Ended, Run], launcher: str) -> None:
    name = f"again-{launcher}"
    plant = NO_VERIFY | at_step(7, kill_once(place.folder / name, saved=4), rank=1)
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=2")
    if launcher == "accelerate":
        command = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--max_restarts=2")
        command += ("--mixed_precision=no", "--dynamo_backend=no", "--num_machines=1")
    ended = place.call(*command, *WORKER, f"name={name}", plant=plant)
    assert ended.code == 0, ended.output
    assert "resumed after step 4 from step-000004" in ended.output
    check_undisturbed(place.run(name), whole[1])


def test_an_error_that_comes_again_ends_the_run(place: Place) -> None:
    plant = at_step(6, "raise ValueError('the cat sat on the keyboard')", rank=0)
    ended = place.train("no-use", "--gpus", "1", "launch.restarts=3", plant=plant)
    assert ended.code == 1 and ended.output.count("error: ") == 1, ended.output
    assert ended.output.count("restarting from step 4") == 1
    assert "it is the second time after step 6 in this launch: another restart would not help" in ended.output


def test_sigterm_between_two_attempts_ends_the_run_at_once(place: Place) -> None:
    plant = at_step(6, "raise ValueError('the cat sat on the keyboard')", rank=0)
    plant["manyhands.launch.restart.restarts"] = "FIRST_WAIT_S = 600.0"
    with place.start(*train_command("paused", "--gpus", "1", "launch.restarts=3"), plant=plant) as process:
        deadline = time.monotonic() + WAIT_S
        while "restarting from step 4" not in place.output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, place.output.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        ended = place.wait(process, time.monotonic(), limit_s=30)
    assert ended.code == 143 and "saved at step 4; the same command resumes from there" in ended.output, ended.output
