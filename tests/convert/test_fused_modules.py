"""Fused attention and MLP modules against the families' own, alone and in training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.convert.fused_modules import FusedAttention, FusedMlp, fuse_modules
from manyhands.convert.lora import LoraLinear, adapted_layers, without_adapters
from manyhands.families import known_modules
from manyhands.model.structure import find_blocks
from tests.kernels.models import adapted, step, tiny, token_ids
from tests.support.multimodal import write_tiny_multimodal
from tests.support.ranks import Ranks

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3", "olmo2"),
    *("granite", "smollm3", "cohere", "phi3", "glm4"),
)
AROUND_IMAGES = ("gemma3", "llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl")


def pair(family: str, dtype: str = "float32", **method: Any) -> tuple[Any, Any]:
    """A model with adapters, and the same fused."""
    plain = adapted(tiny(family, dtype), **method)
    fused = copy.deepcopy(plain)
    fuse_modules(fused, known_modules())
    return plain, fused


def worst_gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Worst deviation of a gradient, relative to it; queries and keys of a single token have none but rounding."""
    assert found.keys() == expected.keys()
    least = 1e-6 * max(float(wanted.norm()) for wanted in expected.values())
    return max(
        float((found[name] - wanted).norm()) / max(float(wanted.norm()), least) for name, wanted in expected.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2, 13), (1, 1), (3, 9)])
def test_model_gives_the_same_logits_and_gradients(family: str, shape: tuple[int, int]) -> None:
    plain, fused = pair(family, "float64")
    logits, gradients = step(plain, token_ids(*shape))
    fused_logits, fused_gradients = step(fused, token_ids(*shape))
    # rotary tables and norms compute in float32 in any model
    torch.testing.assert_close(fused_logits, logits, rtol=1e-6, atol=1e-6)
    assert worst_gap(fused_gradients, gradients) < 1e-6


