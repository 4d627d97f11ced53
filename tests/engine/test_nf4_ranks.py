"""Weights in NF4 come out of every sharding with the bytes that went in, and train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from manyhands.config.schema import RunConfig
from manyhands.model.weights import quantized_layers
from tests.engine.nf4_ranks import SHAPES, Unit, nf4_bytes, write_merged
from tests.engine.test_layouts import RAGGED, assert_equal_step, documents, merged
from tests.support.adapters import load_adapter_state
from tests.support.layouts import build, measure, random_adapter
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.distributed

RANKS = "tests.engine.nf4_ranks"
LAYOUTS = "tests.support.layouts:measure"
WIDE = {"hidden_size": 96, "intermediate_size": 352}  # 2 or 3 rows of codes in the MLP, 1 in the attention
WAYS: dict[str, dict[str, Any]] = {
    "ddp 2": {"strategy": "ddp", "world_size": 2},
    "fsdp 2": {"strategy": "fsdp", "world_size": 2},
    "fsdp 4": {"strategy": "fsdp", "world_size": 4},
    "fsdp 2, kept and recomputed": {
        "strategy": "fsdp",
        "world_size": 2,
        "reshard_after_forward": False,
        "activation_checkpointing": "full",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("nf4"), "llama", "bfloat16", with_tokenizer=False, **WIDE))


def random_weights(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})


@pytest.mark.parametrize("replicas, ranks", [(1, 2), (1, 3), (1, 4), (2, 4)], ids=["2", "3", "4", "2x2"])
@pytest.mark.parametrize("dtype, policy", [("bfloat16", True), ("bfloat16", False), ("float32", False)])
def test_gathered_bytes_are_the_original_ones(
    world: Ranks, dtype: str, policy: bool, replicas: int, ranks: int
) -> None:
    one = Unit(getattr(torch, dtype), "cpu")
    one.fill(getattr(torch, dtype))
    expected = {name: parameter.detach().view(torch.uint8).numpy() for name, parameter in one.layers.named_parameters()}
    assert len(expected) == 2 * len(SHAPES)
    for found in world.run(f"{RANKS}:gathered_bytes", dtype, policy, replicas, world_size=ranks):
        for name, bytes_ in expected.items():
            assert np.array_equal(found["seen"][name], bytes_), f"{name} in the forward pass"
            assert np.array_equal(found["whole"][name], bytes_), name
        assert found["greedy"] == []  # no rank reads more of a weight than it keeps


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_loaded_bytes_do_not_depend_on_the_sharding(world: Ranks, folder: str, init: str) -> None:
    config = tiny_run(folder, "qlora")
    config = random_weights(config) if init == "random" else config
    dtypes = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}
    one = nf4_bytes(tiny_plan(folder, **dtypes), config)
    assert len(one) == 2 * 7 * 3
    for way in ("ddp 2", "fsdp 2", "fsdp 4"):
        plan = tiny_plan(folder, **(dtypes | WAYS[way]))
        for found in world.run(f"{RANKS}:nf4_bytes", plan, config, world_size=plan.layout.world_size):
            assert found == one, way


def test_weights_are_those_of_a_model_that_transformers_quantises(folder: str) -> None:
    from transformers import BitsAndBytesConfig

    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=options, device_map={"": "cpu"}
    )
    ours = build(tiny_plan(folder, compute_dtype="bfloat16", frozen_dtype="bfloat16"), tiny_run(folder, "qlora")).model
    layers = quantized_layers(ours)
    assert len(layers) == 7 * 3
    for name, layer in layers.items():
        held = layer.weight_codes.view(torch.uint8).view(-1)
        packed = theirs.get_submodule(name).weight.data.view(-1)
        assert torch.equal(held[: packed.numel()], packed), name


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process(world: Ranks, folder: str, way: str) -> None:
    config = tiny_run(folder, "qlora")
    one = measure(tiny_plan(folder), config, merged(RAGGED))
    assert len(one["gradients"]) == 2 * 7 * 3 and min(np.abs(g).max() for g in one["gradients"].values()) > 0
    plan = tiny_plan(folder, **WAYS[way])
    for result in world.run(LAYOUTS, plan, config, RAGGED, world_size=plan.layout.world_size):
        assert_equal_step(result, one, 2e-6)


def test_a_step_on_a_2d_mesh_is_that_of_one_process(world: Ranks, folder: str) -> None:
    config = tiny_run(folder, "qlora")
    micro = [documents(seed, [5, 11], 0.7) for seed in range(4)]
    one = measure(tiny_plan(folder), config, merged([micro]))
    plan = tiny_plan(folder, strategy="fsdp", world_size=4)
    for result in world.run(f"{RANKS}:step_on_a_mesh", plan, config, micro, 2, world_size=4):
        assert_equal_step(result, one, 2e-6)


def test_bfloat16_steps_are_the_same_copied_and_sharded(world: Ranks, folder: str) -> None:
    config, dtypes = tiny_run(folder, "qlora"), {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}
    results = [
        world.run(LAYOUTS, tiny_plan(folder, **(dtypes | WAYS[way])), config, RAGGED, world_size=2)[0]
        for way in ("ddp 2", "fsdp 2")
    ]
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["norm"] == pytest.approx(results[1]["norm"], rel=1e-7)
    assert results[0]["dtypes"] == {"torch.float32"}


def test_the_merged_model_is_the_dequantised_weight_with_the_update(world: Ranks, folder: str, tmp_path: Path) -> None:
    config, plan = tiny_run(folder, "qlora"), tiny_plan(folder)
    write_merged(plan, config, tmp_path / "single")
    world.run(f"{RANKS}:write_merged", tiny_plan(folder, **WAYS["fsdp 2"]), config, tmp_path / "two", world_size=2)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "two"))
    source = load_file(Path(folder) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = build(plan, config).model
    load_adapter_state(model, random_adapter(model))
    name, layer = next(iter(quantized_layers(model).items()))
    update = layer.scaling * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
    assert torch.equal(one[f"{name}.weight"], (layer.gather_weight().double() + update).float())
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "single", dtype=torch.float32)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(reopened(ids).logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
