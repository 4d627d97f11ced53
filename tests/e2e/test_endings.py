"""Real processes that end in every way a run can end: each says why, once, in bounded time, and the next start goes
on.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import psutil
import pytest

from manyhands.core.errors import UserError
from manyhands.launch.environment import Launcher
from tests.e2e.runs import (
    NO_VERIFY,
    NUM_STEPS,
    WAIT_S,
    WORKER,
    Ended,
    Place,
    Run,
    at_step,
    free_port,
    in_evaluation,
    kill_all,
    pause,
    train_command,
)
from tests.support.zygote import is_server

pytestmark = pytest.mark.slow  # whole runs in processes of their own


def start_and_pause(place: Place, name: str, step: int, end: int, *arguments: str, evaluating: bool = False) -> Ended:
    """Starts two ranks, waits until both have done ``step`` (or evaluate after it), and ends them by the signal
    ``end``: a 9 kills all at once.
    """
    mark = place.folder / f"paused-{name}-{step}"
    begin = time.monotonic()
    plant = in_evaluation(step, mark) if evaluating else at_step(step, pause(mark))
    with place.start(*train_command(name, "--gpus", "2", *arguments), plant=plant) as process:
        place.wait_for([mark.with_name(f"{mark.name}-{rank}") for rank in (0, 1)], process)
        workers = [child for child in psutil.Process(process.pid).children(recursive=True) if not is_server(child)]
        if end == signal.SIGKILL:
            kill_all(process.pid)
        else:
            os.killpg(process.pid, end)  # as a terminal does
        ended = place.wait(process, begin)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    return ended


def test_a_failure_ctrl_c_and_a_kill_later_the_losses_are_those_of_a_run_left_alone(
    place: Place, whole: tuple[Ended, Run]
) -> None:
    run = place.run("ended")
    wrong = place.train(
        "ended", "--gpus", "2", plant=at_step(3, "raise ValueError('the cat sat on the keyboard')", rank=1)
    )
    assert wrong.code == 1 and run.read("status.json")["state"] == "failed"
    assert wrong.output.count("error: rank 1 failed in stage 'train': ValueError: the cat sat on the keyboard") == 1, (
        wrong.output
    )
    assert (
        "logs/rank-1.log" in wrong.output
        and "Connection closed" not in wrong.output
        and wrong.output.count("error: ") == 1
    )
    failed_at = (run.folder / "logs/rank-1.log").stat().st_mtime
    assert time.time() - failed_at < 30, "the other rank did not wait long"

    interrupted = start_and_pause(place, "ended", 5, signal.SIGINT)
    assert interrupted.code == 130, interrupted.output
    assert "stopped after step 6; the same command resumes from there" in interrupted.output
    assert (
        "saved at step 6" in interrupted.output
        and "Traceback" not in interrupted.output
        and "error" not in interrupted.output
    )
    assert run.steps_saved() == [4, 6] and run.read("status.json")["state"] == "interrupted"

    evaluating = start_and_pause(place, "ended", 8, signal.SIGTERM, evaluating=True)
    assert evaluating.code == 143 and "stopped after step 8" in evaluating.output, evaluating.output
    assert [step for step, _ in run.evaluations()] == [0, 4], "an evaluation that was stopped has not happened"

    killed = start_and_pause(place, "ended", 9, signal.SIGKILL)
    assert killed.code == -signal.SIGKILL and "resuming runs/ended at step 8" in killed.output
    assert run.steps_saved() == [6, 8] and run.rows()[-1]["step"] == 8

    last = place.train("ended", "--gpus", "2", plant=NO_VERIFY)
    assert last.code == 0 and "resuming runs/ended at step 8" in last.output, last.output
    assert run.course() == whole[1].course()
    assert run.evaluations() == whole[1].evaluations()
    assert (run.folder / "adapter/adapter_model.safetensors").read_bytes() == (
        whole[1].folder / "adapter/adapter_model.safetensors"
    ).read_bytes()


def by_hand(port: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_peer_that_never_comes_is_named_in_bounded_time(place: Place) -> None:
    command = ("-m", "manyhands.worker", "run.yaml", "name=alone", "parallel.timeout_s=3")
    alone = place.call(*command, environment=by_hand(free_port()))
    assert alone.code == 1 and alone.seconds < 40
    assert (
        "error: 1 of 2 ranks did not join: 1" in alone.output and "waited 3 s (parallel.timeout_s)" in alone.output
    ), alone.output
    assert "Traceback" not in alone.output and not place.run("alone").folder.exists()


def test_a_port_in_use_and_a_rank_0_that_never_comes_say_what_to_set() -> None:
    from manyhands.worker.rendezvous import open_store

    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError) as refused:
            open_store(Launcher("torchrun", rank=0, world_size=2, master_port=port), timeout_s=2)
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in str(refused.value) and "set another MASTER_PORT" in str(
        refused.value
    )
    with pytest.raises(UserError) as refused:
        open_store(Launcher("torchrun", rank=1, world_size=2, master_port=free_port()), timeout_s=2)
    assert "rank 1 found no rank 0 at" in str(refused.value) and "within 2 s" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 11])
def test_killed_at_other_steps(place: Place, whole: tuple[Ended, Run], step: int) -> None:
    name = f"killed-{step}"
    assert start_and_pause(place, name, step, signal.SIGKILL).code == -signal.SIGKILL
    assert place.train(name, "--gpus", "2", plant=NO_VERIFY).code == 0
    assert place.run(name).course() == whole[1].course()


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_143(place: Place) -> None:
    ended = start_and_pause(place, "terminated", 5, signal.SIGTERM)
    assert ended.code == 143 and "saved at step 6" in ended.output, ended.output
    assert place.run("terminated").steps_saved()[-1] == 6 < NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("command", [("-m", "manyhands", "train", "run.yaml"), WORKER])
def test_sigterm_in_preparation_says_so(place: Place, command: tuple[str, ...]) -> None:
    name = f"preparing-{len(command)}"
    mark = place.folder / name
    plant = (
        "import pathlib, time\n"
        "def gather_facts(*a, **o):\n"
        f"    pathlib.Path({str(mark)!r}).touch()\n"
        f"    time.sleep({WAIT_S})\n"
    )
    with place.start(*command, f"name={name}", plant={"manyhands.launch.run.prepare": plant}) as process:
        place.wait_for([mark], process)
        process.send_signal(signal.SIGTERM)
        stopped = place.wait(process, time.monotonic())
    assert stopped.code == 143 and not place.run(name).folder.exists()
    assert stopped.output.strip() == (
        "SIGTERM: stopped while data and plan were being prepared, no rank has started;"
        " the same command starts it again"
    )


@pytest.mark.slow
def test_sigterm_in_verification_is_an_interruption_and_the_next_start_verifies(place: Place) -> None:
    mark = place.folder / "verifying"
    plant = (
        "import pathlib, time\n"
        "_verify = verify_in_fresh_process\n"
        "def verify_in_fresh_process(*arguments, **options):\n"
        f"    pathlib.Path({str(mark)!r}).touch()\n"
        f"    deadline = time.monotonic() + {WAIT_S}\n"
        "    while not options['stop']() and time.monotonic() < deadline: time.sleep(0.02)\n"
        "    return _verify(*arguments, **options)\n"
    )
    with place.start(
        *train_command("verifying", "--gpus", "2"), plant={"manyhands.worker.export_stages": plant}
    ) as process:
        place.wait_for([mark], process)
        process.send_signal(signal.SIGTERM)
        stopped = place.wait(process, time.monotonic())
    run = place.run("verifying")
    assert stopped.code == 143 and "saved at step 12; the same command resumes from there" in stopped.output, (
        stopped.output
    )
    assert (
        "Traceback" not in stopped.output
        and "finished: " not in stopped.output
        and run.read("status.json")["state"] == "interrupted"
    )
    again = place.train("verifying", "--gpus", "2")
    assert again.code == 0 and "verified " in again.output and run.read("status.json")["state"] == "finished", (
        again.output
    )


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_slow_work_lives_in_every_stage_and_none_of_it_ends_the_run(place: Place) -> None:
    """Each stage lasts longer than parallel.timeout_s allows without progress, and goes on all the while."""
    waits = "checkpoint.asynchronous=false"  # else another process writes, and the stage is as short as its staging
    broken = place.train("slow", "--gpus", "2", waits, plant=at_step(5, "raise ValueError('later')"))
    assert broken.code == 1 and place.run("slow").steps_saved() == [4]
    slowed = {
        "manyhands.launch.local.heartbeat": "_advance = Heartbeat.advance\n"
        "def _slow(self):\n"
        "    if threading.current_thread().name != 'heartbeat':\n"
        "        time.sleep(0.15)\n"
        f"        with open({str(place.folder)!r} + f'/slow-{{self.rank}}', 'a') as file:\n"
        "            file.write(self._now[0] + '\\n')\n"
        "    _advance(self)\n"
        "Heartbeat.advance = _slow\n",
        "manyhands.export.verify": "import time\n"
        "end = time.process_time() + 6\n"
        "while time.process_time() < end: pass\n",
    }
    ended = place.train("slow", "--gpus", "2", waits, "parallel.timeout_s=5", plant=slowed)
    assert ended.code == 0, ended.output
    stages = (place.folder / "slow-0").read_text().splitlines()
    for stage in ("build model", "resume", "checkpoint", "export"):
        assert stages.count(stage) * 0.15 > 5, (stage, stages.count(stage))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "module", "function"),
    [
        ("build model", "manyhands.convert.build", "materialize"),
        ("verify", "manyhands.worker.export_stages", "verify_in_fresh_process"),
    ],
)
def test_a_stage_that_hangs_ends_the_run(place: Place, stage: str, module: str, function: str) -> None:
    plant = f"import time\ndef {function}(*arguments, **options): time.sleep({WAIT_S})\n"
    ended = place.train(f"hangs-in-{stage.split()[0]}", "parallel.timeout_s=10", plant={module: plant})
    assert (
        ended.code == 1 and "error: rank 0 made no progress for " in ended.output and f"stage '{stage}'" in ended.output
    ), ended.output


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(place: Place) -> None:
    stop = at_step(2, "os.kill(os.getpid(), signal.SIGSTOP)", rank=1)
    stopped = place.train("stopped", "--gpus", "2", "parallel.timeout_s=20", plant=stop)
    assert stopped.code == 1
    assert re.search(
        r"error: rank 1 made no progress for \d+ s \(parallel.timeout_s = 20\) and was ended", stopped.output
    ), stopped.output
    assert "its process is stopped (SIGSTOP)" in stopped.output and "rank 0: stage 'train'" in stopped.output


def test_a_run_that_diverges_fails_and_its_report_says_why(place: Place) -> None:
    """An absurd learning rate leaves a gradient of exactly 0: no success, nothing exported, one message."""
    ended = place.train("diverged", "--gpus", "2", "optimizer.learning_rate=1000.0", "evaluate.at_start=false")
    assert ended.code == 1 and ended.output.count("error: ") == 1, ended.output
    assert (
        "error: training has diverged: the gradient of step" in ended.output and "stop.divergence=warn" in ended.output
    )
    assert "warning" in ended.output and "optimizer.learning_rate: 1000 changes a weight" in ended.output, (
        "the plan warned"
    )
    run = place.run("diverged")
    assert run.read("status.json")["state"] == "failed" and "training has diverged" in run.read("status.json")["reason"]
    assert (
        "Training diverged: " in (run.folder / "report.md").read_text()
        and "divergence" in run.read("report.json")["measured"]
    )
    assert not (run.folder / "adapter").exists()


@pytest.mark.parametrize("act", ["delete", "move"])
def test_a_folder_that_goes_while_it_trains_is_an_error_and_is_not_made_again(place: Place, act: str) -> None:
    elsewhere = place.folder / f"elsewhere-{act}"
    gone = {
        "delete": "import shutil; shutil.rmtree(self.rank.folder.path)",
        "move": f"import os; os.rename(self.rank.folder.path, {str(elsewhere)!r})",
    }[act]
    ended = place.train(f"gone-{act}", plant=at_step(3, gone))
    assert ended.code == 1 and "the run's folder was deleted or moved while the run was under way" in ended.output
    assert "finished: " not in ended.output and "Traceback" not in ended.output
    assert not (place.folder / "runs" / f"gone-{act}").exists()