class Calls(TorchDispatchMode):
    """The operators that run, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((str(function), [one.shape for one in args if isinstance(one, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_its_adapters_off_runs_the_kernels_of_the_adapted_one(family: str) -> None:
    """Preference losses compare the two: other kernels would round otherwise, which is noise in every reward."""
    _, fused = pair(family, "bfloat16")
    layers, ids = tuple(adapted_layers(fused).values()), token_ids(2, 13)
    for layer in layers:
        nn.init.zeros_(layer.lora_B.weight)
    with torch.no_grad(), Calls() as adapted_calls:
        adapted_logits = fused(ids).logits
    nn.init.ones_(layers[0].lora_B.weight)
    assert not torch.equal(fused(ids).logits, adapted_logits)
    with torch.no_grad(), without_adapters(layers), Calls() as calls:
        logits = fused(ids).logits
    assert torch.equal(logits, adapted_logits)
    assert calls.found == adapted_calls.found


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_but_the_code_stays(family: str) -> None:
    plain, fused = pair(family)
    report = fuse_modules(copy.deepcopy(plain), known_modules())
    num_blocks = len(find_blocks(plain))
    assert len(report.fused) == 2 * num_blocks and not report.left
    assert str(report).startswith(f"fused: {num_blocks} ")
    assert [(n, p.shape, p.requires_grad) for n, p in plain.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in fused.named_parameters()
    ]
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert adapted_layers(plain).keys() == adapted_layers(fused).keys()
    assert not fused.eval().model.layers[0].mlp.training


@pytest.mark.parametrize("family", FAMILIES)
def test_single_modules_on_packed_and_empty_rows(family: str) -> None:
    plain, fused = pair(family)
    own, ours = plain.model.layers[0].mlp, fused.model.layers[0].mlp
    assert isinstance(ours, FusedMlp) and isinstance(fused.model.layers[0].self_attn, FusedAttention)
    for shape in [(1, 1, 64), (2, 0, 64), (5, 3, 64)]:
        x = torch.randn(shape)
        torch.testing.assert_close(ours(x), own(x), rtol=1e-5, atol=1e-6)
    ids, positions = token_ids(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    outputs = [model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in (plain, fused)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_merged_layers_in_four_bits_or_fp8_are_left() -> None:
    """Their weights do not stand in one piece that could be halved."""
    from manyhands.convert.fp8 import use_fp8

    model = tiny("phi3").train()
    use_fp8(model)
    report = fuse_modules(adapted(model), known_modules())
    assert set(report.left.values()) == {"qkv_proj is in fp8", "gate_up_proj is in fp8"} and not report.fused


@pytest.mark.parametrize("family", AROUND_IMAGES)
def test_the_text_of_models_of_images_fuses_wholly(family: str, tmp_path: Path) -> None:
    """Positions of three axes among them; the towers' layers hold no adapters here."""
    from transformers import AutoModelForMultimodalLM

    folder = write_tiny_multimodal(tmp_path / "model", family=family)
    plain = adapted(AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float64).eval())
    fused = copy.deepcopy(plain)
    report = fuse_modules(fused, known_modules())
    assert len(report.fused) == 2 * len(find_blocks(plain)) and not report.left
    ids = token_ids(2, 13) % 200  # no placeholder of an image
    logits, gradients = step(plain, ids)
    fused_logits, fused_gradients = step(fused, ids)
    torch.testing.assert_close(fused_logits, logits, rtol=1e-6, atol=1e-6)
    assert worst_gap(fused_gradients, gradients) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_with_a_cache_is_the_same(family: str) -> None:
    found = []
    for model in pair(family):
        found.append(
            model.eval().generate(
                token_ids(1, 7), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        )
    assert torch.equal(*found)


def test_partly_adapted_modules() -> None:
    plain, fused = pair("llama", target_modules=("q_proj", "v_proj"))
    assert isinstance(fused.model.layers[0].self_attn, FusedAttention) and not isinstance(
        fused.model.layers[0].mlp, FusedMlp
    )
    assert worst_gap(step(fused, token_ids(2, 8))[1], step(plain, token_ids(2, 8))[1]) < 1e-5


@pytest.mark.parametrize(
    "family, method, reason",
    [
        ("llama", {"dropout": 0.1}, "q_proj has dropout"),
        ("llama", {"dora": True}, "q_proj has parameters of another method (lora_magnitude_vector)"),
        ("starcoder2", {}, "no fused form of Starcoder2"),
    ],
)
def test_what_does_not_fit_is_left_and_said(family: str, method: dict[str, Any], reason: str) -> None:
    model = adapted(tiny(family), **method)
    kinds = [type(module) for module in model.modules()]
    report = fuse_modules(model, known_modules())
    assert not report.fused and len(report.left) == 2 * len(find_blocks(model))
    assert any(text.startswith(reason) for text in report.left.values())
    assert "generic path" in str(report) and [type(module) for module in model.modules()] == kinds


def test_hooks_and_trained_weights_are_left() -> None:
    model = adapted(tiny("llama"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    model.model.layers[1].self_attn.o_proj.weight.requires_grad_()
    report = fuse_modules(model, known_modules())
    assert report.left == {
        "model.layers.0.mlp": "up_proj has hooks",
        "model.layers.1.self_attn": "o_proj has trained weights of its own",
    }


@pytest.mark.ci
@pytest.mark.parametrize("activation_checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_blocks_share_graphs_as_before(activation_checkpointing: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    from manyhands.engine.activations import checkpoint_blocks
    from manyhands.engine.apply import compile_blocks

    plain, fused = pair("llama")
    num_graphs = []
    for model in (plain, fused):
        torch._dynamo.reset()
        counters.clear()
        if activation_checkpointing:
            checkpoint_blocks(model.train(), ("full",) * len(find_blocks(model)), compiled=False)
        counter = CompileCounterWithBackend("aot_eager")
        compile_blocks(model, backend=counter)
        outcome = step(model, token_ids(2, 12))
        num_graphs.append(counter.frame_count)
        assert not counters["graph_break"]
    assert num_graphs[1] <= num_graphs[0]
    assert worst_gap(outcome[1], step(pair("llama")[0], token_ids(2, 12))[1]) < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family, activation_checkpointing, compiled",
    [
        ("qwen3", False, False),
        ("qwen3", True, False),
        pytest.param("qwen3", False, True, marks=pytest.mark.ci),
        ("phi3", False, False),  # halves of a merged weight are views of what is gathered
        ("phi3", True, False),
        pytest.param("phi3", False, True, marks=[pytest.mark.ci, pytest.mark.slow]),
    ],
)
def test_sharded_ranks_give_the_gradients_of_one(
    world: Ranks, family: str, activation_checkpointing: bool, compiled: bool
) -> None:
    expected = step(adapted(tiny(family)), token_ids(2, 12))
    found_by_rank = world.run(
        "tests.kernels.models:sharded_step", family, activation_checkpointing, compiled, world_size=2
    )
    for found in found_by_rank:
        assert found["fused"] == 6
        np.testing.assert_allclose(found["logits"], expected[0].numpy(), rtol=1e-5, atol=1e-5)
        assert found["gradients"].keys() == expected[1].keys()
        for name, gradient in expected[
            1
        ].items():  # both ranks see the same rows, so the mean over ranks is the gradient of one
            np.testing.assert_allclose(
                found["gradients"][name],
                gradient.numpy(),
                rtol=0,
                atol=1e-5 * gradient.abs().max().item(),
                err_msg=name,
            )


@pytest.mark.ci
def test_weights_in_nf4_through_their_own_products() -> None:
    pytest.importorskip("bitsandbytes")
    from manyhands.convert import nf4
    from manyhands.convert.nf4 import quantize_blocks

    source = tiny("llama")
    weights = {name: p.detach().clone() for name, p in source.named_parameters()}
    quantize_blocks(source)
    for name, module in source.named_modules():
        if isinstance(module, nf4.Nf4Linear):
            module.fill(weights[f"{name}.weight"])
    plain = adapted(source)
    fused = copy.deepcopy(plain)
    assert not fuse_modules(fused, known_modules()).left
    assert isinstance(fused.model.layers[2].mlp, FusedMlp)
    expected = step(plain, token_ids(2, 9))
    logits, gradients = step(fused, token_ids(2, 9))
    torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-5)
    assert worst_gap(gradients, expected[1]) < 1e-5
    for block in find_blocks(fused).values():
        block.compile(fullgraph=True, backend="aot_eager")
    assert worst_gap(step(fused, token_ids(2, 9))[1], expected[1]) < 1e-5


def train(
    model: Any, num_steps: int, learning_rate: float, vocab_size: int, seed: int = 0, length: int = 48
) -> torch.Tensor:
    """Losses of ``num_steps`` AdamW steps on rows with a pattern that can be learnt; ``seed`` chooses the rows."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    losses = []
    for index in range(num_steps):
        draw = torch.Generator().manual_seed(1000 * seed + index)
        half = torch.randint(0, min(vocab_size, 200), (4, length // 2), generator=draw)
        ids = torch.cat([half, (half + 1) % vocab_size], 1).to(trained[0].device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def curves(
    source: Any, num_steps: int, learning_rate: float, vocab_size: int, seed: int, factor: float
) -> dict[str, torch.Tensor]:
    """Loss curves in float32, in bfloat16, and in bfloat16 fused with its scaling times ``factor``, from the same
    rounded weights.
    """
    half = copy.deepcopy(source).bfloat16()
    models = {
        "reference": adapted(copy.deepcopy(half).float()),
        "plain": adapted(copy.deepcopy(half)),
        "fused": adapted(half),
    }
    assert fuse_modules(models["fused"], known_modules()).fused
    assert all(p.dtype == torch.float32 for model in models.values() for p in model.parameters() if p.requires_grad)
    for module in models["fused"].modules():
        if isinstance(module, LoraLinear):
            module.scaling *= factor
    return {name: train(model, num_steps, learning_rate, vocab_size, seed) for name, model in models.items()}


def gaps(
    source: Any, learning_rate: float, vocab_size: int, *, num_steps: int = 50, seeds: int = 2, factor: float = 1.0
) -> dict[str, float]:
    """Root mean square of the distance of each loss from float32's, over all steps of several runs: the ratio of one
    run's is mostly chance (0.55 to 1.26 for tiny models). The model must have learnt something.
    """
    found = [curves(source, num_steps, learning_rate, vocab_size, seed, factor) for seed in range(seeds)]
    assert all(f["reference"][-5:].mean() < f["reference"][:5].mean() - 0.1 for f in found)
    apart = {name: torch.cat([f[name] - f["reference"] for f in found]) for name in ("plain", "fused")}
    return {name: float(gap.square().mean().sqrt()) for name, gap in apart.items()}


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_fifty_steps_stay_as_near_to_float32_as_plain_bfloat16(family: str) -> None:
    found = gaps(tiny(family), 1e-2, 256)
    assert found["fused"] <= 1.2 * found["plain"]


@pytest.mark.slow
def test_fifty_steps_show_a_mistake_of_five_percent() -> None:
    found = gaps(tiny("llama"), 1e-2, 256, seeds=1, factor=1.05)
    assert found["fused"] > 1.2 * found["plain"]


@pytest.mark.gpu  # 450 steps of 135 million parameters: three quarters of an hour on two cores
@pytest.mark.real
@pytest.mark.slow
def test_fifty_steps_of_a_real_model(smollm2: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).cuda()
    found = gaps(source, 1e-3, source.config.vocab_size, seeds=3)
    print(
        json.dumps(
            {
                "model": source.config.name_or_path,
                "steps": 50,
                "runs": 3,
                **found,
                "ratio": found["fused"] / found["plain"],
            }
        )
    )
    assert found["fused"] <= 1.2 * found["plain"]


def test_lora_linear_is_what_the_fused_modules_expect() -> None:
    layer = next(m for m in adapted(tiny("llama"), rslora=True, alpha=8.0).modules() if isinstance(m, LoraLinear))
    assert layer.scaling == 4.0 and layer.dropout == 0.0 and "weight" in layer._parameters
