"""Matmuls of adapted layers in NF4: the numbers of their dequantised weights, written once, with no weight left
over.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.convert import nf4
from manyhands.convert.nf4 import Nf4Linear
from manyhands.kernels.lora import Layer, lora_linears, lora_mlp
from tests.convert.test_nf4 import PARTITIONED, saved_bytes
from tests.kernels.test_lora import assert_close, draw_input, draw_layer, gradients, plain_linear, plain_mlp

pytest.importorskip("bitsandbytes")

KINDS = ("q, k, v", "o", "mlp")


def both_ways(layer: Layer) -> tuple[Layer, Layer]:
    """A layer with its weight in NF4, and the same with this weight dequantised and whole."""
    (weight,) = layer.base
    held = Nf4Linear(nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype))
    held.fill(weight)
    base, products = held.fused_base()
    return layer._replace(base=base, matmuls=products), layer._replace(base=(held.weight,))


def draw_layers(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Layer]:
    """Layers of one kind on 75 inputs, odd sizes, ranks that differ, with and without bias and factors."""
    sizes = {
        "q, k, v": [(130, 75, 3, True), (33, 75, 0, True), (33, 75, 7, False)],
        "o": [(75, 75, 3, True)],
        "mlp": [(97, 75, 5, False), (97, 75, 2, True), (75, 97, 3, False)],
    }
    return [
        draw_layer(out, into, rank, bias, seed * 10 + i, dtype) for i, (out, into, rank, bias) in enumerate(sizes[kind])
    ]


def fused(kind: str, x: torch.Tensor, layers: list[Layer]) -> Any:
    return lora_mlp(x, *layers, "silu") if kind == "mlp" else lora_linears(x, layers)


def plain(kind: str, x: torch.Tensor, layers: list[Layer]) -> Any:
    return plain_mlp(x, *layers, "silu") if kind == "mlp" else tuple(plain_linear(layer, x) for layer in layers)


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(2, 5), (1,), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_dequantised_weights(kind: str, shape: tuple[int, ...]) -> None:
    pairs = [both_ways(layer) for layer in draw_layers(kind)]
    in_nf4, whole = [p for p, _ in pairs], [w for _, w in pairs]
    x = draw_input(*shape, 75)
    assert_close(gradients(fused(kind, x, in_nf4), x, in_nf4), gradients(plain(kind, x, whole), x, whole))


@pytest.mark.parametrize("whole_ones", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["q, k, v", "mlp"])
def test_a_group_may_hold_whole_weights_too(kind: str, whole_ones: tuple[int, ...]) -> None:
    pairs = [both_ways(layer) for layer in draw_layers(kind)]
    mixed, whole = [pair[i in whole_ones] for i, pair in enumerate(pairs)], [w for _, w in pairs]
    x = draw_input(4, 75)
    assert_close(gradients(fused(kind, x, mixed), x, mixed), gradients(plain(kind, x, whole), x, whole))


def test_frozen_layers_alone() -> None:
    """No factors, so nothing narrow to begin with: the gradient of x starts at the first weight."""
    pairs = [both_ways(draw_layer(40, 75, 0, True)), both_ways(draw_layer(33, 75, 0))]
    in_nf4, whole = [p for p, _ in pairs], [w for _, w in pairs]
    x = draw_input(4, 75)
    assert_close(gradients(lora_linears(x, in_nf4), x, in_nf4), gradients(plain("o", x, whole), x, whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_at_most_that_of_the_plain_path(kind: str, dtype: torch.dtype) -> None:
    totals: dict[str, list[float]] = {}
    for seed in range(4):
        pairs = [both_ways(layer) for layer in draw_layers(kind, dtype, seed)]
        in_nf4, whole = [p for p, _ in pairs], [w for _, w in pairs]
        x = draw_input(3, 50, 75, dtype=dtype)
        exact_x = x.detach().double().requires_grad_()
        reference = gradients(plain(kind, exact_x, whole), exact_x, whole)
        for name, found in (
            ("plain", gradients(plain(kind, x, whole), x, whole)),
            ("fused", gradients(fused(kind, x, in_nf4), x, in_nf4)),
        ):
            errors = [
                float((one.double() - other).norm() / other.norm()) for one, other in zip(found, reference, strict=True)
            ]
            totals[name] = [
                total + error for total, error in zip(totals.get(name, [0.0] * len(errors)), errors, strict=True)
            ]
    assert min(totals["plain"]) > 0
    for one, other in zip(totals["fused"], totals["plain"], strict=True):
        assert one <= 1.2 * other


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compiled_graph_gives_the_same_numbers(backend: str) -> None:
    group, mlp = ([both_ways(layer)[0] for layer in draw_layers(kind)] for kind in ("q, k, v", "mlp"))
    mlp[1] = both_ways(draw_layers("mlp")[1])[1]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*lora_linears(x, group), lora_mlp(x, *mlp, "silu"))

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 4):
        x = draw_input(length, 75)
        assert_close(gradients(compiled(x), x, group + mlp), gradients(both(x), x, group + mlp))


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["o", "mlp"])
def test_no_dequantised_weight_is_kept_for_the_backward_pass(kind: str, compiled: bool) -> None:
    sizes = [(256, 256)] if kind == "o" else [(512, 256), (512, 256), (256, 512)]
    layers = [both_ways(draw_layer(*size, 2, seed=i, dtype=torch.bfloat16))[0] for i, size in enumerate(sizes)]
    stored = sum(
        t.numel() * t.element_size() for layer in layers for t in (*layer.base, layer.a, layer.b) if t is not None
    )
    x = draw_input(4, 256, dtype=torch.bfloat16)
    torch._dynamo.reset()
    function = torch.compile(fused, fullgraph=True, backend=PARTITIONED) if compiled else fused
    activations = 2 * 4 * (256 + 4 * 512)  # x, gate, up, and what is made of them
    assert saved_bytes(function, kind, x, layers) <= stored + activations < stored + 2 * 256 * 256 / 4


def test_one_weight_at_a_time_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [both_ways(layer)[0] for layer in draw_layers("q, k, v")]
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []
    original = nf4.dequantize

    def watched(*arguments: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        weight = original(*arguments)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(nf4, "dequantize", watched)
    x = draw_input(4, 75)
    gradients(lora_linears(x, layers), x, layers)
    assert alive == [0] * 6  # three in each direction


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_added_in_a_pass_of_its_own(kind: str) -> None:
    layers = [both_ways(layer)[0] for layer in draw_layers(kind)]
    x = draw_input(11, 75)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        gradients(fused(kind, x, layers), x, layers)
    passes = [event for event in profile.events() if event.name in ("aten::add", "aten::add_")]
    assert any(event.name.startswith("aten::addmm") for event in profile.events())
    assert not [event.input_shapes for event in passes if event.input_shapes[0][:1] == [11]]
