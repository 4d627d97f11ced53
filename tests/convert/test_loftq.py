"""Factors that begin at the best low-rank part of what NF4 loses: what is then left is what the singular values
promise.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.convert import loftq
from manyhands.convert.adapter import adapter_state
from manyhands.convert.loftq import best_low_rank, initialize_with_loftq, nf4_adapters
from manyhands.convert.lora import LoraLinear
from manyhands.convert.nf4 import Nf4Linear
from manyhands.core.seeds import named_generator
from manyhands.export.adapter import export_adapter
from manyhands.infer.load import ModelLocation, load_model
from tests.support.layouts import build
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("loftq"), "qwen3", with_tokenizer=False))


def begun(folder: str, dtype: str = "float32", random: bool = False, **method_keys: Any) -> tuple[Any, float]:
    """A model whose factors have begun at the loss, and the share that is said to be taken up."""
    config = with_random_weights(tiny_run(folder, "qlora", **method_keys), random)
    plan = tiny_plan(folder, compute_dtype=dtype, frozen_dtype=dtype)
    model = build(plan, config).model
    return model, initialize_with_loftq(model, plan, config, torch.device("cpu"))


def with_random_weights(config: RunConfig, random: bool) -> RunConfig:
    return config.model_copy(
        update={"model": config.model.model_copy(update={"init": "random" if random else "pretrained"})}
    )


def update(layer: LoraLinear) -> torch.Tensor:
    """s B A (o, i) in float64."""
    return layer.scaling * layer.lora_B.weight.detach().double() @ layer.lora_A.weight.detach().double()


def assert_what_is_left_is_the_optimum(
    model: nn.Module, weights: dict[str, torch.Tensor], rank: int, share: float
) -> None:
    """Against the singular values by numpy in float64, layer by layer; and the share over all layers."""
    layers = nf4_adapters(model)
    lost = rest = 0.0
    for name, layer in layers.items():
        loss = weights[f"{name}.weight"].double() - layer.weight.double()
        left = float((loss - update(layer)).square().sum())
        assert left == pytest.approx(
            float((np.linalg.svd(loss.numpy(), compute_uv=False)[rank:] ** 2).sum()), rel=1e-3
        ), name
        assert left < 0.95 * float(loss.square().sum()), name
        lost, rest = lost + float(loss.square().sum()), rest + left
    assert layers and share == pytest.approx(1 - rest / lost, rel=1e-4)


@pytest.mark.parametrize("method_keys", [{}, {"rslora": True}, {"target_modules": ["q_proj", "down_proj"]}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_left_is_what_the_singular_values_promise(folder: str, dtype: str, method_keys: dict[str, Any]) -> None:
    model, share = begun(folder, dtype, **method_keys)
    assert len(nf4_adapters(model)) == (6 if "target_modules" in method_keys else 21)
    assert_what_is_left_is_the_optimum(model, load_file(Path(folder) / "model.safetensors"), 4, share)
    assert {state.dtype for state in adapter_state(model).values()} == {torch.float32}


def test_drawn_weights_are_those_that_the_layers_were_filled_with(folder: str) -> None:
    config = with_random_weights(tiny_run(folder), True)
    weights = {name: p.detach() for name, p in build(tiny_plan(folder), config).model.named_parameters()}
    model, share = begun(folder, random=True)
    assert_what_is_left_is_the_optimum(model, weights, 4, share)


def test_dimensions_that_a_weight_has_not_begin_as_without(folder: str) -> None:
    """The tiny model's keys have 32 outputs: 16 rows of A beyond them are the drawn ones, and can be trained."""
    model, _ = begun(folder, rank=48)
    drawn = adapter_state(build(tiny_plan(folder), tiny_run(folder, "qlora", rank=48)).model)
    name = "model.layers.0.self_attn.k_proj"
    layer, weight = nf4_adapters(model)[name], load_file(Path(folder) / "model.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(layer.weight.double() + update(layer), weight.double(), rtol=0, atol=1e-6)
    assert torch.equal(layer.lora_A.weight[32:], drawn[f"base_model.model.{name}.lora_A.weight"][32:])
    assert layer.lora_A.weight[32:].any(1).all() and not layer.lora_B.weight[:, 32:].any()


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("shape", [(1024, 1024), (320, 1280)], ids=str)
def test_subspace_iteration_leaves_what_the_exact_decomposition_leaves(
    shape: tuple[int, int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 0.1 % of the optimum on what NF4 loses of a random weight; fewer iterations are seen to be too few."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 0.02
    layer = Nf4Linear(nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16))
    layer.fill(weight)
    loss = weight - layer.weight.float()
    optimum = float(torch.linalg.svdvals(loss)[rank:].square().sum())

    def left() -> float:
        found = best_low_rank(loss, rank, named_generator(0, "x"))
        rest = float((loss - found.b @ found.a).square().sum())
        assert rest == pytest.approx(float(found.residual), rel=1e-4)
        return rest

    assert left() == pytest.approx(optimum, rel=1e-3)
    monkeypatch.setattr(loftq, "NUM_ITERATIONS", 1)
    assert left() > 1.002 * optimum


def test_no_draw_is_taken_from_the_global_generator() -> None:
    matrix, before = torch.randn(40, 30), torch.get_rng_state()
    first, again = (best_low_rank(matrix, 4, named_generator(0, "x")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_a_weight_that_nf4_holds_exactly_gets_zeros() -> None:
    found = best_low_rank(torch.zeros(40, 30), 4, named_generator(0, "x"))
    assert found.residual == 0 and not (found.b @ found.a).any() and found.a.isfinite().all()


def test_one_weight_at_a_time_is_held(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = loftq.read_stored, list[weakref.ref[torch.Tensor]]()

    def read(stored: Any) -> torch.Tensor:
        assert [ref for ref in seen if ref() is not None] == []
        weight = original(stored)
        seen.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(loftq, "read_stored", read)
    begun(folder)
    assert len(seen) == 21


def test_an_opened_adapter_computes_what_was_trained(folder: str, tmp_path: Path) -> None:
    """Beside NF4's values, though the model is opened in its own dtype; an adapter that began at zero leaves them as
    they are.
    """
    ids = torch.arange(40)[None]
    for init in ("loftq", "zero"):
        config = tiny_run(folder, "qlora", init=init)
        model = begun(folder)[0].eval()
        export_adapter(tmp_path / init, model, config.method, folder, rank=0)
        opened = load_model(ModelLocation(Path(folder), tmp_path / init))
        with torch.no_grad():
            expected, found = (each(ids, use_cache=False).logits for each in (model, opened))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) == (init == "loftq")
