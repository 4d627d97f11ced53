"""Generation on GPUs: copies beside each other, and layers divided over two, with an adapter unmerged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.export.adapter import export_adapter
from manyhands.infer.batch import answer_file
from manyhands.infer.replicas import Placement
from manyhands.infer.settings import GenerationSettings
from tests.export.tiny import METHOD, adapt, make_model, save_source
from tests.infer.test_batch import make_rows, write_rows


@pytest.mark.gpu(2)
def test_copies_and_divided_layers_answer_alike(tmp_path: Path) -> None:
    base = save_source(tmp_path / "base", make_model())  # float32, also on the GPU
    export_adapter(tmp_path / "adapter", adapt(make_model()), METHOD, str(base), rank=0)
    prompts = write_rows(tmp_path / "prompts.jsonl", make_rows(40))
    found = []
    for number, placement in enumerate(
        (
            Placement(gpus=1),
            Placement(gpus=2, device_map="none", batch_size=3),
            Placement(gpus=2, device_map="balanced"),
            Placement(gpus=2, device_map="sequential"),
        )
    ):
        output = tmp_path / f"{number}.jsonl"
        answer_file(
            tmp_path / "adapter",
            prompts,
            output,
            GenerationSettings(max_new_tokens=12, temperature=0.8, seed=1),
            base=str(base),
            placement=placement,
        )
        found.append([json.loads(line)["answer"] for line in output.read_text().splitlines()])
    assert found[0] == found[1] == found[2] == found[3]
