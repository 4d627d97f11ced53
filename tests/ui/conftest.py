"""Run folders as a run writes them, and the page's application."""

import json
import time

import pytest

TOKEN, PORT = "secret-token", 8765


def write_run(folder, name, *, state="finished", num_rows=30, num_steps=40, rate=1e-3, model="org/tiny", **status):
    run = folder / name
    (run / "plans").mkdir(parents=True)
    (run / "logs").mkdir()
    config = {"name": name, "task": "sft", "model": {"name": model}, "method": {"name": "lora", "rank": 8}}
    (run / "run.json").write_text(json.dumps({**config, "optimizer": {"learning_rate": rate}}))
    memory = {"terms": {"weights": 3 << 30, "overhead": 1 << 30}, "limit": 8 << 30}
    plan = {"num_steps": num_steps, "memory": memory, "learning_rate": rate, "batch_samples": 8}
    plan |= {"time": {"tokens_per_s": 900.0}, "layout": {"mesh": {"replicate": 2}, "device": "cuda", "strategy": "ddp"}}
    (run / "plans" / "001.json").write_text(json.dumps(plan))
    (run / "plan.json").write_text(json.dumps({"newest": "plans/001.json"}))
    (run / "logs" / "launcher.log").write_text("the plan\n\x1b[31mred\x1b[0m message\n")
    (run / "status.json").write_text(json.dumps({"state": state, "time": time.time(), **status}))
    with (run / "metrics.jsonl").open("w") as rows:
        for step in range(1, num_rows + 1):
            rows.write(step_row(step))
            if step % 10 == 0:
                samples = [{"prompt": "Why?", "answer": f"Because of step {step}."}]
                row = {"kind": "evaluation", "step": step, "loss": 2 / step, "time": time.time(), "samples": samples}
                rows.write(json.dumps(row) + "\n")
    return run


def step_row(step, **fields):
    devices = [{"memory_allocated_bytes": 2.0e9, "peak_bytes": 2.5e9, "utilization": 0.9}] * 2
    row = {"kind": "step", "step": step, "loss": 3 / step**0.5, "grad_norm": 1.0, "learning_rate": 1e-3}
    row |= {
        "seconds": 1.0,
        "tokens_per_s": 850.0,
        "num_tokens": 850,
        "input_wait_s": 0.01,
        "rank_losses": [1.0, 2.0],
        "devices": devices,
    }
    return json.dumps({**row, "devices": devices, "time": time.time(), **fields}) + "\n"


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder
