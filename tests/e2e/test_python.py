"""A run from Python is the run of the command: the same plan, losses and files. Under a launcher a script is a rank."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import manyhands as mh
from tests.e2e.runs import NUM_STEPS, WAIT_S, Ended, Place, Run
from tests.support.zygote import forking

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
# ``own``: with a process group of the script's; ``cat``: a callback that raises at step 3.
SCRIPT = """
import json, os, signal, sys
import manyhands as mh
name, *how = sys.argv[1:]
if "own" in how:
    import torch.distributed
    torch.distributed.init_process_group("gloo")
import torch
steps, checkpoints = [], []
def step(row):
    steps.append(row)
    if "cat" in how and row["step"] == 3:
        raise ValueError("the cat sat on the keyboard")
before = dict(os.environ), signal.getsignal(signal.SIGINT), torch.get_num_threads(), mh.distributed_info()
for again in range(2 if "twice" in how else 1):
    run = mh.train("run.yaml", {"name": name + "-again" * again, "parallel.gpus": 2}, on_step=step,
                   on_checkpoint=lambda row: checkpoints.append(row["step"]))
after = dict(os.environ), signal.getsignal(signal.SIGINT), torch.get_num_threads(), mh.distributed_info()
assert before == after, (before, after)
if mh.get_rank() == 0:
    written = [row for row in run.metrics if row["kind"] == "step"]
    count = min(len(steps), len(written))
    assert [{**row, "time": 0} for row in steps[-count:]] == [{**row, "time": 0} for row in written[-count:]]
    print("RESULT", json.dumps([[row["loss"] for row in steps], checkpoints]))
