"""A model whose experts are stacks computes what transformers' own loop over experts does, in every family."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from manyhands import families
from manyhands.config.schema import MethodSection
from manyhands.convert.adapter import read_adapter
from manyhands.convert.experts import stack_experts
from manyhands.convert.fused_experts import can_fuse
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.grouped import GroupedLinear
from manyhands.convert.lora import adapted_layers, apply_lora
from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.export.by_expert import split_experts
from manyhands.export.files import write_tensors
from manyhands.export.model import export_model
from manyhands.facts.adapter import read_adapter_config
from manyhands.facts.experts import stack_experts as stack_headers
from manyhands.facts.model import read_model_facts
from manyhands.facts.model_config import check_supported
from manyhands.facts.safetensors import TensorHeader
from manyhands.infer.load import put_adapter
from manyhands.kernels.grouped import gradients_in_one_launch, group_gradients, multiply_groups, multiply_in_one_launch
from manyhands.model.attention import IMPLEMENTATIONS, VARLEN, attention_kwargs, plain_attention, register_attention
from manyhands.model.checks import check_loss, check_packing, pack_documents
from manyhands.model.loss import LossModel
from manyhands.model.structure import auto_class_of, find_experts
from manyhands.model.weights import StackedRows, stacked_layers, stored_form
from manyhands.planner.memory.input import count_adapter_parameters
from tests.support.building import load_model
from tests.support.experts import AROUND_IMAGES, HYBRIDS, OWN, expert_model
from tests.support.tiny import tiny_plan, tiny_run

TYPES = [
    model_type
    for family in families.FAMILIES
    if family.experts is not None
    for model_type in family.model_types
    if model_type in OWN or model_type not in AROUND_IMAGES.values()
]
NO_GATE = "nemotron_h"
PLAIN = (
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    *HYBRIDS,
    "gpt_oss",
    "gemma4_text",
    "mistral4",
)
SINKS = [model_type for family in families.FAMILIES if family.sinks for model_type in family.model_types]
METHOD = MethodSection(name="lora", rank=4, alpha=8.0)
CPU = torch.device("cpu")


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def as_module_has(model: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """The parameter ``name`` of transformers' experts, of a stack's (g o, i)."""
    stacked = rows.unflatten(0, (len(model.get_parameter(name)), -1))
    return stacked.mT if is_transposed(model, name) else stacked


def is_transposed(model: Any, name: str) -> bool:
    return getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", True)  # Llama 4's does not say so


@pytest.mark.parametrize("model_type", [*TYPES, *AROUND_IMAGES])
def test_loss_and_gradients_are_those_of_the_loop(model_type: str) -> None:
    """In full and with adapters, of which the loop has the products added to its weights."""
    loop = expert_model(model_type)
    model = copy.deepcopy(loop)
    names = stack_experts(model)
    expected, found = loss_of(loop), loss_of(model)
    assert abs(found.item() / expected.item() - 1) < 1e-6
    expected.backward()
    found.backward()
    stacks, gradients = stacked_layers(model), {n: p.grad for n, p in loop.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        own = model.get_parameter(f"{name}.weight" if name in stacks else name).grad
        own = as_module_has(loop, name, own) if name in stacks else own
        # a decay's gradient is a small difference of large sums over all tokens, in float32 whatever the model's dtype
        assert distance(own, gradient) < (1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5), name
    model.zero_grad()
    loop.zero_grad()
    apply_lora(model, METHOD, seed=0)
    fuse_modules(model, families.known_modules())
    adapted = {name: layer for name, layer in adapted_layers(model).items() if name in names}
    assert adapted.keys() == set(names)  # all-linear reaches experts, and no router
    assert all(can_fuse(experts) == experts.has_gate for experts in find_experts(model).values())
    assert not any(name.endswith((".gate", "router.layer", "shared_expert_gate")) for name in adapted_layers(model))
    with torch.no_grad():
        for name, layer in adapted_layers(model).items():
            layer.lora_B.weight.normal_(std=0.1)
            merged = layer.merge(layer.weight, layer.lora_A.weight, layer.lora_B.weight)
            weight = loop.get_parameter(name if name in stacks else f"{name}.weight")
            weight.copy_(as_module_has(loop, name, merged) if name in stacks else merged)
    expected, found = loss_of(loop), loss_of(model)
    assert abs(found.item() / expected.item() - 1) < 1e-6
    expected.backward()
    found.backward()
    for name, layer in adapted.items():
        by_group = loop.get_parameter(name).grad
        by_group = by_group.mT if is_transposed(loop, name) else by_group
        a, b = (x.weight.unflatten(0, (layer.num_groups, -1)) for x in (layer.lora_A, layer.lora_B))
        for x, wanted in ((layer.lora_A, b.mT @ by_group), (layer.lora_B, by_group @ a.mT)):
            assert distance(x.weight.grad, layer.scaling * wanted.flatten(0, 1)) < 1e-5, name


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_that_patterns_choose_have_the_gradients_of_full_training(tmp_path: Path, model_type: str) -> None:
    source = write(tmp_path / "source", model_type)
    full, chosen = (
        load_model(tiny_plan(source), tiny_run(source, method, **keys))
        for method, keys in (("full", {}), ("patterns", {"train": ["experts"]}))
    )
    for model in (full, chosen):
        loss_of(model).backward()
    gradients = {name: p.grad for name, p in chosen.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, _ in full.named_parameters() if ".experts." in name}
    for name, gradient in gradients.items():
        assert distance(gradient, full.get_parameter(name).grad) < 1e-6, name


@pytest.mark.parametrize("model_type", PLAIN)
def test_packed_documents_are_as_if_alone(model_type: str) -> None:
    model = expert_model(model_type)
    stack_experts(model)
    register_attention()
    loss_model = LossModel(model)
    if plain_attention(model.config) != "sdpa":
        model.set_attn_implementation(IMPLEMENTATIONS["blockwise"])
    assert check_loss(loss_model, loss_model, CPU) < 1e-4
    assert check_packing(loss_model, loss_model, CPU) < 1e-3


@pytest.mark.parametrize("model_type", SINKS)
def test_packed_documents_give_sinks_and_all_else_the_gradients_of_eager_attention(model_type: str) -> None:
    """A document is longer than the window."""
    eager = expert_model(model_type)
    model = copy.deepcopy(eager)
    stack_experts(model)
    register_attention()
    model.set_attn_implementation(IMPLEMENTATIONS["blockwise"])
    ids = [torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n)) for n in (30, 5, 17)]
    expected = sum(eager(input_ids=x, use_cache=False).logits.square().mean(-1).sum() for x in ids)
    batch = pack_documents(ids)
    found = (
        model(
            input_ids=batch["input_ids"], use_cache=False, **attention_kwargs(batch, model.config._attn_implementation)
        )
        .logits.square()
        .mean(-1)
        .sum()
    )
    assert abs(found.item() / expected.item() - 1) < 1e-6
    expected.backward()
    found.backward()
    stacks = stacked_layers(model)
    sinks = [name for name, _ in eager.named_parameters() if name.endswith("sinks")]
    assert sinks
    for name, parameter in eager.named_parameters():
        own = model.get_parameter(f"{name}.weight" if name in stacks else name).grad
        assert distance(stored_form(stacks[name], own) if name in stacks else own, parameter.grad) < 1e-5, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gpt_oss", {}), ("mimo_v2_flash", {"head_dim": 32}), ("deepseek_v3", {}), ("granitemoe_swa", {})],
)
def test_varlen_on_a_gpu_has_the_loss_and_gradients_of_eager_attention(
    model_type: str, changes: dict[str, Any]
) -> None:
    """Values that are narrower than keys, and sinks, too."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    register_attention()
    ids = [torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n)).cuda() for n in (300, 5, 117)]
    batch = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in pack_documents(ids).items()}
    runs = []
    for implementation, dtype in (("eager", torch.float64), ("eager", torch.bfloat16), (VARLEN, torch.bfloat16)):
        model = expert_model(model_type, **changes).to("cuda", dtype)
        model.set_attn_implementation(implementation)
        if implementation == "eager":
            logits = torch.cat([model(input_ids=x, use_cache=False).logits for x in ids], 1)
        else:
            kwargs = attention_kwargs(batch, implementation)
            logits = model(input_ids=batch["input_ids"], use_cache=False, **kwargs).logits
        logits.double().square().mean().backward()
        attention = [p for n, p in model.named_parameters() if "self_attn" in n]
        runs.append([logits.detach(), *(p.grad for p in attention)])
    for exact, usual, found in zip(*runs, strict=True):
        allowed = distance(usual.double(), exact)
        assert distance(found.double(), exact) < 1.5 * allowed + 1e-2


