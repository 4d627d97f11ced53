"""Adapters and 4-bit storage on blocks whose mixers carry a state: they reach every linear layer, packs are exact."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from manyhands.config.schema import DataSection, MethodSection
from manyhands.convert.lora import adapted_layers
from manyhands.core.errors import UserError
from manyhands.export.model import export_model
from manyhands.facts.model import read_model_facts
from manyhands.launch.run import prepare
from manyhands.model.checks import check_loss, check_packing, pack_documents
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from manyhands.model.weights import quantized_layers
from manyhands.planner.choices import check_targets
from tests.planner.examples import facts
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
    described = read_model_facts(folder, "tiny", "pretrained")
    counted = {
        f"{block}.{name}" for index, block in enumerate(find_blocks(model)) for name in described.linears_of(index)
    }
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


@pytest.mark.parametrize("family", STATEFUL)
def test_what_peft_cannot_open_is_refused_by_the_plan(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, with_tokenizer=False)
    described = read_model_facts(folder, "tiny", "pretrained")
    names = {name.rpartition(".")[2] for index in range(described.num_layers) for name in described.linears_of(index)}

    def opens(targets: set[str]) -> bool:
        try:
            get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=targets))
        except ValueError as error:
            assert "incompatible with Mamba" in str(error)
            return False
        return True

    if opens(names):
        check_targets(MethodSection(name="lora"), described)
        return
    with pytest.raises(UserError, match="cannot be opened") as caught:
        check_targets(MethodSection(name="lora"), described)
    others = caught.value.fix.partition("[")[2].partition("]")[0].split(", ")
    assert names - set(others) == {"out_proj"} and opens(set(others))
    check_targets(MethodSection(name="lora", target_modules=tuple(others)), described)
    check_targets(MethodSection(name="full"), described)


@pytest.mark.parametrize("family", STATEFUL)
def test_a_saved_model_is_its_source_and_a_merged_one_the_adapted(tmp_path: Path, family: str) -> None:
    source = write_tiny_model(tmp_path / "source", family, with_tokenizer=False)
    export_model(tmp_path / "saved", load_model(tiny_plan(source), tiny_run(source)), source, "float32", rank=0)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model: Any = load_model(tiny_plan(source), tiny_run(source, "lora")).eval()
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.1)
        export_model(tmp_path / "merged", model, source, "float32", rank=0, merge=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        found, expected = (each(torch.arange(40)[None], use_cache=False).logits for each in (merged, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("gpus", "installed", "triton", "said"),
    [
        (1, (), "3.6.0", "note: not installed: fla, with kernels for 2 of 3 blocks"),
        (1, ("fla", "tilelang"), "3.6.0", ""),
        (1, ("fla",), "3.7.1", ""),
        (1, ("fla",), "3.6.0", "fla-core cannot compute the gradient of the gated delta rule here"),
        (0, (), "3.6.0", ""),
        (0, ("fla",), "3.6.0", ""),
    ],
)
def test_kernels_that_are_missing_are_named_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, installed: tuple[str, ...], triton: str, said: str
) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3_5_text")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    data = DataSection(train=str(rows), cache=str(tmp_path / "cache"))
    config = tiny_run(folder).model_copy(update={"data": data})
    find, version = importlib.util.find_spec, importlib.metadata.version
    there = {name: name in installed for name in ("fla", "tilelang", "causal_conv1d")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there[name] if name in there else find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton if name == "triton" else version(name))
    lines: list[str] = []
    try:
        prepare.gather_facts(config, saves=False, identify=False, host=facts(gpus=gpus).host, report=lines.append)
    except UserError as error:
        lines.append(f"{error.what}: {error.where}")
    about = [line for line in lines if "kernels for" in line or "fla-core" in line]
    assert [line[: len(said)] for line in about] == ([said] if said else [])


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
