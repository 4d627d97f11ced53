"""A second family of images and text end to end: published in a flat configuration, positions of three axes, packed,
two strategies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from tests.e2e.runs import Place, Spec
from tests.support.multimodal import write_tiny_multimodal

pytestmark = pytest.mark.slow  # whole runs in processes of their own

METHODS, STRATEGIES = ("lora", "full"), ("ddp", "fsdp")
TOWER = "visual."


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    source = write_tiny_multimodal(place.folder / "qwen", "bfloat16", family="qwen2_5_vl")
    specs = []
    for method in METHODS:
        adapter = (f"method.name={method}", "method.dropout=0", "output.merge=true") if method != "full" else ()
        file = "full.yaml" if method == "full" else "run.yaml"
        specs += [
            Spec(2, f"q-{method}-{each}", (f"model.name={source}", f"parallel.strategy={each}", *adapter), None, file)
            for each in STRATEGIES
        ]
    place.many(*specs)
    return place


@pytest.mark.parametrize("method", METHODS)
def test_both_strategies_learn_the_same_from_packed_rows(ran: Place, method: str) -> None:
    ddp, fsdp = (ran.run(f"q-{method}-{strategy}") for strategy in STRATEGIES)
    assert ddp.losses()[-1] < 0.95 * ddp.losses()[0]
    assert fsdp.losses() == pytest.approx(ddp.losses(), rel=1e-5)
    plan = ddp.read("plans/001.json")
    assert plan["packing"] and any(
        "a shrunken copy gives the same logits" in str(reason["values"]) for reason in plan["why"]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_familys_own_class_opens_it_with_the_sources_eyes(ran: Place, method: str, strategy: str) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    source, folder = (
        ran.folder / "qwen",
        ran.run(f"q-{method}-{strategy}").folder / ("model" if method == "full" else "merged"),
    )
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    assert {name: tensor.shape for name, tensor in before.items()} == {
        name: tensor.shape for name, tensor in after.items()
    }
    towers = [name for name in before if name.startswith(TOWER)]
    assert len(towers) > 15 and all(torch.equal(before[name].float(), after[name].float()) for name in towers)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16 if method == "full" else torch.float32}
    opened: Any = [
        Qwen2_5_VLForConditionalGeneration.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        for path in (source, folder)
    ]
    assert not any(info["missing_keys"] or info["unexpected_keys"] for _, info in opened)
    grid, pixels = (
        torch.tensor([[1, 4, 4]]),
        torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        eyes = [model.eval().get_image_features(pixels, grid).pooler_output[0] for model, _ in opened]
        words = [model(input_ids=torch.arange(40)[None]).logits for model, _ in opened]
    assert torch.equal(*eyes) and not torch.allclose(*words, rtol=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapter_and_merged_model_are_verified_and_the_checkpoint_is_text(ran: Place, strategy: str) -> None:
    folder = ran.run(f"q-lora-{strategy}").folder
    for name in ("adapter", "merged"):
        reference, probe = Reference.read(folder / "verify" / f"{name}.json"), folder / "verify" / "probe.safetensors"
        found = verify(folder / name, reference, base=ran.folder / "qwen", probe_path=probe)
        assert not found.findings and any("logits of" in note for note in found.notes), found
    saved = {name for path in folder.glob("checkpoints/step-000012/*.safetensors") for name in load_file(path)}
    assert saved and all(".language_model." in name for name in saved)
