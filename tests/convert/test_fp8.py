"""Blocks whose products are in fp8: same parameters and names, training alone computes with codes, and a gate before it
does.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.convert.experts import stack_experts
from manyhands.convert.fp8 import (
    Fp8Linear,
    StoredFp8Linear,
    _compare_layer,
    check_fp8,
    fp8_layers,
    keep_transposed,
    quantize_frozen,
    round_to_fp8,
    set_matmuls,
    store_in_fp8,
    use_fp8,
)
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.grouped import Grouped
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.engine.native import NativeEngine
from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.families import known_modules
from manyhands.kernels.fp8.ops import multiply_groups
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from manyhands.worker import export_stages as finish
from tests.kernels.models import adapted, fp8_model, step, tiny, token_ids
from tests.keys.lab import Ran, open_lab
from tests.support.experts import expert_model
from tests.support.plans import change_plan
from tests.support.ranks import Ranks

FAMILIES = ("llama", "qwen2", "gemma3")


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return tiny(family).train()


def in_fp8(family: str, method: str, *, fused: bool = True, **more: Any) -> nn.Module:
    model = build(family)
    use_fp8(model)
    if method == "lora":
        model = adapted(model, **more)
    if fused:
        fuse_modules(model, known_modules())
    quantize_frozen(model)
    return model


def gap(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """|found - expected| / |expected| over all gradients"""
    assert found.keys() == expected.keys()
    square = sum((found[name].double() - expected[name].double()).square().sum() for name in found)
    return float((square / sum(expected[name].double().square().sum() for name in expected)).sqrt())


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_step_deviate_by_rounding_and_evaluation_does_not(family: str, method: str) -> None:
    plain = adapted(build(family)) if method == "lora" else build(family)
    model = in_fp8(family, method)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert not any(
        type(module).__name__.endswith(("Attention", "MLP"))
        for module in model.modules()
        if "Fused" not in type(module).__name__
    )
    ids = token_ids(2, 24)
    logits, expected = step(plain, ids)
    logits_fp8, found = step(model, ids)
    assert 1e-3 < gap(found, expected) < 0.25
    assert 1e-3 < float((logits_fp8 - logits).norm() / logits.norm()) < 0.15
    with torch.no_grad():
        assert torch.allclose(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits, atol=1e-5)


def kept_in_fp8(family: str, *, fused: bool = True, **more: Any) -> nn.Module:
    """The same with frozen weights kept in fp8 alone, filled as loading fills them."""
    model, weights = build(family), build(family).state_dict()
    store_in_fp8(model)
    use_fp8(model)
    for name, layer in fp8_layers(model).items():
        assert isinstance(layer, StoredFp8Linear)
        layer.fill(weights[f"{name}.weight"])
    model = adapted(model, **more)
    if fused:
        fuse_modules(model, known_modules())
    assert quantize_frozen(model) == 0
    return model


@pytest.mark.parametrize("fused, more", [(True, {}), (False, {}), (False, {"dora": True})])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_kept_in_fp8_alone_are_the_rounded_ones(family: str, fused: bool, more: dict[str, Any]) -> None:
    """Step and evaluation are those of rounded weights in the compute dtype, which take four times the bytes here."""
    rounded = build(family)
    round_to_fp8(rounded)
    use_fp8(rounded)
    rounded = adapted(rounded, **more)
    if fused:
        fuse_modules(rounded, known_modules())
    quantize_frozen(rounded)
    model, ids = kept_in_fp8(family, fused=fused, **more), token_ids(2, 24)
    for kind in ("fp8", "compute_dtype"):
        set_matmuls(model, kind)
        set_matmuls(rounded, kind)
        (logits, gradients), (expected, known) = step(model, ids), step(rounded, ids)
        assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
        assert gap(gradients, known) < 1e-5, "a row whose largest value is rounded down to 224 has half the scale"
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, rounded.eval()(input_ids=ids).logits)
    linears = [layer for layer in model.modules() if isinstance(layer, StoredFp8Linear)]
    pieces = [piece for layer in linears for piece in (layer.weight_values, layer.weight_scales)]
    storages = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
    assert sum(storages.values()) == sum(layer.out_features * (layer.in_features + 4) for layer in linears)


@pytest.mark.parametrize("fused", [True, False])
def test_the_gate_compares_weights_kept_in_fp8_alone_with_themselves(fused: bool) -> None:
    """Layers within fused modules too, whose values are parts of a group's."""
    found = gate(kept_in_fp8("llama", fused=fused))
    assert 0 < found.layer < 0.05 and found.loss < 0.02


