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
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.peer_trl import Clock, count_tokens
from manyhands.bench.rows import BY_NAME
from manyhands.bench.shapes import flops_per_token
from manyhands.bench.summary import attention_kernels, dtypes, rates, watch
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


def test_seconds_and_tokens_of_a_row_say_the_same() -> None:
    for steps in ([(0.5, 64), (0.7, 64), (2.0, 64)], [(0.5, 64), (0.7, 90), (2.0, 10)]):
        found = rates(steps, ROW, 1, warm=0)
        assert found["tokens_per_s_gpu"] * found["step_s"] == pytest.approx(
            statistics.fmean(n for _, n in steps), rel=0.02
        )


def test_all_linear_layers_and_half_the_positions_count_as_operations() -> None:
    """Llama-8B with adapters: 4 x 7.5e9 matmul weights; all trained: 6."""
    adapters, full = (flops_per_token("llama8b", 4096, full=full) for full in (False, True))
    assert full - adapters == pytest.approx(2 * 7.504e9, rel=1e-3)


def test_a_peer_is_timed_from_step_to_step_without_the_watched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 15.0, 19.0, 99.0])
    clock = Clock(3, lambda: next(times))
    monkeypatch.setattr(Clock, "read", lambda self, trainer: self.seen.update(watched=trainer))
    callback = clock.callback(lambda: "the trainer")
    for step in range(4):
        callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
        clock.num_tokens += 100 + step
        callback.on_step_end(None, SimpleNamespace(global_step=step + 1), None)
        assert bool(clock.seen) == (step == 3)
    assert clock.steps() == [(2.0, 100), (3.0, 101), (4.0, 102)]


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


def test_kernels_of_attention_are_told_by_name_the_slowest_first() -> None:
    def event(key: str, took: float) -> SimpleNamespace:
        return SimpleNamespace(key=key, self_device_time_total=took, self_cpu_time_total=0.0)

    names = [("gemm", 9.0), ("flash_fwd_kernel", 2.0), ("flash_bwd_kernel", 4.0), ("fmha_unused", 0.0)]
    assert attention_kernels(event(*each) for each in names) == ["flash_bwd_kernel", "flash_fwd_kernel"]
    assert attention_kernels([event("gemm", 9.0)]) == ["none by name: attention ran as separate matmuls"]


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
