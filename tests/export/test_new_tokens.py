"""New tokens beside every choice of fully trained embeddings and heads: the adapter and the merged model reopen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from manyhands.config.schema import MethodSection, ModelSection
from manyhands.convert.lora import apply_lora
from manyhands.convert.new_tokens import fill_token_rows
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.export.reference import Reference, save_probe
from manyhands.export.verify import verify
from manyhands.infer.compare import find_base_parts
from manyhands.infer.load import find_parts, load_model
from manyhands.model.resize_embeddings import resize_embeddings
from tests.support.tiny import VOCAB_SIZE, write_tiny_model

NEW = (VOCAB_SIZE, VOCAB_SIZE + 1)
IDS = torch.tensor([[256, 7, NEW[0], 11, NEW[1], 13]])


@pytest.mark.parametrize("kind", ["adapter", "merged"])
@pytest.mark.parametrize("saved", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("tied", [True, False])
def test_it_reopens_with_the_logits_that_it_was_saved_with(
    tmp_path: Path, tied: bool, saved: tuple[str, ...], kind: str
) -> None:
    source = tmp_path / "base"
    write_tiny_model(source, "llama", tie_word_embeddings=tied)
    asked = ModelSection(name=str(source), new_tokens=("<aud1>", "<aud2>"))
    method = MethodSection(name="lora", rank=4, modules_to_save=saved)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa").eval()
    resize_embeddings(model, VOCAB_SIZE + len(NEW))
    apply_lora(model, method, 0, NEW)
    fill_token_rows(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        logits = model(input_ids=IDS).logits
    reference, probe, out = tmp_path / "reference.json", tmp_path / "probe.safetensors", tmp_path / "out"
    save_probe(probe, IDS, logits, "float32")
    options = {"asked": asked, "reference_path": reference}
    if kind == "adapter":
        export_adapter(out, model, method, str(source), rank=0, source=source, **options)
    else:
        export_model(out, model, source, "float32", rank=0, merge=True, **options)
    found = verify(out, Reference.read(reference), base=source if kind == "adapter" else None, probe_path=probe)
    assert found.findings == [] and "reopened" in " ".join(found.notes)
    parts = find_parts(out)
    with torch.no_grad():
        assert torch.allclose(load_model(parts, "cpu")(input_ids=IDS).logits, logits, atol=1e-3)
    if kind == "adapter":
        assert find_base_parts(parts, None) is None, "the base lacks the tokens"
