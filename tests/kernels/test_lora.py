"""Fused low-rank layers against one layer after the other: values, gradients, numerics, edges, compilation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from manyhands.kernels.lora import Layer, lora_linears, lora_mlp
from manyhands.kernels.matmul import mm_wide

ACTIVATED = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}


def draw_layer(
    num_outputs: int,
    num_inputs: int,
    rank: int = 3,
    bias: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Layer:
    draw = torch.Generator().manual_seed(seed * 1000 + num_outputs + num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=draw, dtype=torch.float64) / num_inputs**0.5
    offset = torch.randn(num_outputs, generator=draw, dtype=torch.float64) if bias else None
    factors: list[Any] = [None, None]
    if rank:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        a = torch.randn(rank, num_inputs, generator=draw, dtype=torch.float64) / num_inputs**0.5
        b = torch.randn(num_outputs, rank, generator=draw, dtype=torch.float64) * 0.3
        factors = [a.to(wide).requires_grad_(), b.to(wide).requires_grad_()]
    return Layer((weight.to(dtype),), None if offset is None else offset.to(dtype), *factors, scaling=0.7)


def plain_linear(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, layer.base[0].to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))
    if layer.a is None or layer.b is None:
        return y
    return y + F.linear(F.linear(x, layer.a.to(x.dtype)) * layer.scaling, layer.b.to(x.dtype))


def plain_mlp(x: torch.Tensor, gate: Layer, up: Layer, down: Layer, activation: str) -> torch.Tensor:
    return plain_linear(down, ACTIVATED[activation](plain_linear(gate, x)) * plain_linear(up, x))


def gradients(outputs: Any, x: torch.Tensor, layers: list[Layer]) -> list[torch.Tensor]:
    """Outputs, then gradients of x (where it wants one), A and B, for one fixed gradient of the outputs."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in (x, *(f for layer in layers for f in (layer.a, layer.b))) if t is not None and t.requires_grad]
    draw = torch.Generator().manual_seed(5)
    given = [torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.dtype) for y in outputs]
    reached = [(y, g) for y, g in zip(outputs, given, strict=True) if y.requires_grad]
    return [y.detach() for y in outputs] + list(
        torch.autograd.grad([y for y, _ in reached], wanted, [g for _, g in reached])
    )


def draw_input(*shape: int, dtype: torch.dtype = torch.float64, wants_grad: bool = True) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .to(dtype)
        .requires_grad_(wants_grad)
    )


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (7,), (0,), (3, 0)])
@pytest.mark.parametrize("wants_grad", [True, False])
def test_group_agrees_with_single_layers(shape: tuple[int, ...], wants_grad: bool) -> None:
    layers = [
        draw_layer(8, 12, bias=True),
        draw_layer(3, 12, rank=1),
        draw_layer(5, 12, rank=0),
        draw_layer(1, 12, rank=7),
    ]
    x = draw_input(*shape, 12, wants_grad=wants_grad)
    expected = gradients(tuple(plain_linear(layer, x) for layer in layers), x, layers)
    assert_close(gradients(lora_linears(x, layers), x, layers), expected)


@pytest.mark.parametrize("activation", ACTIVATED)
@pytest.mark.parametrize("without", [None, 0, 2])
def test_mlp_agrees_with_single_layers(activation: str, without: int | None) -> None:
    ranks = [0 if i == without else 3 for i in range(3)]
    layers = [
        draw_layer(20, 12, ranks[0]),
        draw_layer(20, 12, ranks[1], seed=1),
        draw_layer(12, 20, ranks[2], bias=True),
    ]
    x = draw_input(2, 5, 12)
    expected = gradients(plain_mlp(x, *layers, activation), x, layers)
    assert_close(gradients(lora_mlp(x, *layers, activation), x, layers), expected)