def write(folder: Path, model_type: str, **options: Any) -> Path:
    expert_model(model_type, eager=False).bfloat16().save_pretrained(folder, **options)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", [*PLAIN, "llama4_text"])
def test_a_saved_model_is_its_source_and_its_facts_count_it(tmp_path: Path, model_type: str, fused: bool) -> None:
    source = write(tmp_path / "source", model_type, **({"save_original_format": False} if fused else {}))
    before = contents(source)
    facts = read_model_facts(source, "tiny", "pretrained")
    parameters = {name: tensor for name, tensor in before.items() if "correction_bias" not in name}
    assert facts.num_parameters == sum(tensor.numel() for tensor in before.values())
    active = 1 if model_type == "llama4_text" else 2  # of 8, in each block that has them
    has_gate = model_type != NO_GATE
    idle = (8 - active) * (2 + has_gate) * 48 * 64 * (1 if model_type in ("jamba", NO_GATE) else 2)
    assert facts.num_active_parameters == facts.num_parameters - idle
    assert {shape[2:] for shape in facts.block_linear_shapes.values()} == {(1, 1), (8, active)} and parameters
    for init in ("pretrained", "random"):
        assert read_model_facts(source, "tiny", init).block_linear_shapes == facts.block_linear_shapes
    model = load_model(tiny_plan(source), tiny_run(source))
    for index in range(2):
        linears = {
            name: tuple(layer.weight.shape)
            for name, layer in model.model.layers[index].named_modules()
            if name in facts.linears_of(index)
        }
        assert linears == {name: shape[:2] for name, shape in facts.linears_of(index).items()}
    export_model(tmp_path / "saved", model, source, "bfloat16", rank=0)
    after = contents(tmp_path / "saved")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    ("model_type", "transposed"),
    [
        ("qwen3_vl_moe", True),
        ("qwen3_vl_moe", False),
        ("gemma4", False),
        ("llama4", True),
        ("mistral3", False),
        ("kimi_k25", False),
    ],
    ids=[
        "as published",
        "as transformers saves it",
        "beside a dense MLP",
        "in a text model with a head",
        "latent",
        "as single experts",
    ],
)
def test_stacks_are_read_and_saved_in_either_order_of_axes(tmp_path: Path, model_type: str, transposed: bool) -> None:
    from safetensors.torch import save_file

    source = write(tmp_path / "source", model_type)
    before, logits = contents(source), []
    stacks = [name for name, tensor in before.items() if ".experts." in name and tensor.dim() == 3]
    if transposed and model_type != "llama4":  # whose own order it is
        before |= {name: before[name].mT.contiguous() for name in stacks}
        save_file(before, source / "model.safetensors", metadata={"format": "pt"})
    expected = set() if model_type == "kimi_k25" else {transposed}  # whose files hold one tensor an expert
    assert {before[name].shape[1] == 64 for name in stacks if "gate_up" in name} == expected
    facts = read_model_facts(source, "tiny", "pretrained")
    parent = {"gemma4": "", "llama4": "feed_forward."}.get(model_type, "mlp.")
    names = [f"{parent}experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert [facts.block_linear_shapes[name][:2] for name in names] == [
        (8 * 2 * 48, 64),
        (8 * 64, 48),
    ]
    model = load_model(tiny_plan(source), tiny_run(source))
    own = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32)
    for each in (model, own):
        logits.append(each(input_ids=torch.arange(12)[None], use_cache=False).logits)
    torch.testing.assert_close(logits[0].float(), logits[1], rtol=1e-4, atol=1e-4)
    export_model(tmp_path / "saved", model, source, "bfloat16", rank=0)
    after = contents(tmp_path / "saved")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_model_from_new_weights_is_saved_by_experts(tmp_path: Path, model_type: str) -> None:
    source = write(tmp_path / "source", model_type)
    expected = {name: tensor.shape for name, tensor in contents(source).items()}
    (source / "model.safetensors").unlink()
    config = tiny_run(source)
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})
    export_model(tmp_path / "saved", load_model(tiny_plan(source), config), source, "bfloat16", rank=0)
    assert {name: tensor.shape for name, tensor in contents(tmp_path / "saved").items()} == expected


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "gemma4_text", "llama4_text", "mistral4"]
)
def test_adapters_are_merged_expert_by_expert(tmp_path: Path, model_type: str, method: str) -> None:
    source = write(tmp_path / "source", model_type)
    model: Any = load_model(tiny_plan(source), tiny_run(source, method))
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.1)
    export_model(tmp_path / "saved", model, source, "float32", rank=0, merge=True)
    opened = auto_class_of(tmp_path / "saved").from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, layer in adapted_layers(model).items():
        if name in stacked_layers(model):
            saved_stack = opened.get_parameter(name).mT if layer.stored_transposed else opened.get_parameter(name)
            a, b = layer.lora_A.weight.double(), layer.lora_B.weight.double()
            groups = zip(*(x.unflatten(0, (8, -1)) for x in (layer.weight.double(), a, b)), strict=True)
            for weight, group_a, group_b, saved in zip(*zip(*groups, strict=True), saved_stack, strict=True):
                assert distance(saved, weight + layer.scaling * group_b @ group_a) < 1e-6


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_experts_in_nf4_are_those_of_bitsandbytes(tmp_path: Path, model_type: str, double_quant: bool) -> None:
    """Codes and maxima of each expert alone, and the second level of a block's stack as one, byte for byte, whether
    files hold one tensor an expert or all in one.
    """
    functional = pytest.importorskip("bitsandbytes").functional
    source = write(tmp_path / "source", model_type, save_original_format=False)
    options = {"quant_type": "nf4", "blocksize": 64}
    for folder in (source, write(tmp_path / "by expert", model_type)):
        config = tiny_run(folder, "qlora", double_quant=double_quant)
        model: Any = load_model(tiny_plan(folder), config)
        plain: Any = load_model(tiny_plan(source), tiny_run(source))
        for name, stack in stacked_layers(model).items():
            codes, statistics = (piece.view(torch.uint8) for piece in (stack.weight_codes, stack.weight_statistics))
            weight = plain.get_submodule(name).weight.detach().to(stack.weight_dtype)
            parts = [
                functional.quantize_4bit(expert.contiguous(), **options) for expert in weight.unflatten(0, (8, -1))
            ]
            packed = torch.cat([part.flatten() for part, _ in parts])
            assert torch.equal(codes.flatten()[: len(packed)], packed)
            maxima = torch.cat([state.absmax for _, state in parts])
            if double_quant:
                _, whole = functional.quantize_4bit(weight, compress_statistics=True, **options)
                assert torch.equal(statistics[:, :256].flatten()[: len(maxima)], whole.absmax)
                assert torch.equal(stack.weight_statistics.view(torch.float32)[:, -2], whole.state2.absmax)
            else:
                assert torch.equal(statistics.view(torch.float32).flatten()[: len(maxima)], maxima)


