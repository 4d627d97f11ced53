"""What is read from a config about the head gives the model's own logits, or is found out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from manyhands.kernels.loss.head import Head, agrees, read_head
from manyhands.model.loss import LossModel
from tests.support.tiny import tiny_model

SMALL = dict(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
)
FAMILIES = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_head_gives_the_models_own_logits_and_loss(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    head = read_head(model)
    assert isinstance(head, Head)
    hidden, labels = torch.randn(9, 32) * 100, torch.randint(0, 260, (9,))
    logits = LossModel(model).logits_of(hidden)
    torch.testing.assert_close(head.logits(hidden), logits.float(), rtol=1e-4, atol=1e-4)
    assert agrees(head, hidden, logits)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(head.loss(hidden, labels)[0], expected, rtol=1e-4, atol=1e-4)
    wrong = [dataclasses.replace(head, logit_scale=head.logit_scale * 1.1), dataclasses.replace(head, softcap=5.0)]
    assert not any(agrees(other, hidden, logits) for other in wrong)


def test_heads_that_cannot_be_fused_are_named() -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(64, 260)
    assert read_head(model) == "the head has a bias"
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 260))
    assert "Sequential" in str(read_head(model))


def test_bfloat16_rounding_is_no_disagreement() -> None:
    model = tiny_model("gemma3", "bfloat16", final_logit_softcapping=20.0)
    head = read_head(model)
    assert isinstance(head, Head) and head.softcap == 20.0
    hidden = torch.randn(16, 64).bfloat16() * 4
    assert agrees(head, hidden, LossModel(model).logits_of(hidden))