@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}, {"dora": True}, {"target_modules": ("q_proj", "down_proj")}])
def test_layers_by_themselves_compute_in_fp8_too(more: dict[str, Any]) -> None:
    """What no fused module takes: dropout, DoRA, other families."""
    ids = token_ids(2, 24)
    found, plain = in_fp8("llama", "lora", fused=False, **more), in_fp8("llama", "lora", fused=False, **more)
    set_matmuls(plain, "compute_dtype")
    gradients = []
    for model in (found, plain):
        torch.manual_seed(3)
        gradients.append(step(model, ids)[1])
    assert 1e-3 < gap(*gradients) < 0.25


def test_fused_modules_and_layers_by_themselves_agree() -> None:
    ids = token_ids(2, 24)
    one, other = (step(in_fp8("llama", "lora", fused=fused), ids) for fused in (True, False))
    assert gap(one[1], other[1]) < 0.25 and torch.allclose(one[0], other[0], rtol=0.2, atol=0.2)


def test_layers_that_do_not_fit_stay_plain_and_are_named() -> None:
    class Block(nn.Module):
        pass

    model = build("llama")
    odd = model.model.layers[0].mlp
    odd.up_proj = nn.Linear(64, 130, bias=False).requires_grad_(False)
    swapped, left = use_fp8(model)
    assert left == ["model.layers.0.mlp.up_proj"] and len(swapped) == 7 * len(model.model.layers) - 1
    assert type(odd.up_proj) is nn.Linear and isinstance(odd.gate_proj, Fp8Linear)
    report = fuse_modules(model, known_modules())
    assert report.left["model.layers.0.mlp"] == "has layers in fp8 and others beside them"


def test_weights_are_coded_once_where_they_are_frozen() -> None:
    lora, full = in_fp8("llama", "lora"), in_fp8("llama", "full")
    sizes = sum(layer.in_features * layer.out_features for layer in fp8_layers(lora).values())
    rows = sum(layer.out_features for layer in fp8_layers(lora).values())
    assert quantize_frozen(lora) == 2 * sizes + 4 * rows
    assert quantize_frozen(full) == 0
    assert not any("quantized" in name for name in lora.state_dict())


@pytest.mark.ci
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_compiled_blocks_share_one_graph_whatever_their_number_and_the_packs_length(method: str) -> None:
    model, eager = in_fp8("llama", method), in_fp8("llama", method)
    expected = [step(eager, token_ids(1, length)) for length in (24, 40, 17)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, dynamic=True, backend="aot_eager")
    for length, (logits, gradients) in zip((24, 40, 17), expected, strict=True):
        found = step(model, token_ids(1, length))
        assert torch.allclose(found[0], logits, atol=2e-2) and gap(found[1], gradients) < 0.02
    # under adapters the first block's input wants no gradient: a kind of its own
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if method == "lora" else 1)


@pytest.mark.ci
def test_selective_recomputation_does_not_quantize_trained_weights_again() -> None:
    """The backward pass takes their scales alone, which are kept: 4 groups of weights in each of two blocks."""
    model, plain = in_fp8("llama", "full"), in_fp8("llama", "full")
    num_blocks = len(find_blocks(model))
    checkpoint_blocks(model, ["selective"] * num_blocks, compiled=True)
    torch._dynamo.reset()
    compile_blocks(model, dynamic=None, backend="aot_eager_decomp_partition")
    ids = token_ids(1, 24)
    _, found = step(model, ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, ids)
    assert sum(event.name == "manyhands::fp8_stacked" for event in profile.events()) == 4 * num_blocks
    assert gap(found, step(plain, ids)[1]) < 0.02