def test_rows_of_a_stack_are_read_as_a_tensor_is() -> None:
    plain, turned = (GroupedLinear(3, 5, 4, stored_transposed=turned) for turned in (False, True))
    for stack in (plain, turned):
        rows = StackedRows.of_stored(stack, stored_form(stack, stack.weight.detach()))
        for key in (slice(None), slice(3, 9), slice(4, 4), slice(12, 12), (slice(2, 11), slice(1, 4))):
            assert torch.equal(rows[key], stack.weight.detach()[key])


@pytest.mark.parametrize(("size", "inner"), [(16, 32), (4, 20)])
def test_one_launch_is_the_loop(size: int, inner: int) -> None:
    """What GPUs compute, here on the CPU; sides that are no multiples of 16 bytes are padded."""
    draw = torch.Generator().manual_seed(0)
    ends = torch.tensor([5, 5, 12, 20], dtype=torch.int32)
    x, weight, gradient = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((20, inner), (4, size, inner), (20, size))
    )
    torch.testing.assert_close(multiply_in_one_launch(x, weight, ends), multiply_groups(x, weight, ends))
    back = multiply_in_one_launch(gradient, weight.mT, ends)
    torch.testing.assert_close(back, multiply_groups(gradient, weight.mT, ends))
    wanted = group_gradients(gradient, x, ends)
    torch.testing.assert_close(gradients_in_one_launch(gradient, x, ends), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_compiled_block_has_one_graph_for_all_loads(method: str) -> None:
    model = expert_model("qwen3_moe")
    stack_experts(model)
    if method == "lora":
        apply_lora(model, METHOD, seed=0)
    plain, block = copy.deepcopy(model.model.layers[0].mlp), model.model.layers[0].mlp
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(seed)).cumsum(1)
            one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            (compiled(one) ** 2).sum().backward()
            (plain(other) ** 2).sum().backward()
            assert distance(one.grad, other.grad) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("zaya", "not been tried in packs"),
        ("openai_privacy_filter", "both directions"),
        ("glm_moe_dsa", "chooses tokens"),
        ("new", "not been tried"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(model_type: str, why: str) -> None:
    with pytest.raises(UserError, match=model_type) as caught:
        check_supported({"num_experts": 8, "model_type": model_type}, Path("config.json"))
    assert why in caught.value.why


def test_headers_are_counted_as_stacks() -> None:
    experts = {
        f"layers.0.block_sparse_moe.experts.{number}.{name}.weight": TensorHeader("BF16", shape)
        for number in range(11)
        for name, shape in {"w1": (6, 4), "w2": (4, 6), "w3": (6, 4)}.items()
    }
    found, groups = stack_headers(experts | {"layers.0.block_sparse_moe.gate.weight": TensorHeader("BF16", (11, 4))}, 4)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "layers.0.mlp.gate.weight": (11, 4),
        "layers.0.mlp.experts.gate_up_proj.weight": (132, 4),
        "layers.0.mlp.experts.down_proj.weight": (44, 6),
    }
    assert groups == dict.fromkeys([name for name in found if "experts" in name], 11)


