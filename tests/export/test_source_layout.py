"""A saved model is laid out as its source: the same names, shapes and dtypes, towers byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from manyhands.convert.lora import adapted_layers
from manyhands.export.model import export_model
from manyhands.export.verify import verify
from manyhands.facts.types import NewTokens
from manyhands.families import measured_types
from tests.support.building import load_model
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

FAMILIES = (*measured_types(), "gpt_neox", "mixtral", "qwen3_moe")
IDS = torch.arange(40)[None] % 256


def load(folder: Path, method: str = "full") -> Any:
    plan, config = tiny_plan(folder), tiny_run(folder, method)
    return load_model(plan, config).eval()


def layout(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_dtypes_are_the_sources(tmp_path: Path, family: str) -> None:
    source = write_tiny_model(tmp_path / "source", family, "bfloat16")
    model = load(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.5).bfloat16())
    reference = export_model(tmp_path / "saved", model, source, "bfloat16", rank=0)
    assert layout(tmp_path / "saved") == layout(source)
    assert reference is not None and verify(tmp_path / "saved", reference).findings == []
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        assert torch.equal(opened(IDS).logits, model(IDS).logits)


def test_what_the_source_keeps_in_another_dtype_or_twice_stays_so(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "llama", "bfloat16")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied, and stored under both names
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # once saved, now computed
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    reference = export_model(tmp_path / "saved", load(source), source, "bfloat16", rank=0)
    assert layout(tmp_path / "saved") == layout(source)
    assert reference is not None and verify(tmp_path / "saved", reference).findings == []
    export_model(tmp_path / "wide", load(source), source, "float32", rank=0)
    assert {dtype for _, dtype in layout(tmp_path / "wide").values()} == {torch.float32}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_model_from_new_weights_is_named_as_transformers_names_it(tmp_path: Path, family: str) -> None:
    source = write_tiny_model(tmp_path / "source", family)
    model, expected = load(source), layout(source)
    (source / "model.safetensors").unlink()
    export_model(tmp_path / "saved", model, source, "float32", rank=0)
    assert layout(tmp_path / "saved") == expected


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_towers_are_saved_byte_for_byte_and_text_is_what_was_trained(tmp_path: Path, method: str, dtype: str) -> None:
    source = write_tiny_multimodal(tmp_path / "source", dtype)
    model = load(source, method)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.1)
        if method == "full":
            for parameter in model.parameters():
                parameter.mul_(1.25)
    reference = export_model(tmp_path / "saved", model, source, dtype, rank=0, merge=method != "full")
    assert layout(tmp_path / "saved") == layout(source)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    towers = [name for name in before if "vision" in name or "projector" in name]
    assert len(towers) > 20 and all(torch.equal(before[name], after[name]) for name in towers)
    changed = "language_model.model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[changed], after[changed])
    assert reference is not None and verify(tmp_path / "saved", reference).findings == []
    opened = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        logits, expected = opened(input_ids=IDS).logits, model(input_ids=IDS).logits
    assert (logits - expected).square().mean().sqrt() < (0.05 if dtype == "bfloat16" else 1e-4) * expected.std()
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"preprocessor_config.json", "processor_config.json", "tokenizer.json", "config.json"} <= names


@pytest.mark.parametrize(("stored", "asked"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_a_merged_multimodal_model_has_the_one_dtype_that_was_asked_for(
    tmp_path: Path, family: str, stored: str, asked: str
) -> None:
    source, dtype = write_tiny_multimodal(tmp_path / "source", stored, family=family), getattr(torch, asked)
    reference = export_model(tmp_path / "saved", load(source, "lora"), source, asked, rank=0, merge=True)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    towers = [name for name in before if "vision" in name or "projector" in name]
    assert len(towers) > 15 and all(torch.equal(before[name].to(dtype), after[name]) for name in towers)
    assert reference is not None and verify(tmp_path / "saved", reference).findings == []
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert {parameter.dtype for parameter in opened.parameters()} == {dtype}
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    stated = [
        part.get("dtype", asked) for part in (fields, *(value for value in fields.values() if isinstance(value, dict)))
    ]
    assert set(stated) == {asked}


def test_a_multimodal_model_grows_in_its_text(tmp_path: Path) -> None:
    source = write_tiny_multimodal(tmp_path / "source")
    plan, config = (
        tiny_plan(source, new_tokens=NewTokens(ids=(260,), fresh_ids=(260,), vocab_size=264)),
        tiny_run(source),
    )
    model: Any = load_model(plan, config)
    export_model(tmp_path / "saved", model, source, "float32", rank=0)
    opened, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert opened.config.text_config.vocab_size == 264 and not info["missing_keys"] and not info["mismatched_keys"]
    embedding, old = opened.get_input_embeddings().weight, load_file(source / "model.safetensors")
    assert torch.equal(embedding[:260], old["language_model.model.embed_tokens.weight"])
