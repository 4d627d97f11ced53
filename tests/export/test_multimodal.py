"""What is saved of a family of text and images is its source with other text: towers byte for byte, and PEFT adapts the
source itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyhands.config.schema import MethodSection
from manyhands.convert.lora import adapted_layers
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.export.verify import verify
from manyhands.facts.model import TEXT_TENSOR
from manyhands.infer.load import ModelLocation, load_model
from manyhands.model.structure import auto_class_of
from tests.export.test_source_layout import layout, load
from tests.support.multimodal import TRAINED, write_tiny_multimodal

IDS = torch.arange(40)[None] + 40


@pytest.mark.ci
@pytest.mark.parametrize("family", TRAINED)
def test_merged_it_is_the_source_with_other_text_and_as_an_adapter_it_fits_the_source(
    tmp_path: Path, family: str
) -> None:
    from peft import PeftModel

    source = write_tiny_multimodal(tmp_path / "source", "bfloat16", family=family)
    model: Any = load(source, "lora")
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.1)
        expected = model(input_ids=IDS).logits
    merged = export_model(tmp_path / "merged", model, source, "bfloat16", rank=0, merge=True)
    adapter = export_adapter(
        tmp_path / "adapter", model, MethodSection(name="lora", rank=4, alpha=8.0), str(source), rank=0
    )
    assert merged is not None and adapter is not None
    for name, reference in (("merged", merged), ("adapter", adapter)):
        found = verify(tmp_path / name, reference, base=source)
        assert not found.findings and any("reopened by" in note for note in found.notes), found
    assert layout(tmp_path / "merged") == layout(source)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    towers = [name for name in before if not TEXT_TENSOR.search(name)]
    assert len(towers) > 15 and all(torch.equal(before[name], after[name]) for name in towers)
    assert sum(not torch.equal(before[name], after[name]) for name in before) == len(adapted_layers(model))

    whole = auto_class_of(source).from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    adapted: Any = PeftModel.from_pretrained(whole, str(tmp_path / "adapter")).eval()
    assert sum(".lora_A." in name for name, _ in adapted.named_parameters()) == len(adapted_layers(model))
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
        ours: Any = load_model(ModelLocation(source, tmp_path / "adapter")).cpu()  # as `manyhands generate` opens it
        torch.testing.assert_close(ours(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
