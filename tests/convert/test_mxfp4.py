"""Experts that are stored in MXFP4, as gpt-oss's are: the same bytes and weights as transformers makes of them,
adapters beside them, and what is saved.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from manyhands.config.schema import MethodSection
from manyhands.convert import mxfp4
from manyhands.convert.experts import stack_experts
from manyhands.convert.fused_experts import can_fuse
from manyhands.convert.grouped import GroupedLinear, hold
from manyhands.convert.lora import adapted_layers, apply_lora, initialize_adapters, lora_class
from manyhands.convert.mxfp4 import Mxfp4Linear
from manyhands.core.errors import UserError
from manyhands.export.__main__ import compute_probe
from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.facts.safetensors import read_header
from manyhands.facts.stored_mxfp4 import find_stored_mxfp4
from manyhands.infer.load import ModelLocation, load_model
from manyhands.kernels.mxfp4.reference import dequantize_reference, draw_pieces, quantize
from manyhands.kernels.mxfp4.select import TRIED_SHAPES, choose_backend
from manyhands.model.weights import quantized_layers, stacked_layers, stored_form
from manyhands.planner.text import sentence_of
from tests.keys.lab import Lab, Ran, open_lab
from tests.support.experts import expert_model, write_mxfp4_model

IDS = torch.arange(40)[None] % 250
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


@pytest.fixture(scope="module")
def stored(lab: Lab) -> Path:
    folder = write_mxfp4_model(lab.new_path("stored"))
    for pattern in ("*token*", "chat_template*"):
        for path in (lab.folder / "model").glob(pattern):
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def ran(lab: Lab, stored: Path) -> Ran:
    keys = {"method.name": "lora", "output.merge": True, "checkpoint.every_steps": 2}
    return lab.export({"model.name": str(stored)} | keys)


def reopen(folder: Path) -> Any:
    options = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval().float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    codes, scales = draw_pieces(3 * 8, 96, torch.device("cpu"))
    found = dequantize_reference(codes, scales, (24, 96), dtype)
    expected = convert_moe_packed_tensors(codes.view(3, 8, 3, 16), scales[:, :3].reshape(3, 8, 3), dtype=dtype)
    assert torch.equal(found, expected.mT.flatten(0, 1))
    assert torch.equal(dequantize_reference(*_filled(*quantize(found)), (24, 96), dtype), found)


def _filled(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, torch.nn.functional.pad(scales, (0, -scales.shape[1] % 8))


def test_the_nearest_value_is_taken() -> None:
    weight = torch.tensor([[6.0, -6.0, 0.2, 0.3, -0.74, 0.76, 2.4, 2.6, 5.1, 3.4] + [0.0] * 22])
    found = dequantize_reference(*_filled(*quantize(weight)), (1, 32), torch.float32)
    assert found[0, :10].tolist() == [6.0, -6.0, 0.0, 0.5, -0.5, 1.0, 2.0, 3.0, 6.0, 3.0]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_gives_the_same_bits_as_it_is_interpreted() -> None:
    """In a process of its own, as Triton decides at import."""
    code = (
        "import torch; from manyhands.kernels.mxfp4 import reference, select, triton; cpu = torch.device('cpu'); "
        "print([torch.equal(*(f(*reference.draw_pieces(*shape, cpu), shape, dtype) for f in (triton.dequantize_triton, "
        "reference.dequantize_reference))) for dtype in (torch.float32, torch.bfloat16) for shape in "
        "select.TRIED_SHAPES])"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.splitlines()[-1] == str([True] * 2 * len(TRIED_SHAPES))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_gives_the_same_bits(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert choose_backend(device, dtype).name == "triton", choose_backend(device, dtype).reason
    from manyhands.kernels.mxfp4.triton import dequantize_triton

    for shape in TRIED_SHAPES:
        pieces = draw_pieces(*shape, device)
        assert torch.equal(dequantize_triton(*pieces, shape, dtype), dequantize_reference(*pieces, shape, dtype))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_compiled_stack_is_one_graph_and_keeps_no_weight(adapted: bool) -> None:
    torch.manual_seed(0)
    stack: Any = GroupedLinear(4, 64, 96).requires_grad_(False)
    held: Any = hold(stack, Mxfp4Linear)
    held.fill(stack.weight)
    if adapted:
        held = lora_class(type(held))(held, MethodSection(name="lora", rank=4, alpha=8.0))
        initialize_adapters(nn.ModuleDict({"stack": held}), seed=0)
        nn.init.normal_(held.lora_B.weight)
    ends = torch.tensor([5, 5, 9, 12], dtype=torch.int32)
    x = torch.randn(12, 64, requires_grad=True)
    torch._dynamo.reset()
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = torch.compile(held, fullgraph=True, backend="aot_eager")(x, ends)
    plain = held.weight.unflatten(0, (4, -1))
    assert max(kept) < plain.numel() * plain.element_size()
    expected = held(x, ends)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.ci
def test_compiled_experts_with_adapters_keep_no_weight() -> None:
    """Nor a step on the way to it, whose rows are as many as the stack's and which is wider than an adapter."""
    model = expert_model("gpt_oss", intermediate_size=64)
    for name in stack_experts(model):
        stack: Any = model.get_submodule(name)
        held: Any = hold(stack, Mxfp4Linear)
        held.fill(stack.weight)
        model.set_submodule(name, held)
    apply_lora(model, MethodSection(name="lora", rank=4, alpha=8.0), seed=0)
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    block, x = model.model.layers[0].mlp, torch.randn(1, 40, 64, requires_grad=True)
    assert can_fuse(block.experts)
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = torch.compile(block, fullgraph=True, backend="aot_eager")(x)[0]
    assert kept and not any(len(shape) == 2 and shape[0] >= 8 * 64 and shape[1] > 16 for shape in kept)
    expected = block(x)[0]
    torch.testing.assert_close(found, expected)
    trained = [x, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
    both = (torch.autograd.grad(y.square().sum(), trained) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_every_shard_takes_its_own_rows(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored / "model.safetensors"
    weight = find_stored_mxfp4({path: read_header(path)})[0]["model.layers.0.mlp.experts.down_proj"]
    groups, inner, size = weight.shape
    whole: Any = Mxfp4Linear(nn.Linear(inner, groups * size, bias=False))
    whole.fill(weight)
    for begin, end in itertools.pairwise([0, 100, 101, 300, groups * size, groups * size]):
        part: Any = Mxfp4Linear(nn.Linear(inner, end - begin, bias=False))
        monkeypatch.setattr(mxfp4, "local_slices", lambda _, rows=slice(begin, end): (rows,))
        part.fill(weight)
        for name in Mxfp4Linear.weight_pieces:
            found, expected = (getattr(layer, name).view(torch.uint8) for layer in (part, whole))
            assert torch.equal(found, expected[begin:end])


@pytest.mark.ci
def test_weights_and_logits_are_those_of_the_files_and_the_plan_counts_them(lab: Lab, stored: Path) -> None:
    rank = lab.start({"model.name": str(stored), "method.name": "lora"})
    theirs = reopen(stored)
    layers = quantized_layers(rank.model)
    assert sorted(layers) == [f"model.layers.{n}.mlp.experts.{key}" for n in range(2) for key in sorted(STACKS)]
    for name, layer in layers.items():
        assert torch.equal(stored_form(stacked_layers(rank.model)[name], layer.weight), theirs.get_parameter(name))
    with torch.no_grad():
        rank.model.set_attn_implementation("eager")
        torch.testing.assert_close(
            rank.model.eval()(IDS, use_cache=False).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5
        )
    held = sum(p.numel() * p.element_size() for p in rank.model.parameters())
    assert rank.plan.memory.terms["weights"] == held
    (frozen,) = [reason for reason in rank.plan.why if reason.code == "frozen_experts"]
    assert rank.plan.num_parameters == sum(p.numel() for p in theirs.parameters()) + rank.plan.num_trained and frozen


@pytest.mark.ci
def test_losses_are_those_beside_dequantized_weights_and_a_resumed_run_repeats_them(
    lab: Lab, stored: Path, ran: Ran
) -> None:
    plain = shutil.copytree(stored, lab.new_path("plain"))
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(reopen(stored).state_dict(), plain / "model.safetensors")  # save_pretrained leaves the experts out
    dequantized = lab.run({"model.name": str(plain), "method.name": "lora"})
    assert quantized_layers(dequantized.rank.model) == {} and ran.losses[-1] < ran.losses[0]
    for one, other in ((ran.losses, dequantized.losses), (ran.column("grad_norm"), dequantized.column("grad_norm"))):
        assert one == pytest.approx(other, rel=1e-5)
    shutil.rmtree(ran.rank.folder.checkpoints / "step-000005")
    rank = ran.rank
    rank.restart()
    assert rank.state.step == 4 and lab.train(rank).losses == ran.losses


def test_a_run_is_saved_beside_them_and_merged_in_16_bits(lab: Lab, stored: Path, ran: Ran) -> None:
    run = ran
    run.rank.model.set_attn_implementation("eager")
    reference, probe = Reference.read(run.folder / "verify" / "adapter.json"), lab.new_path("probe")
    compute_probe(run.rank.model.eval(), probe)
    assert reference.base == "mxfp4"
    found = verify(run.folder / "adapter", reference, base=stored, probe_path=probe)
    assert found.findings == [] and any("logits of" in note for note in found.notes)
    answers = load_model(ModelLocation(stored, run.folder / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "merged", dtype=torch.float32)
    merged.set_attn_implementation("eager")
    with torch.no_grad():
        trained = run.rank.model(IDS, use_cache=False).logits
        for opened in (answers, merged):
            torch.testing.assert_close(opened(IDS).logits, trained, rtol=1e-4, atol=1e-4)
    assert "quantization_config" not in json.loads((run.folder / "merged" / "config.json").read_text())
    for name, layer in adapted_layers(run.rank.model).items():
        if name in stacked_layers(run.rank.model):
            wanted = layer.merge(layer.weight, layer.lora_A.weight, layer.lora_B.weight)
            torch.testing.assert_close(merged.get_parameter(name), stored_form(layer, wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.ci
def test_full_training_begins_with_dequantized_weights_and_saves_them_so(lab: Lab, stored: Path) -> None:
    """Their values before the first step are transformers', and a saved model opens without quantization."""
    keys = {"model.name": str(stored), "method.name": "full"}
    rank, theirs = lab.start(keys), reopen(stored)
    assert quantized_layers(rank.model) == {}
    for name, stack in stacked_layers(rank.model).items():
        assert torch.equal(stored_form(stack, stack.weight), theirs.get_parameter(name))
    (reason,) = [reason for reason in rank.plan.why if reason.code == "frozen_experts"]
    assert "dequantized from MXFP4 as they are read" in sentence_of(reason)
    run = lab.export(keys)
    assert run.losses[-1] < run.losses[0] and run.rank.plan.num_trained == sum(p.numel() for p in theirs.parameters())
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    assert getattr(saved.config, "quantization_config", None) is None
    for name, stack in stacked_layers(run.rank.model).items():
        assert torch.equal(stored_form(stack, stack.weight), saved.get_parameter(name))
        assert not torch.equal(saved.get_parameter(name), theirs.get_parameter(name))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"method.name": "qlora"}, "method.name: qlora cannot be combined"),
        ({"method.name": "lora", "model.frozen_dtype": "fp8"}, "model.frozen_dtype: fp8"),
    ],
)
def test_what_needs_other_weights_is_refused(lab: Lab, stored: Path, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        lab.prepare({"model.name": str(stored)} | keys)


def test_a_weight_without_its_scales_is_refused(lab: Lab, stored: Path) -> None:
    folder = shutil.copytree(stored, lab.new_path("broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="down_proj cannot be read"):
        lab.prepare({"model.name": str(folder), "method.name": "lora"})
