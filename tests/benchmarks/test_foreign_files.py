"""The count of other tools' files: one that runs, one that is refused, one of another kind, one that is none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.foreign_files import judge_all

RUNS = """\
base_model: meta-llama/Llama-3.2-1B
datasets: [{path: someone/rows, type: alpaca}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 512
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 2e-4
optimizer: adamw_torch_8bit
"""


def test_files_are_counted_by_tool_with_one_reason_each(tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text(RUNS)
    (tmp_path / "dbrx.yaml").write_text(RUNS.replace("meta-llama/Llama-3.2-1B", "LnL-AI/dbrx-base-converted-v2"))
    (tmp_path / "qat.yaml").write_text(RUNS + "qat: {weight_dtype: int4}\n")
    (tmp_path / "dpo.yaml").write_text(RUNS + "rl: dpo\n")
    (tmp_path / "cloud.yaml").write_text("provider: somewhere\n")
    rows = {row.file: row for row in judge_all([tmp_path], "1xH100-80GB")}
    assert {name: row.outcome for name, row in rows.items()} == {
        "dpo.yaml": "out of scope", "dbrx.yaml": "refused", "qat.yaml": "refused", "runs.yaml": "runs"
    }  # fmt: skip
    assert rows["runs.yaml"].substituted == ("optimizer",)
    assert "dbrx is not a known kind of decoder" in rows["dbrx.yaml"].reason
    assert rows["qat.yaml"].reason.startswith("qat: training with simulated quantization")
