"""A model of text and images with all of its parts: what is saved opens in transformers and PEFT, and sees images as
the model in memory did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyhands.config.schema import MethodSection
from manyhands.convert.adapter import SAVED_BY_TRANSFORMERS
from manyhands.convert.lora import adapted_layers, apply_lora
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.export.verify import verify
from manyhands.families import find
from manyhands.infer.load import ModelLocation, load_model
from manyhands.model.structure import auto_class_of, left_out
from tests.export.test_source_layout import layout
from tests.support.layouts import build
from tests.support.multimodal import WHOLE, write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

SLOW = ("llava", "internvl", "smolvlm", "gemma4")
FAMILIES = ("gemma3", "qwen3_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW))
IMAGE = 250
TOKENS = {"gemma3": 4, "llava": 4, "internvl": 1, "smolvlm": 1, "qwen3_vl": 1, "gemma4": 1}  # placeholders of one image


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Some text, an image, some text."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.tensor([[40, 41, *[IMAGE] * TOKENS[family], 42, 43, 44]])
    if family == "qwen3_vl":  # four patches of 14 x 14, two frames, become one token
        kinds = (ids == IMAGE).long()
        pixels = torch.randn(4, 3 * 2 * 14 * 14, generator=draw)
        return {
            "input_ids": ids,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "mm_token_type_ids": kinds,
        }
    if family == "gemma4":  # nine patches of 4 x 4
        places = torch.tensor([[[column, row] for row in range(3) for column in range(3)]])
        pixels = torch.rand(1, 9, 3 * 4 * 4, generator=draw)
        return {"input_ids": ids, "pixel_values": pixels, "image_position_ids": places}
    square = torch.randn(1, 3, 28, 28, generator=draw)
    return {"input_ids": ids, "pixel_values": square[None] if family == "smolvlm" else square}


def whole(source: Path) -> Any:
    return auto_class_of(source).from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def logits(model: Any, family: str) -> torch.Tensor:
    return model(**inputs(family), use_cache=False).logits


@torch.no_grad()
def disturb(parameters: Any) -> None:
    for parameter in parameters:
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_every_part_trained_is_laid_out_as_its_source_and_opens(tmp_path: Path, family: str) -> None:
    source = write_tiny_multimodal(tmp_path / "source", family=family)
    model = whole(source)
    before = logits(model, family)
    disturb(model.parameters())
    reference = export_model(tmp_path / "model", model, source, "float32", rank=0)
    assert reference is not None and not reference.copied and layout(tmp_path / "model") == layout(source)
    found = verify(tmp_path / "model", reference)
    assert not found.findings and "reopened by AutoModelForMultimodalLM" in found.notes[1]
    opened = logits(whole(tmp_path / "model"), family)
    assert torch.equal(opened, logits(model, family)) and not torch.allclose(opened, before, atol=1e-2)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_beside_a_trained_projector_open_in_peft_and_in_transformers(tmp_path: Path, family: str) -> None:
    """transformers ignores a projector under PEFT's name for it without a word: the file has both names."""
    from peft import PeftModel

    source = write_tiny_multimodal(tmp_path / "source", family=family)
    model, projectors = whole(source), find(family).projectors
    before = logits(model, family)
    projectors = tuple(name for name in projectors if any(n == name for n, _ in model.named_modules()))
    method = MethodSection(name="lora", rank=4, alpha=8.0, modules_to_save=projectors)
    apply_lora(model, method, 0)
    disturb(layer.lora_B.weight for layer in adapted_layers(model).values())
    disturb(p for name in projectors for p in model.get_submodule(name).parameters())
    expected = logits(model, family)
    reference = export_adapter(tmp_path / "adapter", model, method, str(source), rank=0)
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    saved = {"qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list.0"}}
    assert set(fields["modules_to_save"]) == saved.get(family, set(projectors))
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert sum(SAVED_BY_TRANSFORMERS in name for name in names) == len(reference.seconds) > 0
    found = verify(tmp_path / "adapter", reference, base=source)
    assert not found.findings, found.findings
    by_peft = PeftModel.from_pretrained(whole(source), str(tmp_path / "adapter")).eval()
    by_transformers = whole(source)
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    ours = load_model(ModelLocation(source, tmp_path / "adapter"), device="cpu")  # as `manyhands generate` opens it
    for opened in (by_peft, by_transformers, ours):
        torch.testing.assert_close(logits(opened, family), expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.1


def test_a_tower_of_sound_is_left_out_and_saved_as_it_was(tmp_path: Path) -> None:
    """Beside images: its samples have none."""
    kind, own, towers, fields = WHOLE["gemma4"]
    sound = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    sound |= {"subsampling_conv_channels": [8, 4]}
    given = (kind, own, towers | {"audio_config": sound}, fields)
    source = write_tiny_multimodal(tmp_path / "source", family="gemma4", whole=given)
    engine = build(
        tiny_plan(source, parts=dict.fromkeys(("vision", "projector", "language"), "trained")), tiny_run(source)
    )
    assert left_out(engine.model) == ["model.audio_tower", "model.embed_audio"]
    assert all(p.requires_grad for p in engine.model.parameters())
    disturb(engine.model.parameters())
    reference = export_model(tmp_path / "model", engine.model, source, "float32", rank=0)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "model"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    heard = {name for name in before if "audio" in name}
    assert len(heard) > 20 and not heard & changed and any("vision_tower" in name for name in changed)
    assert not verify(tmp_path / "model", reference).findings
