"""A run whose blocks are CUDA graphs: steps, evaluations between them, an interruption and what follows are those of a
run without graphs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.launch.run.folder import RunFolder
from tests.e2e.runs import WORDS, Run, train_command
from tests.support.tiny import write_tiny_model

NEAR = 2e-3  # bfloat16, whose kernels Inductor may divide otherwise


def train(folder: Path, name: str, *keys: str) -> Run:
    command = [sys.executable, *train_command(name, *keys)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Run(folder / "runs" / name)


def write_run(folder: Path, method: str, device: str) -> None:
    """Texts of many lengths, in packs: two micro-batches a step, and evaluations of other packs."""
    write_tiny_model(folder / "model", hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 60)))} for _ in range(300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"name": str(folder / "model")},
        "task": "cpt",
        "method": {"name": method} | ({"rank": 8} if method == "lora" else {}),
        "data": {"train": "rows.jsonl", "max_length": 512, "cache": str(folder / "cache")},
        "batch": {"samples": 24, "micro_tokens": 1024},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "constant", "warmup_steps": 0},  # else the steps that come change those before
        "stop": {"max_steps": 8},
        "evaluate": {"every_steps": 2, "prompts": 1},
        "checkpoint": {"every_steps": 4},
        "parallel": {"device": device, "gpus": 1},
        "output": {"dir": "runs"},
    }
    (folder / "run.yaml").write_text(json.dumps(run))


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_steps_evaluations_and_a_resumed_run(tmp_path: Path, method: str) -> None:
    write_run(tmp_path, method, "cuda")
    plain = train(tmp_path, "plain", "parallel.cuda_graphs=false")
    whole = train(tmp_path, "whole", "parallel.cuda_graphs=true")
    train(tmp_path, "resumed", "parallel.cuda_graphs=true", "stop.max_steps=4")
    resumed = train(tmp_path, "resumed", "parallel.cuda_graphs=true", "stop.max_steps=8")
    with_graphs, without = (RunFolder(run.folder).read_plan().layout for run in (whole, plain))
    assert with_graphs.cuda_graphs and not without.cuda_graphs
    assert max(row["num_tokens"] for row in whole.rows()) > with_graphs.micro_tokens  # several micro-batches
    for run in (whole, resumed):
        assert run.losses() == pytest.approx(plain.losses(), rel=NEAR)
        assert [loss for _, loss in run.evaluations()] == pytest.approx(
            [loss for _, loss in plain.evaluations()], rel=NEAR
        )