@pytest.mark.distributed
@pytest.mark.parametrize("method, recompute", [("full", False), ("full", True), ("lora", False)])
def test_sharded_ranks_give_the_gradients_of_one(world: Ranks, method: str, recompute: bool) -> None:
    """Weights are gathered and then quantized: the same codes."""
    model = fp8_model("qwen3", method)
    quantize_frozen(model)
    logits, expected = step(model, token_ids(2, 12))
    for found in world.run("tests.kernels.models:sharded_fp8_step", "qwen3", method, recompute, world_size=2):
        assert found["quantized_bytes"] == 0
        np.testing.assert_allclose(found["logits"], logits.numpy(), rtol=1e-4, atol=1e-4)
        assert found["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                found["gradients"][name],
                gradient.numpy(),
                rtol=0,
                atol=1e-4 * gradient.abs().max().item(),
                err_msg=name,
            )


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate(model: nn.Module, **options: Any) -> Any:
    ids = token_ids(1, 64)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    engine = NativeEngine(LossModel(model), World(0, 0, 1, torch.device("cpu")))
    engine.optimizer = torch.optim.SGD(model.parameters())
    return check_fp8(engine, model, batch, seed=0, **options)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_gate_says_how_far_loss_and_gradient_move_and_leaves_nothing(method: str) -> None:
    model = in_fp8("llama", method)
    found = gate(model)
    assert 0 < found.loss < 0.02 and 0.01 < found.gradient < 0.25 and 0.03 < found.layer < 0.05
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.in_fp8 for layer in fp8_layers(model).values())


def test_the_gate_refuses_codes_that_are_not_the_weights() -> None:
    model = in_fp8("llama", "lora")
    mlp: Any = model.get_submodule("model.layers.1.mlp")
    mlp.quantized["gate_proj"].scales.mul_(4)
    with pytest.raises(UserError, match="not accurate enough") as refused:
        gate(model)
    assert "allowed are 5%, 34% and 6.2%" in refused.value.why and "kernels.linear: compute_dtype" in refused.value.fix


@pytest.mark.parametrize("random_weights", [False, True])
def test_the_gate_refuses_what_is_no_number(random_weights: bool) -> None:
    model = in_fp8("llama", "full")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = torch.inf
    with pytest.raises(UserError, match="not accurate enough"):
        gate(model, random_weights=random_weights)


def test_the_gate_asks_nothing_of_the_gradient_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.convert.fp8.GRADIENT_LIMIT", 1e-3)
    with pytest.raises(UserError, match="not accurate enough"):
        gate(in_fp8("llama", "lora"))
    assert gate(in_fp8("llama", "lora"), random_weights=True).gradient > 1e-3
    monkeypatch.setattr("manyhands.convert.fp8.LAYER_TOLERANCE", 1e-3)
    with pytest.raises(UserError, match="not accurate enough"):
        gate(in_fp8("llama", "lora"), random_weights=True)


