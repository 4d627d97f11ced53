"""Packed as alone for every family that is packed; what leaks, drops a cap or hides a loss is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from manyhands.config.schema import MethodSection
from manyhands.convert.lora import apply_lora
from manyhands.core.errors import UserError
from manyhands.model import loss as loss_module
from manyhands.model.load import build_meta, disable_dropout
from manyhands.model.probe import choose_layers, probe, shrink
from tests.support.families import MEASURED, STATEFUL, measure
from tests.support.tiny import tiny_config, tiny_model, tiny_plan, tiny_run, write_tiny_model


@pytest.mark.parametrize("family", MEASURED)
def test_packed_and_padded_rows_train_as_if_alone(family: str) -> None:
    row = measure(family)
    assert row.packed.within and row.padded.within and not row.refusal, row


@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_that_is_not_reset_is_refused_packed_and_right_unpacked(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "separate_states", lambda model: False)
    row = measure(family)
    assert "see each other" in row.refusal and not row.packed.within and row.packed.gradients > 0.01
    assert row.padded.within


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_blockwise_attention_trains_what_sdpa_trains(family: str) -> None:
    row = measure(family, "blockwise")
    assert row.packed.within and row.padded.within and not row.refusal, row


def test_a_dropped_soft_cap_is_refused() -> None:
    with pytest.raises(UserError, match="not what the model's own code computes"):
        measure("gemma2", "sdpa")


@pytest.mark.parametrize("family", MEASURED)
def test_the_probe_of_a_shrunken_copy_says_the_same(family: str) -> None:
    verdict = probe(
        tiny_config(family, num_hidden_layers=6, layer_types=None) if family == "gemma2" else tiny_config(family)
    )
    assert verdict["trains"] and verdict["packs"], verdict


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("stablelm", "does not pass keyword arguments on"),
        ("bloom", "no fast attention"),
        ("opt", "is not a decoder with a base model and a head"),
    ],
)
def test_the_probe_names_what_speaks_against_a_family(family: str, words: str) -> None:
    verdict = probe(AutoConfig.for_model(family))
    assert not verdict["packs"] and words in verdict["reason"]


def test_a_router_loss_of_the_models_own_is_refused_by_the_probe() -> None:
    verdict = probe(tiny_config("mixtral", output_router_logits=True))
    assert not verdict["trains"] and "router loss" in verdict["reason"]


def test_a_shrunken_copy_has_some_layers_of_each_kind_and_the_same_head_dim() -> None:
    config = tiny_config(
        "gemma3", num_hidden_layers=12, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2, head_dim=32
    )
    small = shrink(config)
    assert small.layer_types == ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    assert (small.num_hidden_layers, small.head_dim, small.hidden_size, small.num_attention_heads) == (4, 32, 128, 4)
    assert config.num_hidden_layers == 12  # the configuration itself is left alone
    assert choose_layers(["same"] * 9, listed=False) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("family", "missed"), [("mixtral", "experts.gate_up_proj"), ("qwen3_moe", "experts.down_proj")]
)
def test_adapters_that_would_miss_merged_experts_are_refused_with_the_list(family: str, missed: str) -> None:
    with pytest.raises(UserError, match="reach only") as caught:
        apply_lora(tiny_model(family), MethodSection(name="lora", rank=4), seed=0)
    assert any(missed in detail for detail in caught.value.details)


def test_dropout_of_the_familys_own_is_off_and_said() -> None:
    config: Any = tiny_config("seed_oss")
    assert config.attention_dropout == 0.1
    assert "attention_dropout=0.1" in disable_dropout(config)
    assert config.attention_dropout == config.residual_dropout == 0.0 and disable_dropout(config) == []


@pytest.mark.parametrize(("method", "advises"), [("full", False), ("lora", True)])
def test_a_method_that_has_dropout_is_advised_to_set_it(method: str, advises: bool, tmp_path: Path) -> None:
    folder, said = str(write_tiny_model(tmp_path, "llama", with_tokenizer=False, attention_dropout=0.1)), []
    build_meta(tiny_plan(folder), tiny_run(folder, method), said.append)
    assert "attention_dropout=0.1" in said[0] and ("method.dropout" in said[0]) is advises


def test_attention_without_lengths_raises_in_training() -> None:
    model = tiny_model("gemma2").train()
    model.set_attn_implementation("manyhands_blockwise")
    with pytest.raises(RuntimeError, match="no cumulative lengths"):
        model(torch.arange(9)[None], use_cache=False)