def test_gradcheck_and_unused_outputs() -> None:
    layers = [draw_layer(4, 3, 2), draw_layer(2, 3, 1)]
    x = draw_input(3, 3)
    factors = [f for layer in layers for f in (layer.a, layer.b)]

    def function(x: torch.Tensor, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return lora_linears(x, [layers[0]._replace(a=flat[0], b=flat[1]), layers[1]._replace(a=flat[2], b=flat[3])])

    assert torch.autograd.gradcheck(function, (x, *factors))
    lora_linears(x, layers)[0].sum().backward()  # nobody uses the second output
    assert layers[1].a is not None and layers[1].a.grad is not None and not layers[1].a.grad.any()


def test_frozen_weights_get_no_gradient_and_no_grad_keeps_nothing() -> None:
    layer = draw_layer(4, 3)
    x = draw_input(2, 3)
    frozen = layer._replace(base=(layer.base[0].clone().requires_grad_(),))  # even where somebody forgot to freeze it
    lora_linears(x, [frozen])[0].sum().backward()
    assert frozen.base[0].grad is None
    with torch.no_grad():
        assert not lora_linears(x, [layer])[0].requires_grad


def test_mlp_keeps_gate_and_up_but_not_their_product() -> None:
    kept: list[torch.Size] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.shape)
        return t

    layers = [draw_layer(40, 12), draw_layer(40, 12, seed=1), draw_layer(12, 40)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        lora_mlp(draw_input(9, 12), *layers, "silu")
    assert kept.count(torch.Size([9, 40])) == 2


@pytest.mark.parametrize("kind", ["group", "mlp"])
def test_bfloat16_error_is_at_most_that_of_the_plain_path(kind: str) -> None:
    totals = {"plain": [0.0] * 20, "fused": [0.0] * 20}
    for seed in range(4):
        half = [
            draw_layer(96, 64, 8, seed=seed, dtype=torch.bfloat16),
            draw_layer(96, 64, 8, seed=seed + 50, dtype=torch.bfloat16),
        ]
        if kind == "mlp":
            half.append(draw_layer(64, 96, 8, seed=seed, dtype=torch.bfloat16))
        x = draw_input(3, 50, 64, dtype=torch.bfloat16)
        exact_x = x.detach().float().requires_grad_()

        def plain(t: torch.Tensor, layers: list[Layer] = half) -> Any:
            return plain_mlp(t, *layers, "silu") if kind == "mlp" else tuple(plain_linear(layer, t) for layer in layers)

        def fused(t: torch.Tensor, layers: list[Layer] = half) -> Any:
            return lora_mlp(t, *layers, "silu") if kind == "mlp" else lora_linears(t, layers)

        reference = gradients(plain(exact_x), exact_x, half)
        for name, function in (("plain", plain), ("fused", fused)):
            for i, (found, wanted) in enumerate(zip(gradients(function(x), x, half), reference, strict=True)):
                assert found.dtype == (torch.float32 if i >= len(reference) - 2 * len(half) else torch.bfloat16)
                totals[name][i] += float((found.float() - wanted).norm() / wanted.norm())
    for one, other in zip(totals["fused"], totals["plain"], strict=True):
        assert one <= 1.2 * other


@torch.library.custom_op("manyhands_tests::eighths", mutates_args=(), schema="(Tensor x, Tensor codes) -> Tensor")
def eighths(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return x @ (codes.to(x.dtype) / 8).t()


@torch.library.custom_op("manyhands_tests::eighths_back", mutates_args=(), schema="(Tensor y, Tensor codes) -> Tensor")
def eighths_back(y: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return y @ (codes.to(y.dtype) / 8)


eighths.register_fake(lambda x, codes: x.new_empty((x.shape[0], codes.shape[0])))
eighths_back.register_fake(lambda y, codes: y.new_empty((y.shape[0], codes.shape[1])))


class Eighths(NamedTuple):
    """Matmuls of weights in int8 codes, of which 8 are one; as many passes as there are terms."""

    def linear(self, x: Any, pieces: Any, bias: Any, low: Any, b: Any) -> torch.Tensor:
        y = eighths(x, *pieces)
        y = y if bias is None else y + bias
        return y if low is None else y + low @ b.t()

    def input_gradient(self, gradients: Any, pieces: Any, left: Any, right: Any) -> torch.Tensor:
        terms = [eighths_back(dy, *each) for dy, each in zip(gradients, pieces, strict=True)]
        return torch.stack(terms + [a @ b for a, b in zip(left, right, strict=True)]).sum(0)


def coded(layer: Layer) -> tuple[Layer, Layer]:
    """A layer in int8 codes, and the same with its weight whole."""
    codes = (layer.base[0] * 8).round().clamp(-127, 127).to(torch.int8)
    return layer._replace(base=(codes,), matmuls=Eighths()), layer._replace(base=(codes.double() / 8,))


def test_quantized_weights_come_as_pieces_and_are_not_kept() -> None:
    pairs = [coded(draw_layer(20, 12, bias=True)), coded(draw_layer(20, 12, seed=1)), coded(draw_layer(12, 20))]
    packed, whole = [p for p, _ in pairs], [w for _, w in pairs]
    x = draw_input(6, 12)
    sizes: list[torch.Size] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.float64:
            sizes.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = lora_mlp(x, *packed, "silu")
    assert torch.Size([20, 12]) not in sizes and torch.Size([12, 20]) not in sizes
    assert_close(gradients(y, x, packed), gradients(plain_mlp(x, *whole, "silu"), x, whole))
    mixed = [packed[0], whole[1]]
    expected = gradients(tuple(plain_linear(layer, x) for layer in whole[:2]), x, whole[:2])
    assert_close(gradients(lora_linears(x, mixed), x, mixed), expected)


@pytest.mark.ci
def test_one_compiled_graph_gives_the_same_numbers() -> None:
    layers = [draw_layer(8, 12, bias=True), draw_layer(3, 12), coded(draw_layer(5, 12))[0]]
    mlp = [draw_layer(20, 12), coded(draw_layer(20, 12, seed=1))[0], draw_layer(12, 20)]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*lora_linears(x, layers), lora_mlp(x, *mlp, "gelu_tanh"))

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    x = draw_input(2, 4, 12)
    assert_close(gradients(compiled(x), x, layers + mlp), gradients(both(x), x, layers + mlp))


@pytest.mark.slow
def test_inductor_gives_the_same_numbers_for_any_length() -> None:
    mlp = [draw_layer(20, 12), draw_layer(20, 12, seed=1), draw_layer(12, 20)]
    compiled = torch.compile(lambda x: lora_mlp(x, *mlp, "silu"), fullgraph=True, dynamic=True)
    for length in (3, 17, 128):
        x = draw_input(length, 12)
        assert_close(gradients(compiled(x), x, mlp), gradients(plain_mlp(x, *mlp, "silu"), x, mlp))


def test_recomputed_inside_a_checkpoint() -> None:
    mlp = [draw_layer(20, 12), draw_layer(20, 12, seed=1), draw_layer(12, 20)]
    x = draw_input(4, 12)
    y = checkpoint(lambda t: lora_mlp(t, *mlp, "silu"), x, use_reentrant=False)
    assert_close(gradients(y, x, mlp), gradients(plain_mlp(x, *mlp, "silu"), x, mlp))


def test_unknown_activation_is_refused() -> None:
    mlp = [draw_layer(20, 12), draw_layer(20, 12), draw_layer(12, 20)]
    with pytest.raises(ValueError, match="none of silu"):
        lora_mlp(draw_input(1, 12), *mlp, "relu")


@pytest.mark.gpu
def test_gpu_hands_out_float32_sums() -> None:
    a, b = torch.randn(16, 4096, device="cuda").bfloat16(), torch.randn(4096, 64, device="cuda").bfloat16()
    found = mm_wide(a, b)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, a.float() @ b.float(), rtol=1e-3, atol=1e-3)
    assert torch.equal(torch.compile(mm_wide)(a, b), found)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_bfloat16_is_near_float32(compiled: bool) -> None:
    mlp = [draw_layer(512, 256, 16, dtype=torch.bfloat16), draw_layer(512, 256, 16, seed=1, dtype=torch.bfloat16)]
    mlp.append(draw_layer(256, 512, 16, dtype=torch.bfloat16))
    x = draw_input(300, 256, dtype=torch.bfloat16)
    exact_x = x.detach().float().requires_grad_()
    reference = gradients(plain_mlp(exact_x, *mlp, "silu"), exact_x, mlp)

    def to(layer: Layer) -> Layer:
        assert layer.a is not None and layer.b is not None
        a, b = (f.detach().cuda().requires_grad_() for f in (layer.a, layer.b))
        return layer._replace(base=(layer.base[0].cuda(),), a=a, b=b)

    there = [to(layer) for layer in mlp]
    function = torch.compile(lora_mlp, fullgraph=True) if compiled else lora_mlp
    t = x.detach().cuda().requires_grad_()
    y = function(t, *there, "silu")
    draw = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype).cuda()
    found = [y.detach(), *torch.autograd.grad(y, [t, *(f for layer in there for f in (layer.a, layer.b))], draw)]  # type: ignore[list-item]
    for one, other in zip(found, reference, strict=True):
        assert float((one.cpu().float() - other).norm() / other.norm()) < 1e-2