def test_the_gate_leaves_no_results_with_selective_checkpointing() -> None:
    """It keeps what it sees of matmuls: at 70B so many results of comparisons as no GPU holds."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(op.name())
            return op(*args, **(kwargs or {}))

    name, layer = next(iter(fp8_layers(in_fp8("llama", "lora", fused=False)).items()))
    inputs, errors = torch.randn(8, layer.in_features), {}
    with Seen():
        _compare_layer(errors, name, layer, (inputs,), inputs)
    assert Seen.names == [] and 0 < errors[name][0] < errors[name][1]


# ---- experts ---------------------------------------------------------------------------------------------------------


def mixture(*, groups: bool = True, target_modules: Any = "all-linear", **changes: Any) -> nn.Module:
    """A mixture whose experts are kept in fp8 alone, adapted unless ``target_modules`` names others."""
    model = expert_model("qwen3_moe", **changes).train()
    stack_experts(model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    store_in_fp8(model)
    use_fp8(model, groups=groups)
    for name, layer in model.named_modules():
        if isinstance(layer, StoredFp8Linear):
            layer.fill(weights[f"{name}.weight"])
    return adapted(model, target_modules=target_modules)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_experts_kept_in_fp8_multiply_in_it_while_training(targets: Any) -> None:
    """With adapters, which are computed with the gate, and without."""
    model, plain, ids = mixture(target_modules=targets), mixture(groups=False, target_modules=targets), token_ids(2, 24)
    assert sum(isinstance(layer, Grouped) for layer in fp8_layers(model).values()) == 4
    assert not any(isinstance(layer, Grouped) for layer in fp8_layers(plain).values())
    (logits, found), (expected, gradients) = step(model, ids), step(plain, ids)
    assert 1e-3 < gap(found, gradients) < 0.25 and 1e-3 < float((logits - expected).norm() / expected.norm()) < 0.15
    for kind in (model, plain):
        set_matmuls(kind, "compute_dtype")
    (logits, found), (expected, gradients) = step(model, ids), step(plain, ids)
    assert torch.equal(logits, expected) and gap(found, gradients) == 0
    set_matmuls(model, "fp8")
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_fused_experts_multiply_the_values_that_stacks_multiply(targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, one, other = token_ids(2, 24), mixture(target_modules=targets), mixture(target_modules=targets)
    logits, found = step(one, ids)
    monkeypatch.setattr("manyhands.convert.experts.can_fuse", lambda experts: False)
    expected, gradients = step(other, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert gap(found, gradients) < 0.05  # gradients of results are rounded before they are weighted, or after


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_values_kept_transposed_change_no_bit(targets: Any, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of losses and adapters; nothing is transposed any more, and the model has no other tensor to save."""
    if not fused:
        monkeypatch.setattr("manyhands.convert.experts.can_fuse", lambda experts: False)
    plain, model = mixture(target_modules=targets), mixture(target_modules=targets)
    stacks = [layer for layer in fp8_layers(model).values() if isinstance(layer, Grouped)]
    assert keep_transposed(model) == sum(stack.weight_values.numel() for stack in stacks) > 0
    for stack in stacks:
        assert torch.equal(stack.transposed_values.float().mT.flatten(0, 1), stack.weight_values.float())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    losses = train(plain, 3)
    monkeypatch.setattr("manyhands.convert.grouped.transpose_stack", None)
    assert train(model, 3) == losses and losses[2] < losses[0]
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True) if a.requires_grad
    )


