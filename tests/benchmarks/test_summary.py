"""The arithmetic behind every figure: one definition of speed for all sides, and what a raw row has read from the run
itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peer_trl import count_tokens
from manyhands.bench.rows import BY_NAME
from manyhands.bench.shapes import flops_per_token
from manyhands.bench.summary import dtypes, rates, watch
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROW = BY_NAME["8b-lora"]


def test_speed_is_that_of_the_median_step_after_the_warm_ones() -> None:
    seconds = [9.0, 7.0, 0.5, 1.1, 1.0, 0.9, 6.0, 1.2, 1.3]
    found = rates([(each, 8000) for each in seconds], ROW, 2, warm=2)
    assert found["num_timed_steps"] == 7 and found["steps_s"] == seconds[2:] and found["step_s_min_max"] == [0.5, 6.0]
    assert found["step_s"] == 1.1  # neither the mean nor the minimum, nor that of the fastest three
    assert found["tokens_per_s_gpu"] == round(8000 / 1.1 / 2)
    assert found["tflops"] == pytest.approx(
        8000 / 1.1 / 2 * flops_per_token(ROW.shape, 4096, full=False) / 1e12, abs=0.05
    )


def test_steps_of_different_numbers_of_tokens_count_by_all_tokens_and_all_seconds() -> None:
    found = rates([(50.0, 1), (1.0, 100), (1.0, 500), (4.0, 900)], ROW, 1, warm=1)
    assert (found["step_s"], found["tokens_per_s_gpu"], found["tflops"]) == (2.0, 250, None)


def test_padding_is_no_useful_token() -> None:
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert count_tokens({"input_ids": ids, "attention_mask": mask}, padded=True) == 7
    assert count_tokens({"input_ids": ids}, padded=True) == 10  # a pack


def test_dtypes_and_attention_are_read_from_what_ran() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    model.model.layers[0].mlp.up_proj.float()
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, __, output: output.bfloat16())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    seen: dict[str, Any] = {"dtypes": {"trained": ["kept"]}}
    with watch(model, seen):
        model(input_ids=torch.arange(16)[None], use_cache=False).logits.float().sum().backward()
        optimizer.step()
    assert dtypes(model, optimizer) == {
        "trained": ["bfloat16", "float32"],
        "frozen": ["bfloat16"],
        "optimizer": ["bfloat16", "float32"],
    }
    assert seen["dtypes"] == {"trained": ["kept"], "compute": ["bfloat16"]}
    assert any("scaled_dot_product" in name for name in seen["attention_kernels"])


@pytest.mark.ci
@pytest.mark.parametrize(
    "module, option",
    [
        # the same processes below another command line
        pytest.param("benchmarks", "--results", marks=pytest.mark.slow),
        ("manyhands.bench", "--output"),
    ],
)
def test_a_raw_row_proves_its_run_its_machine_and_what_ran(tmp_path: Path, module: str, option: str) -> None:
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", module, ROW.name, "--shape", "tiny", "--steps", "8", option, str(file)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # its model folder and token store are new
    subprocess.run(command, check=True, capture_output=True, timeout=280, env=environment, cwd=ROOT)
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["run"].startswith("20") and len(row["machine"]) == 12 and row["label"] == "manyhands"
    assert row["num_timed_steps"] == len(row["steps_s"]) == 3
    assert row["step_s"] == statistics.median(row["steps_s"])
    assert any("scaled_dot_product" in name for name in row["attention_kernels"])
    assert row["dtypes"] == {
        "trained": ["float32"],
        "frozen": ["float32"],
        "optimizer": ["float32"],
        "compute": ["float32"],
    }