"""
CAT = "on_step raised ValueError: the cat sat on the keyboard"


def results(output: str) -> tuple[list[float], list[int]]:
    """Losses and checkpoints that the callbacks saw, printed by one rank."""
    [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
    losses, checkpoints = json.loads(line.removeprefix("RESULT "))
    return losses, checkpoints


def endless(text: str) -> str:
    return text.replace('"parallel.gpus": 2', '"stop.max_steps": 100000, "stop.epochs": 100000')


@pytest.fixture(scope="module")
def script(place: Place) -> str:
    (place.folder / "script.py").write_text(SCRIPT)
    return "script.py"


@pytest.mark.slow
def test_from_python_as_from_the_command(
    place: Place, whole: tuple[Ended, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[float] = []
    before = dict(os.environ), signal.getsignal(signal.SIGINT), len(psutil.Process().children(recursive=True))
    with forking():
        run = mh.train(
            place.folder / "run.yaml",
            {"name": "python", "output.dir": place.folder / "runs"},
            gpus=2,
            on_step=lambda row: steps.append(row["loss"]),
        )
    assert before == (dict(os.environ), signal.getsignal(signal.SIGINT), len(psutil.Process().children(recursive=True)))
    assert place.run("python").course() == whole[1].course() and run.losses == steps == whole[1].losses()
    theirs = mh.TrainedRun(whole[1].folder)
    same = ("layout", "converters", "num_steps", "data_content", "learning_rate", "batch_samples", "model_files")
    assert [getattr(run.plan, name) for name in same] == [getattr(theirs.plan, name) for name in same]
    written = [
        {Path(file).parent / Path(file).suffix for file in one.files()} for one in (place.run("python"), whole[1])
    ]
    assert written[0] == written[1]
    assert (run.state, list(run.outputs), run.report["measured"]["steps"]) == ("finished", ["adapter"], NUM_STEPS)
    assert f"finished: {run.folder}" in capsys.readouterr().out
    assert mh.plan(place.folder / "run.yaml", gpus=2).layout == run.plan.layout


@pytest.mark.ci
def test_an_error_of_the_start_is_raised(
    place: Place, whole: tuple[Ended, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the run file names no folder of runs
    with pytest.raises(mh.UserError, match="no such data file") as error:
        mh.train(place.folder / "run.yaml", {"data.train": "none.jsonl", "name": "none"})
    assert "none.jsonl" in error.value.where
    with pytest.raises(mh.UserError, match="the run file has an error"):
        mh.train(place.folder / "run.yaml", {"batch.sample": 3})
    folder = whole[1].folder
    with pytest.raises(mh.UserError, match="another run named 'whole'") as error:
        mh.train(place.folder / "run.yaml", {"seed": 5, "name": folder.name, "output.dir": folder.parent})
    assert "fresh=True" in error.value.fix


@pytest.mark.slow
def test_a_finished_run_becomes_longer_from_python(place: Place) -> None:
    def train(steps: int) -> mh.TrainedRun:
        keys = {"name": "python-longer", "output.dir": place.folder / "runs", "stop.max_steps": steps}
        with forking():
            return mh.train(place.folder / "run.yaml", keys)

    first = train(2).losses
    longer = train(4)
    assert (longer.state, len(longer.losses), longer.report["measured"]["steps"]) == ("finished", 4, 4)
    assert longer.losses[:2] == first and "2 -> 4" in longer.plan.explain(width=1000)
    with pytest.raises(mh.UserError, match="would make this run shorter"):
        train(3)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "num_runs"), [("own", 1), ("twice", 2)])
def test_a_script_under_torchrun_is_a_rank(
    place: Place, whole: tuple[Ended, Run], script: str, how: str, num_runs: int
) -> None:
    ended = place.call(*TORCHRUN, script, f"script-{how}", how)
    assert ended.code == 0, ended.output
    losses, checkpoints = results(ended.output)
    assert losses == whole[1].losses() * num_runs
    assert checkpoints == [4, 8, 12] * num_runs
    assert place.run(f"script-{how}").course() == whole[1].course()


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run_with_its_state_saved(
    place: Place, whole: tuple[Ended, Run], script: str
) -> None:
    ended = place.call(*TORCHRUN, script, "cat", "cat")
    assert ended.code == 1 and "ValueError: the cat sat on the keyboard" in ended.output, ended.output
    assert place.run("cat").steps_saved() == [4], "the step that was under way is finished"
    assert place.run("cat").read("status.json")["state"] == "interrupted"
    assert place.run("cat").read("status.json")["reason"] == CAT
    again = place.call(*TORCHRUN, script, "cat")
    assert again.code == 0 and place.run("cat").course() == whole[1].course(), again.output


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_processes_that_train_started(place: Place, script: str) -> None:
    (place.folder / "endless-cat.py").write_text(endless(SCRIPT))
    ended = place.call("endless-cat.py", "cat-alone", "cat")
    assert ended.code == 1 and "ValueError: the cat sat on the keyboard" in ended.output, ended.output
    assert place.run("cat-alone").steps_saved()
    assert place.run("cat-alone").read("status.json")["state"] == "interrupted"
    assert place.run("cat-alone").read("status.json")["reason"] == CAT


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_raised_and_ends_all(place: Place, script: str) -> None:
    (place.folder / "bad.py").write_text(SCRIPT.replace('"parallel.gpus": 2', '"data.train": "none.jsonl"'))
    ended = place.call(*TORCHRUN, "bad.py", "bad")
    assert ended.code != 0 and ended.output.count("UserError: error: no such data file") == 1, ended.output
    assert "Traceback" in ended.output and "rendezvous.py" not in ended.output.partition("ChildFailed")[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_script_that_is_stopped_leaves_no_process(place: Place, script: str, number: int) -> None:
    """Ctrl-C saves the state; so does the launcher of a script that is gone."""
    name, mark = f"stopped-{int(number)}", place.folder / f"mark-{int(number)}"
    marked = SCRIPT.replace("    steps.append(row)", f"    steps.append(row); open({str(mark)!r}, 'w')")
    (place.folder / "endless.py").write_text(endless(marked))
    with place.start("endless.py", name) as process:
        place.wait_for([mark], process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output = place.wait(process, time.monotonic()).output
        _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not alive and place.run(name).steps_saved(), output
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT), output
    assert place.run(name).read("status.json")["state"] == "interrupted"


def test_results_are_read(tmp_path: Path) -> None:
    """A run that has not been started has no losses."""
    run = mh.TrainedRun(tmp_path)
    assert (run.losses, run.evaluations, run.outputs, run.state) == ([], [], {}, "not started")


HOOKED = """
import sys
import manyhands as mh
from manyhands.training.types import Hook

class Counts(Hook):
    def __init__(self, rank):
        self.rank = rank
    def after_training(self, state):
        print("steps of rank", self.rank.world.rank, state.step, file=open(f"seen-{self.rank.world.rank}", "w"))

def halved(evaluation):
    return evaluation.loss / 2

if __name__ == "__main__":
    asked = {"name": sys.argv[1], "stop.max_steps": 2}
    run = mh.train("run.yaml", asked, gpus=2, hooks=[Counts], metrics={"halved": halved})
    assert [row["metrics"]["halved"] * 2 for row in run.evaluations] == [row["loss"] for row in run.evaluations]
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
def test_hooks_and_metrics_of_a_script_run_in_every_rank(place: Place, launcher: tuple[str, ...]) -> None:
    (place.folder / "hooked.py").write_text(HOOKED)
    ended = place.call(*launcher, "hooked.py", f"hooked-{len(launcher)}")
    assert ended.code == 0 and "metrics after step 2: halved" in ended.output, ended.output
    for rank in range(2):
        seen = place.folder / f"seen-{rank}"
        assert seen.read_text() == f"steps of rank {rank} 2\n"
        seen.unlink()
