"""What recomputation keeps: less in each mode, compiled or not, and the gradients of keeping everything."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.convert.experts import stack_experts
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.lora import apply_lora
from manyhands.convert.nf4 import quantize_blocks
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.facts.model import read_model_facts
from manyhands.families import known_modules
from manyhands.model.weights import quantized_layers
from manyhands.planner.layout import Checkpointing
from manyhands.planner.memory.activations import kept_bytes_per_token, linear_bytes_per_token
from tests.planner.test_memory import FULL
from tests.support.experts import expert_model
from tests.support.plans import change_input, make_layout
from tests.support.tiny import tiny_config, tiny_model

NUM_TOKENS = 64
BACKEND = "aot_eager_decomp_partition"  # inductor's partitioner without the making of kernels


def build(
    mode: Checkpointing,
    compiled: bool,
    layers: int,
    *,
    family: str = "llama",
    lighter: int = 0,
    fused_rank: int = 0,
    in_nf4: bool = False,
) -> nn.Module:
    kinds = {"layer_types": ["full_attention"] * layers} if family == "gemma3" else {}
    model = tiny_model(family, num_hidden_layers=layers, **kinds).train()
    if in_nf4:
        put_in_nf4(model)
    if fused_rank:
        apply_lora(model, MethodSection(rank=fused_rank), seed=0)
        fuse_modules(model, known_modules())
    layout = make_layout(activation_checkpointing=mode, lighter_layers=lighter)
    checkpoint_blocks(model, layout.checkpointing_by_layer(layers), compiled=compiled)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, dynamic=None, backend=BACKEND)
    return model


def put_in_nf4(model: nn.Module) -> None:
    pytest.importorskip("bitsandbytes")
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    quantize_blocks(model)
    for name, layer in quantized_layers(model).items():
        layer.fill(weights[f"{name}.weight"])


def kept_bytes(model: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of all storages that autograd holds for the backward pass, parameters apart; and the gradients."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False)[0]
    hidden.square().sum().backward()
    return sum(storage.nbytes() for storage in held.values()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


@functools.cache
def kept_by_three(mode: Checkpointing, compiled: bool) -> tuple[int, dict[str, torch.Tensor]]:
    return kept_bytes(build(mode, compiled, 3))


def kept_by_layers(
    mode: Checkpointing, compiled: bool, **method: Any
) -> tuple[tuple[int, dict[str, torch.Tensor]], tuple[int, dict[str, torch.Tensor]]]:
    """Of three blocks, and of the same model without its last one: the graphs of the first run serve both."""
    model: Any = build(mode, compiled, 3, **method)
    three = kept_bytes(model)
    model.zero_grad()
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    return three, kept_bytes(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    "family, fused_rank, in_nf4",
    [
        ("llama", 0, False),
        pytest.param("llama", 2, False, marks=pytest.mark.slow),
        pytest.param("llama", 2, True, marks=pytest.mark.slow),
        ("gemma3", 2, True),
        pytest.param("olmo2", 0, False, marks=pytest.mark.slow),
        pytest.param("glm4", 0, False, marks=pytest.mark.slow),
    ],
    ids=["full", "fused adapters", "on NF4", "normed, on NF4", "normed", "normed and merged"],
)
def test_selective_keeps_the_results_of_linear_layers_and_attention_when_compiled(
    family: str, fused_rank: int, in_nf4: bool, tmp_path
) -> None:
    """What one more block adds is what the plan counts for it: fused adapters' products are operators of our own. The
    MLP's output is kept only where a norm reads it.
    """
    tiny_config(family).save_pretrained(tmp_path)
    model = read_model_facts(tmp_path, "tiny", "random")
    changes = {"model": model, "num_adapter_parameters": fused_rank, "adapter_rank": fused_rank}
    given = change_input(FULL, compute_dtype="float32", **changes)
    method: dict[str, Any] = {"family": family, "fused_rank": fused_rank, "in_nf4": in_nf4}
    (three, gradients), (two, _) = kept_by_layers("selective", True, **method)
    assert (three - two) / NUM_TOKENS == pytest.approx(linear_bytes_per_token(given), rel=0.02)
    everything, plain = kept_bytes(build("none", True, 3, **method))
    inputs, _ = kept_bytes(build("full", False, 3, **method))
    assert inputs < three < 0.8 * everything
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 4], ids=["trained", "fused adapters"])
def test_selective_keeps_the_products_of_experts_when_compiled(rank: int, tmp_path) -> None:
    """What one more block adds is what the plan counts, and no expert is multiplied again."""

    def build_mixture(layers: int) -> nn.Module:
        model = expert_model("qwen3_moe", eager=False, num_hidden_layers=layers)
        stack_experts(model)
        if rank:
            apply_lora(model, MethodSection(rank=rank), seed=0)
            fuse_modules(model, known_modules())
        checkpoint_blocks(model, ("selective",) * layers, compiled=True)
        torch._dynamo.reset()
        compile_blocks(model, dynamic=None, backend=BACKEND)
        return model

    expert_model("qwen3_moe").config.save_pretrained(tmp_path)
    changes = {"num_adapter_parameters": rank, "adapter_rank": rank, "fuses_experts": rank > 0}
    facts = read_model_facts(tmp_path, "tiny", "random")
    given = change_input(FULL, compute_dtype="float32", model=facts, **changes)
    model = build_mixture(2)
    kept_bytes(model)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        two, _ = kept_bytes(model)
    products = sum(event.name == "manyhands::multiply_groups" for event in profile.events())
    assert rank or products == 2 * (2 + 2)  # of two stacks, forward and backward
    three, _ = kept_bytes(build_mixture(3))
    assert (three - two) / NUM_TOKENS == pytest.approx(linear_bytes_per_token(given), rel=0.02)


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True])
def test_except_attention_repeats_everything_but_attention(compiled: bool, tmp_path) -> None:
    """What one more block adds is its input and the result of its attention; attention runs once."""
    tiny_config("llama").save_pretrained(tmp_path)
    given = change_input(FULL, compute_dtype="float32", model=read_model_facts(tmp_path, "tiny", "random"))
    (three, gradients), (two, _) = kept_by_layers("except_attention", compiled)
    in_graph = 4 * given.model.hidden_size if not compiled else kept_bytes_per_token(given, "except_attention")
    assert (three - two) / NUM_TOKENS == pytest.approx(in_graph, rel=0.02)
    full, plain = kept_by_three("full", compiled)
    assert full <= three
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_eager_selective_repeats_cheap_operations_only() -> None:
    repeated: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            repeated.append(func.name().partition(".")[0])
            return func(*args, **(kwargs or {}))

    counts = {}
    for mode in ("none", "selective", "except_attention", "full"):
        model = build(mode, False, 1)
        loss = model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False).logits.sum()
        repeated.clear()
        with Watch():
            loss.backward()
        counts[mode] = {
            name: repeated.count(name)
            for name in ("aten::mm", "aten::silu", "aten::_scaled_dot_product_flash_attention_for_cpu")
        }
    none, selective, but_attention, block = counts.values()
    assert selective["aten::mm"] == none["aten::mm"] < block["aten::mm"]
    assert selective["aten::silu"] == block["aten::silu"] == none["aten::silu"] + 1
    assert list(selective.values())[2] == list(but_attention.values())[2] == 0 < list(block.values())[2]
    assert but_attention["aten::mm"] == block["aten::mm"]


@pytest.mark.ci
def test_a_compiled_block_repeats_no_matmul_whose_result_is_not_needed() -> None:
    """The last one of a block: nothing in its backward pass reads the block's output."""
    num_matmuls = {}
    modes: tuple[Checkpointing, ...] = ("none", "except_attention")
    for each in modes:
        loss = build(each, True, 1)(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False).logits.sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        num_matmuls[each] = sum(event.name == "aten::mm" for event in profile.events())
    assert num_matmuls["except_attention"] == num_matmuls["none"] + 6, "of seven"


