"""The examples in Python run, with a tiny model and two processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import write_place
from tests.support.tiny import write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def call(folder: Path, *command: str) -> str:
    variables = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "MANYHANDS_NUM_PROCESSES": "2"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_and_then_answers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    output = call(tmp_path, str(EXAMPLES / "multi_gpu_training.py"), "--model", "model", "--steps", "3")
    assert "2 CPU processes" in output and "the adapter is in outputs/adapter" in output
    answers = str(EXAMPLES / "multi_gpu_inference.py")
    arguments = ("outputs", "--processes", "2", "--max-new-tokens", "4")
    alone = call(tmp_path, answers, *arguments)
    assert "3 answers in answers.jsonl" in alone
    launched = call(tmp_path, "-m", "torch.distributed.run", "--nproc_per_node=2", answers, *arguments)
    assert alone.splitlines()[-4:] == launched.splitlines()[-4:]


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["swanlab", "comet"])
def test_rows_reach_a_tracker_without_a_key(tmp_path: Path, tracker: str) -> None:
    """Modules that write down what they are told stand in for the trackers' own."""
    place = write_place(tmp_path)
    (tmp_path / "swanlab.py").write_text(
        "class Run:\n"
        "    def log(self, values, step): print('sent', step, *values)\n"
        "    def finish(self): print('closed')\n"
        "def init(project, name): return Run()\n"
    )
    (tmp_path / "comet_ml.py").write_text(
        "class Experiment:\n"
        "    def set_name(self, name): pass\n"
        "    def log_metrics(self, values, step): print('sent', step, *values)\n"
        "    def end(self): print('closed')\n"
        "def start(project_name): return Experiment()\n"
    )
    (tmp_path / "other.py").write_text((EXAMPLES / "other_trackers.py").read_text(encoding="utf-8"))
    lines = call(place.folder, "other.py", "run.yaml", tracker).splitlines()
    sent = [line.split() for line in lines if line.startswith("sent ")]
    assert [words[1] for words in sent if "train/loss" in words] == [str(step) for step in range(1, 13)]
    assert [words[1] for words in sent if "validation/loss" in words] == ["0", "4", "8", "12"]
    assert "closed" in lines
