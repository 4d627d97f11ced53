"""Stages of a vision-language model in one process: the projector alone, then adapters beside it from the first one's
result; what is saved is what was trained and nothing else, and `eval` measures what training did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.infer.evaluate import EvaluationData, measure
from manyhands.infer.load import find_parts, open_answerer
from manyhands.infer.replicas import Placement
from manyhands.infer.settings import GenerationSettings
from tests.keys.lab import Lab, Ran, open_lab
from tests.support.vision import write_tiny_vision

COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


def write_rows(lab: Lab) -> str:
    rows: list[dict[str, Any]] = []
    for number in range(24):
        name, color = list(COLORS.items())[number % 3]
        Image.fromarray(np.full((30 + number, 40, 3), color, dtype=np.uint8)).save(lab.folder / f"{number}.png")
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "?"}]
        question: Any = parts if number % 4 else f"what is {name}"  # some have no image
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": name}]})
    return lab.write_rows("pictures.jsonl", rows)


def changed(before: Path, after: Path) -> set[str]:
    first, second = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


def check(ran: Ran, output: str, base: Path | None = None) -> None:
    proofs = ran.folder / "verify"
    reference = Reference.read(proofs / f"{output}.json")
    found = verify(ran.folder / output, reference, base=base, probe_path=proofs / "probe.safetensors")
    assert not found.findings and any("tokens behind an image deviate" in note for note in found.notes), found


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_projector_is_trained_alone_and_then_beside_adapters(tmp_path: Path, family: str) -> None:
    with open_lab(tmp_path) as lab:
        source = write_tiny_vision(lab.folder / "vision", family)
        keys: dict[str, Any] = {
            "data.train": write_rows(lab),
            "optimizer.learning_rate": 2e-2,
            "stop.epochs": 4,
            "data.packing": False,
            "batch.micro_samples": 4,
        }
        defaults = {"method.rank": 16, "method.alpha": 32.0}
        alone = {"method.parts": {"vision": "frozen", "projector": "trained", "language": "frozen"}} | defaults
        first = lab.export({**keys, "model.name": str(source), **alone})
        assert first.rank.plan.parts == alone["method.parts"] and first.losses[-1] < first.losses[0]
        moved = changed(source, first.folder / "model")
        assert moved and all("projector" in name or "merger" in name for name in moved), moved
        check(first, "model")

        evaluated = first.rows("evaluation")[-1]["loss"]
        data = EvaluationData(Path(first.rank.plan.data_folder), "validation", "validation")
        settings = GenerationSettings(max_new_tokens=3)
        placement = Placement(processes=1)
        scores = measure(
            find_parts(first.folder),
            data,
            ["loss", "exact_match"],
            settings=settings,
            placement=placement,
            report=lambda _: None,
        )
        assert scores.values["loss"] == pytest.approx(evaluated, rel=1e-4) and scores.answers

        second = lab.export(
            {
                **keys,
                "model.name": str(first.folder),
                "method.parts": {"projector": "trained", "language": "lora"},
                "optimizer.learning_rate": 1e-3,
                "optimizer.part_learning_rates": {"projector": 1e-2},
            }
        )
        assert second.rank.plan.model_folder == str(first.folder / "model")
        assert second.rows("step")[0]["learning_rates"] == {"projector": pytest.approx(1e-2)}
        check(second, "adapter", first.folder / "model")
        fields = json.loads((second.folder / "adapter" / "adapter_config.json").read_text())
        assert fields["modules_to_save"] and fields["base_model_name_or_path"] == str(first.folder / "model")
        question = [{"type": "image", "image": str(lab.folder / "1.png")}, {"type": "text", "text": "?"}]
        answerer = open_answerer(second.folder)
        assert answerer.answer_all([[{"role": "user", "content": question}]], settings)[0].ids
