"""A sweep of real runs: killed in the middle, started again, finished."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from manyhands.core.errors import EXIT_INTERRUPTED
from tests.e2e.runs import Place, Run, at_step, kill_all, pause

RATES = ("1e-3", "1e-2", "3e-2")
WORDS = ("sweep", "run.yaml", f"optimizer.learning_rate={','.join(RATES)}", "parallel.gpus=1")


def pause_in_second(mark: Path) -> dict[str, str]:
    """At step 6, after the checkpoint of step 4."""
    body = pause(mark).replace("\n", "\n    ")
    return at_step(6, f"if self.rank.folder.path.name.endswith('{RATES[1]}'):\n    {body}")


@pytest.mark.ci
def test_a_killed_sweep_goes_on_with_what_has_not_finished(place: Place, tmp_path: Path) -> None:
    folder, mark = tmp_path / "sweep", tmp_path / "mark"
    command = ("-m", "manyhands", *WORDS, "-o", str(folder))
    with place.start(*command, plant=pause_in_second(mark)) as process:
        place.wait_for([mark.with_name("mark-0")], process)
        kill_all(process.pid)
    runs = [Run(folder / f"learning_rate-{rate}") for rate in RATES]
    first = (runs[0].folder / "report.json").stat().st_mtime_ns
    assert runs[1].steps_saved() == [4] and not runs[2].folder.exists()
    ended = place.call(*command)
    assert ended.code == 0, ended.output
    assert (runs[0].folder / "report.json").stat().st_mtime_ns == first, "a finished run is left alone"
    assert [row["step"] for row in runs[1].rows()].count(4) == 1, "the second is resumed"
    losses = {run.folder.name: run.evaluations()[-1][1] for run in runs}
    best = min(losses, key=losses.__getitem__)
    assert f"best: {folder / best}\n" in ended.output and (folder / best / "adapter").is_dir()
    assert json.loads((folder / "sweep.json").read_text())["best"] == best
    again = place.call(*command)
    assert again.code == 0 and "started" not in again.output and f"best: {folder / best}\n" in again.output


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_ends_the_sweep(place: Place, tmp_path: Path) -> None:
    folder, mark = tmp_path / "sweep", tmp_path / "mark"
    with place.start("-m", "manyhands", *WORDS, "-o", str(folder), plant=pause_in_second(mark)) as process:
        place.wait_for([mark.with_name("mark-0")], process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == EXIT_INTERRUPTED
    output = place.output.read_text()
    assert "learning_rate-1e-2" in output and "interrupted" in output
    assert Run(folder / "learning_rate-1e-2").read("status.json")["state"] == "interrupted"
    assert json.loads((folder / "queue.json").read_text())["paused"], "a page that is opened now starts nothing"
