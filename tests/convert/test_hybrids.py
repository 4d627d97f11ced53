"""Adapters and 4-bit storage on blocks whose mixers carry a state: they reach every linear layer, packs are exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.convert.lora import adapted_layers
from manyhands.facts.model import read_model_facts
from manyhands.model.checks import check_loss, check_packing, pack_documents
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from manyhands.model.weights import quantized_layers
from tests.support.building import load_model
from tests.support.families import STATEFUL
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

CPU = torch.device("cpu")
WITH_MAMBA_2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", STATEFUL)
def test_methods_reach_every_linear_layer_that_the_plan_counts(tmp_path: Path, family: str, method: str) -> None:
    folder = write_tiny_model(tmp_path, family, with_tokenizer=False)
    model: Any = load_model(tiny_plan(folder), tiny_run(folder, method)).train()
    facts = read_model_facts(folder, "tiny", "pretrained")
    counted = {f"{block}.{name}" for index, block in enumerate(find_blocks(model)) for name in facts.linears_of(index)}
    adapted = adapted_layers(model)
    assert adapted.keys() == counted
    assert method == "lora" or {name for name in quantized_layers(model) if "experts" not in name} <= counted
    with torch.no_grad():
        for layer in adapted.values():
            layer.lora_B.weight.normal_(std=0.1)
    loss_model = LossModel(model)
    assert check_loss(loss_model, loss_model, CPU) < 1e-4
    assert check_packing(loss_model, loss_model, CPU) < 1e-4
    batch = pack_documents([torch.randint(256, (1, length)) for length in (40, 23, 9)])
    loss_model(batch | {"labels": batch["input_ids"].roll(-1, 1)})["lm"][0].backward()
    assert not [name for name, layer in adapted.items() if not layer.lora_A.weight.grad.any()]


@pytest.mark.parametrize("family", WITH_MAMBA_2)
def test_no_kernel_takes_a_weight_past_its_layer(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In training Mamba-2 hands its last weight to one kernel for all, which knows no adapter."""
    folder = write_tiny_model(tmp_path, family, with_tokenizer=False)
    model: Any = load_model(tiny_plan(folder), tiny_run(folder, "lora")).train()
    loss_model = LossModel(model).train()
    mixers = [module for module in model.modules() if hasattr(module, "A_log")]
    home = sys.modules[type(mixers[0]).__module__]
    monkeypatch.setattr(home, "mamba2_split_conv1d_scan_combined", lambda *_, **__: pytest.fail("passed over"))
    batch = pack_documents([torch.randint(256, (1, length)) for length in (40, 23)])
    assert loss_model(batch | {"labels": batch["input_ids"].roll(-1, 1)})["lm"][0].isfinite()
    assert loss_model.training and not any(mixer.training for mixer in mixers)