TARGETS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{model_type: (model_type, "all-linear", {}) for model_type in (*PLAIN, "llama4_text") if model_type != NO_GATE},
    "without a gate": (NO_GATE, ("in_proj", "q_proj", "up_proj", "down_proj"), {}),  # PEFT refuses Mamba's out_proj
    "a dense block first": ("deepseek_v3", "all-linear", {"first_k_dense_replace": 1}),
    "between narrow layers": (NO_GATE, ("up_proj", "down_proj", "fc1_latent_proj"), {"moe_latent_size": 32}),
    "around images": ("gemma4", "all-linear", {}),
    "around images, in a text model with a head": ("llama4", "all-linear", {}),
    "around images, beside shared experts": ("mistral3", "all-linear", {}),
    "around images, one tensor an expert": ("kimi_k25", "all-linear", {}),
    "attention and shared experts": ("deepseek_v3", ("q_b_proj", "shared_experts.up_proj"), {}),
    "a shared expert's gate": ("qwen2_moe", ("shared_expert_gate", "experts.down_proj"), {}),
    "a gate of a hybrid, no experts": ("qwen3_next", ("shared_expert_gate", "in_proj_qkvz"), {}),
    "a gate and all of an MLP": ("qwen3_5_moe_text", ("re:.*mlp.*",), {}),
    "the first projection alone": ("qwen3_moe", ("gate_up_proj",), {}),
    "the last projection of one block": ("qwen3_moe", ("layers.1.mlp.experts.down_proj", "v_proj"), {}),
}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("case", TARGETS)
def test_peft_opens_adapters_of_experts_with_the_same_logits(tmp_path: Path, case: str, rslora: bool) -> None:
    model_type, targets, changes = TARGETS[case]
    method = MethodSection(name="lora", rank=4, alpha=8.0, rslora=rslora, target_modules=targets, dropout=0.1)
    ids = torch.arange(40)[None] % 256

    def adapt() -> Any:
        model = expert_model(model_type, **changes)
        stack_experts(model)
        apply_lora(model, method, seed=0)
        return model.eval()

    ours, draw = adapt(), torch.Generator().manual_seed(0)  # other draws may come near a tie of a router
    with torch.no_grad():
        for layer in adapted_layers(ours).values():
            layer.lora_B.weight.normal_(std=0.2, generator=draw)
        export_adapter(tmp_path / "adapter", ours, method, "", rank=0)
        logits, base = ours(ids).logits, expert_model(model_type, **changes).eval()(ids).logits
        assert distance(base, logits) > 0.05
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # missing and unexpected keys are warnings
            theirs = PeftModel.from_pretrained(expert_model(model_type, **changes), str(tmp_path / "adapter")).eval()
        assert distance(theirs(ids).logits, logits) < 1e-5
        again = adapt()
        read_adapter(again, tmp_path / "adapter")
        assert torch.equal(again(ids).logits, logits)
        opened = expert_model(model_type, **changes).eval()
        put_adapter(opened, tmp_path / "adapter")
        assert distance(opened.eval()(ids).logits, logits) < 1e-6


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_the_gate_of_a_shared_expert_is_adapted_by_name_alone(tmp_path: Path, model_type: str, method: str) -> None:
    """The plan counts its factors, and QLoRA leaves its weight as it is."""
    source = write(tmp_path / "source", model_type)
    facts = read_model_facts(source, "", "pretrained")
    for targets in ("all-linear", ["shared_expert_gate"], ["re:.*"]):
        config = tiny_run(source, method, target_modules=targets)
        model: Any = load_model(tiny_plan(source), config)
        gates = {name: layer for name, layer in adapted_layers(model).items() if name.endswith("shared_expert_gate")}
        assert len(gates) == (0 if targets == "all-linear" else len(find_experts(model)))
        assert all(layer.weight.shape == (1, facts.hidden_size) for layer in gates.values())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert trained == count_adapter_parameters(config, facts)