@pytest.mark.parametrize("in_nf4", [False, True], ids=["whole weights", "NF4"])
def test_eager_selective_keeps_the_products_of_fused_adapters(in_nf4: bool) -> None:
    """In-place products as well: no wide one is repeated, and gradients are those of keeping everything."""
    found = {}
    for mode in ("none", "selective"):
        model = build(mode, False, 2, fused_rank=8, in_nf4=in_nf4)
        for name, factor in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(factor, 0.01)  # zero as it starts, and A would get no gradient
        loss = model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False).logits.square().mean()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        num_wide = sum(event.name == "aten::addmm_" for event in profile.events())
        found[mode] = num_wide, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found["selective"][0] == found["none"][0] > 0
    assert len(found["none"][1]) == 2 * 7 * 2
    assert all(torch.equal(gradient, found["none"][1][name]) for name, gradient in found["selective"][1].items())


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["selective", "except_attention", "full"])
def test_lighter_layers_keep_what_the_next_lighter_mode_does(mode: Checkpointing, compiled: bool) -> None:
    """Three blocks, the last one lighter: what is held lies a third of the way to the lighter mode; gradients stay."""
    lighter_mode: Checkpointing = "none" if mode == "selective" else "selective"
    heavy, gradients = kept_by_three(mode, compiled)
    mixed, mixed_gradients = kept_bytes(build(mode, compiled, 3, lighter=1))
    light, _ = kept_by_three(lighter_mode, compiled)
    assert heavy < light or not compiled
    assert mixed - heavy == pytest.approx((light - heavy) / 3, rel=0.1)
    assert all(torch.equal(gradients[name], mixed_gradients[name]) for name in gradients)
