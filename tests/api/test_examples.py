"""The examples in Python run, with a tiny model and two processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