def train(model: nn.Module, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = token_ids(2, 24), []
    for _ in range(num_steps):
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_run_that_keeps_transposed_values_saves_what_others_save(tmp_path: Path) -> None:
    """The plan's layout reaches the engine; losses and files are the same, and the adapter is verified."""
    expert_model("qwen3_moe").save_pretrained(tmp_path / "mixture")
    with open_lab(tmp_path) as lab:
        for path in (lab.folder / "model").glob("*token*"):
            shutil.copy(path, tmp_path / "mixture")
        keys = {"model.name": str(tmp_path / "mixture"), "kernels.linear": "fp8", "model.frozen_dtype": "fp8"}
        ran: dict[bool, Ran] = {}
        for keeps in (False, True):
            rank = lab.start(keys)
            rank.plan = change_plan(rank.plan, keeps_transposed=keeps)
            rank.build()
            stacks = [layer for layer in fp8_layers(rank.model).values() if isinstance(layer, Grouped)]
            assert {stack.transposed_values is not None for stack in stacks} == {keeps}
            lab.check(rank)
            ran[keeps] = lab.train(rank)
            finish.export(rank.rank, rank.data, rank.built, rank.state)
        plain, kept = ran[False], ran[True]
        assert kept.losses == plain.losses
        assert list_tensors(kept.folder) == list_tensors(plain.folder)
        for name, tensor in plain.adapter().items():
            assert torch.equal(kept.adapter()[name], tensor)
        reference = Reference.read(kept.folder / "verify" / "adapter.json")
        assert verify(kept.folder / "adapter", reference, base=tmp_path / "mixture").findings == []


def list_tensors(folder: Path) -> dict[str, Any]:
    """Names and shapes in all files of weights of a run."""
    return {
        str(path.relative_to(folder)): {name: tensor.shape for name, tensor in load_file(path).items()}
        for path in sorted(folder.rglob("*.safetensors"))
    }


def test_the_gate_compares_products_of_experts() -> None:
    model = mixture()
    found = gate(model)
    assert 0 < found.layer < 0.05 and found.loss < 0.02
    assert all(layer.in_fp8 and "observe" not in vars(layer) for layer in fp8_layers(model).values())


def test_the_gate_refuses_scales_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(a: Any, a_scales: Any, b: Any, b_scales: torch.Tensor, *others: Any) -> torch.Tensor:
        return multiply_groups(a, a_scales, b, b_scales.roll(1, 0) * 2, *others)

    monkeypatch.setattr("manyhands.convert.grouped.multiply_groups", shifted)
    with pytest.raises(UserError, match="not accurate enough") as refused:
        gate(mixture(), random_weights=True)
    assert ".experts." in refused.value.why


def test_experts_whose_sides_do_not_fit_stay_in_the_compute_dtype() -> None:
    """Of 40 values: gate and up are 80 rows, which fit."""
    model = mixture(moe_intermediate_size=40)
    for name, layer in model.named_modules():
        if isinstance(layer, Grouped):
            assert layer.in_fp8 == isinstance(layer, StoredFp8Linear) == name.endswith("gate_up_proj")
    assert all(gradient.isfinite().all() for gradient in step(model, token_ids(2, 24))[1].values())


@pytest.mark.ci
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_compiled_block_of_experts_in_fp8_has_one_graph(keeps: bool, targets: Any) -> None:
    model, eager = mixture(target_modules=targets), mixture(target_modules=targets)
    if keeps:
        keep_transposed(model)
    expected = [step(eager, token_ids(1, 24, seed=seed)) for seed in range(3)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, dynamic=True, backend="aot_eager")
    for seed, (logits, gradients) in enumerate(expected):
        found = step(model, token_ids(1, 24, seed=seed))
        assert torch.allclose(found[0], logits, atol=2e-2) and gap(found[1], gradients) < 0.02
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


# ---- training --------------------------------------------------------------------------------------------------------


def rows_of_a_chain(draw: torch.Generator) -> torch.Tensor:
    """Tokens that follow from the one before every other time, and are any token else: there is a loss that nobody goes
    below.
    """
    ids = torch.randint(0, 64, (8, 48), generator=draw)
    for position in range(1, 48):
        follows = torch.rand(8, generator=draw) < 0.5
        ids[:, position] = torch.where(follows, (5 * ids[:, position - 1] + 3) % 64, ids[:, position])
    return ids


@pytest.mark.ci
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_eighty_steps_end_within_one_percent_of_plain_ones(method: str) -> None:
    ends = {}
    for kind in ("compute_dtype", "fp8"):
        model = in_fp8("llama", method, rank=16)
        set_matmuls(model, kind)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        draw, losses = torch.Generator().manual_seed(4), []
        for _ in range(80):
            ids = rows_of_a_chain(draw)
            loss = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends[kind] = sum(losses[-10:]) / 10
        assert ends[kind] < 0.9 * losses[0]
    assert ends["fp8"] == pytest.approx(ends["compute_dtype"], rel=0.01)
