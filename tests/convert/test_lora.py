"""Adapters: where they start, targets, refusals. Against PEFT: test_lora_peft.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.config.schema import MethodSection
from manyhands.convert.adapter import adapter_state
from manyhands.convert.lora import LoraLinear, adapted_layers, apply_lora
from manyhands.core.errors import UserError
from tests.support.adapters import load_adapter_state
from tests.support.layouts import random_adapter
from tests.support.tiny import tiny_model

IDS = torch.arange(40)[None] % 256


def method(**keys: Any) -> MethodSection:
    return MethodSection(**({"name": "lora", "rank": 4, "alpha": 8.0} | keys))


def test_training_starts_at_the_base_model_and_draws_a_from_the_name() -> None:
    base, model, again = tiny_model("qwen3"), tiny_model("qwen3"), tiny_model("qwen3")
    apply_lora(model, method(), seed=3)
    apply_lora(again, method(), seed=3)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    first, second = (layer.lora_A.weight for layer in list(adapted_layers(model).values())[:2])
    assert not torch.equal(first[:, :8], second[:, :8])
    assert all(
        torch.equal(a, b) for a, b in zip(adapter_state(model).values(), adapter_state(again).values(), strict=True)
    )
    assert first.abs().max() <= 64**-0.5 and first.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.15)


def test_base_weights_keep_their_parameter_and_name() -> None:
    model = tiny_model("llama")
    before = dict(model.named_parameters())
    apply_lora(model, method(), seed=0)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and not parameter.requires_grad for name, parameter in before.items())
    assert {name for name, p in after.items() if p.requires_grad} == after.keys() - before.keys()


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 21),
        (("q_proj", "v_proj"), 6),
        (("*.mlp.*",), 9),
        (("self_attn.o_proj",), 3),
        (("model.layers.0.mlp.up_proj",), 1),
    ],
)
def test_targets_by_name_end_or_glob(targets: Any, count: int) -> None:
    model = tiny_model("llama")
    names = apply_lora(model, method(target_modules=targets), seed=0)
    assert len(names) == count and names == list(adapted_layers(model))
    assert not isinstance(model.lm_head, LoraLinear)


def test_a_target_that_matches_nothing_names_the_candidates() -> None:
    with pytest.raises(UserError, match="query_proj") as error:
        apply_lora(tiny_model("llama"), method(target_modules=("query_proj",)), seed=0)
    assert "self_attn.q_proj" in str(error.value)


def test_all_linear_that_misses_most_weights_is_refused() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:  # as merged experts are: matrices outside of linear layers
        layer.mlp.gate_up_proj = torch.nn.Parameter(torch.zeros(8, 128, 64))
    with pytest.raises(UserError, match="reach only"):
        apply_lora(model, method(), seed=0)


def test_dropout_acts_in_training_only() -> None:
    model = tiny_model("llama")
    apply_lora(model, method(dropout=0.5), seed=0)
    load_adapter_state(model, random_adapter(model))
    with torch.no_grad():
        evaluated = [model.eval()(IDS).logits for _ in range(2)]
        trained = [model.train()(IDS).logits for _ in range(2)]
    assert torch.equal(*evaluated) and not torch.equal(*trained)


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    model = tiny_model("llama")
    apply_lora(model, method(), seed=0)
    state = adapter_state(model)
    name = next(iter(state))
    state["extra"] = state.pop(name)
    with pytest.raises(UserError) as error:
        load_adapter_state(model, state)
    assert f"missing: {name}" in str(error.value) and "unexpected: extra" in str(error.value)
