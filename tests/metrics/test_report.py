"""report.json and report.md: plan beside measurement, and no number that nobody measured."""

from __future__ import annotations

import json
import math

from manyhands.config.schema import RunConfig
from manyhands.metrics.report import write_report
from manyhands.plan.types import MemoryEstimate, Plan
from manyhands.train.types import TrainState

CONFIG = RunConfig(name="demo", model={"name": "tiny"}, data={"train": "rows.jsonl"})


def make_plan() -> Plan:
    return Plan(
        config_digest=CONFIG.digest,
        data_digest="d",
        data_folder="data",
        model_folder="model",
        device="cuda",
        world_size=2,
        strategy="ddp",
        reshard=False,
        recompute="none",
        compile=False,
        compute_dtype="bfloat16",
        master_dtype="float32",
        frozen_dtype="bfloat16",
        attention="varlen",
        packing=True,
        batch_rows=8,
        batch_tokens=None,
        micro_rows=None,
        micro_tokens=2048,
        accumulation=None,
        steps_per_epoch=10,
        num_steps=10,
        warmup_steps=1,
        learning_rate=1e-3,
        evaluate_every=0,
        checkpoint_every=0,
        output_dtype="float32",
        memory=MemoryEstimate(terms={"weights": 2**30, "activations": 2**29}, limit=2**36),
    )


MEASURED = {
    "num_parameters": 1000,
    "num_trained_parameters": 50,
    "losses": [3.0, 2.0, 1.0, 0.5],
    "seconds_by_step": [9.0, 1.0, 2.0, 2.0],
    "tokens_by_step": [50, 50, 100, 300],
    "input_wait_by_step": [5.0, 1.0, 0.01, 0.03],
    "evaluations": [
        {"step": 0, "loss": 3.1, "perplexity": 22.2, "accuracy": 0.25, "samples": [("q", "a")]},
        {"step": 4, "loss": 0.9, "perplexity": 2.46, "accuracy": 0.75},
    ],
    "peak_bytes_by_rank": [2**30, 2**30 + 2**29],
    "verified": {"adapter": "120 tensors equal"},
}


def test_the_report_sets_plan_and_measurement_side_by_side(tmp_path):
    state = TrainState(step=4, rows=32, tokens=500, targets=200, elapsed_s=14.0, stop_reason="all 4 steps are done")
    write_report(tmp_path, make_plan(), CONFIG, state, MEASURED)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["planned"]["memory_bytes"] == 2**30 + 2**29
    assert report["measured"]["peak_memory_bytes_by_rank"] == [2**30, 2**30 + 2**29]
    # the first two steps carry compilation: (100 + 300) tokens in (2 + 2) s
    assert report["measured"]["tokens_per_s"] == 100.0
    assert report["measured"]["step_s"] == 2.0
    assert report["measured"]["input_wait_share"] == 0.01  # (0.01 + 0.03) s of (2 + 2) s
    assert [row["loss"] for row in report["evaluations"]] == [3.1, 0.9]
    page = (tmp_path / "report.md").read_text()
    assert "| peak memory of a rank | 1.50 GiB | 1.50 GiB |" in page
    assert "| share of time waiting for input | - | 1.00% |" in page
    assert "| 4 | 0.9000 | 2.460 | 75.00% |" in page
    assert "Verified `adapter/`: 120 tensors equal" in page


def test_what_was_not_measured_is_left_out(tmp_path):
    measured = {"losses": [math.nan], "seconds_by_step": [], "devices": []}
    report = write_report(tmp_path, make_plan(), CONFIG, TrainState(stop_reason="nothing to do"), measured)
    assert not {"tokens_per_s", "first_loss", "peak_memory_bytes_by_rank"} & set(report["measured"])
    page = (tmp_path / "report.md").read_text()
    assert "Nothing was held out" in page and "nan" not in page
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.md"}