@pytest.mark.parametrize(
    ("model_type", "saved"),
    [("deepseek_v3", "mlp.gate"), ("qwen2_moe", "self_attn"), ("gpt_oss", "router"), ("granitemoehybrid", "mamba")],
)
def test_the_plan_counts_all_weights_of_modules_to_save(tmp_path: Path, model_type: str, saved: str) -> None:
    source = write(tmp_path / "source", model_type)
    config = tiny_run(source, "lora", modules_to_save=[saved, "norm", "lm_head"])
    model: Any = load_model(tiny_plan(source), config)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == count_adapter_parameters(config, read_model_facts(source, "", "pretrained"))


def test_an_adapter_of_an_older_layout_is_refused(tmp_path: Path) -> None:
    fields = {"peft_type": "LORA", "target_parameters": ["experts.down_proj"]}
    for version in ({}, {"peft_version": "0.18.1"}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields | version))
        with pytest.raises(UserError, match="layout of this adapter's experts"):
            read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("qwen3_moe", "all-linear"),
        ("mixtral", "all-linear"),
        ("qwen3_moe", ("q_proj", "experts.gate_up_proj")),
        ("olmoe", ("layers.1.mlp.experts.down_proj", "v_proj")),
    ],
)
def test_an_adapter_by_expert_is_the_same(tmp_path: Path, model_type: str, targets: Any) -> None:
    """PEFT 0.21 reads single experts of these types, too. Two experts that change places are seen."""
    source = write(tmp_path / "source", model_type)
    method = MethodSection(name="lora", rank=4, alpha=8.0, target_modules=targets)
    ours: Any = load_model(tiny_plan(source), tiny_run(source, "lora", target_modules=targets))
    ids = torch.arange(40)[None] % 256
    with torch.no_grad():
        for layer in adapted_layers(ours).values():
            layer.lora_B.weight.normal_(std=0.2)
        export_adapter(tmp_path / "adapter", ours, method, "", rank=0)
    said = split_experts(tmp_path / "adapter", tmp_path / "single", source)
    assert float(said.rpartition(" ")[2]) < 1e-12
    tensors = contents(tmp_path / "single")
    assert any(".experts.7." in name for name in tensors) and not any("base_layer" in name for name in tensors)
    if targets == "all-linear":
        shutil.copytree(tmp_path / "single", tmp_path / "wrong")
        exchange = str.maketrans("67", "76")
        swapped = {name.translate(exchange) if "lora_B" in name else name: x for name, x in tensors.items()}
        write_tensors(tmp_path / "wrong" / "adapter_model.safetensors", swapped)
        logits = []
        for folder in ("adapter", "single", "wrong"):
            base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            logits.append(PeftModel.from_pretrained(base, str(tmp_path / folder)).eval()(ids).logits)
        assert distance(logits[1], logits[0]) < 1e-5 < 1e-3 < distance(logits[2], logits[0])
    with pytest.raises(UserError, match="no factors of experts"):
        split_experts(tmp_path / "single", tmp_path / "again", source)
    with pytest.raises(UserError, match="has factors of single experts"):
        put_adapter(load_model(tiny_plan(source), tiny_run(source, "full")), tmp_path / "single")


def test_an_adapter_by_expert_of_files_with_other_names_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", NO_GATE)
    targets = ["up_proj", "down_proj"]
    ours: Any = load_model(tiny_plan(source), tiny_run(source, "lora", target_modules=targets))
    method = MethodSection(name="lora", rank=4, alpha=8.0, target_modules=targets)
    export_adapter(tmp_path / "adapter", ours, method, "", rank=0)
    with pytest.raises(UserError, match="name its experts differently from the model") as caught:
        split_experts(tmp_path / "adapter", tmp_path / "single", source)
    assert "model.layers.1.mixer.experts is backbone.layers.1.mixer.experts there" in caught.value.why


def test_a_base_that_holds_no_single_experts_has_no_adapter_of_them(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "qwen3_moe", save_original_format=False)
    model: Any = load_model(tiny_plan(source), tiny_run(source, "lora"))
    with torch.no_grad():
        export_adapter(tmp_path / "adapter", model, METHOD, "", rank=0)
    with pytest.raises(UserError, match="hold no experts as separate tensors"):
        split_experts(tmp_path / "adapter", tmp_path / "single", source)
