"""Matmuls in fp8: what a code is, errors against float32 forward and backward, edges, compiled graphs, and GPU kernels
against the emulation that they stand for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyhands.kernels.backend import architecture_of
from manyhands.kernels.fp8 import ops, reference, select
from manyhands.kernels.fp8.linear import fp8_linears, fp8_mlp, quantize_weights
from manyhands.kernels.lora import Layer

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}
ROUNDING = 0.037  # of a product of two fp8 values: 2.6 % each, in root mean square
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def draw(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; 0 where both are empty or zero."""
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


# -- fp8 values


def test_a_row_is_scaled_by_a_power_of_two_so_that_its_largest_code_is_between_224_and_448() -> None:
    x = torch.cat([draw(40, 33, scale=10.0**power, seed=power + 9) for power in range(-9, 9, 3)])
    codes, scales = ops.quantize_rows([x])
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    top = codes.float().abs().amax(1)
    assert top.min() >= 224 and top.max() <= 448
    assert (codes.float() * scales - x).abs().max() / x.abs().max() <= 2**-4


@pytest.mark.parametrize("value", [0.0, 1e-40, float("nan"), float("inf")])
def test_zeros_stay_zero_and_what_is_no_number_stays_none(value: float) -> None:
    x = torch.tensor([[value, 0.0, value, 0.0] * 4, [1.0] * 16])
    found = ops.scaled_matmul(*ops.quantize_rows([x]), *ops.quantize_rows([torch.ones(16, 16)]), torch.float32)
    assert torch.equal(found[1], torch.full((16,), 16.0))
    assert found[0].isfinite().all() == (value in (0.0, 1e-40))
    assert value != 0 or not found[0].any()


def test_factors_multiply_columns_before_and_parts_are_one_row() -> None:
    parts = [draw(17, width, seed=width, dtype=torch.bfloat16) for width in (48, 16, 32)]
    factors = draw(96, seed=5).exp()
    codes, scales = ops.quantize_rows(parts, factors)
    expected = torch.cat(parts, 1).float() * factors
    assert torch.equal(codes.float(), (expected / scales).to(torch.float8_e4m3fn).float())


def test_transposed_codes_are_the_same_codes() -> None:
    """So the backward pass multiplies with the very weights of the forward pass."""
    weights = [draw(48, 32), draw(16, 32, seed=1)]
    codes, scales, transposed = quantize_weights(weights)
    assert torch.equal(codes.float().t(), transposed.float())
    assert scales.shape == (64, 1)


@pytest.mark.parametrize("num_rows", [1, 17, 33])
def test_a_sum_over_rows_of_any_scale_loses_nothing_but_the_codes_rounding(num_rows: int) -> None:
    spread = torch.logspace(-4, 4, num_rows)[:, None]
    a, b = draw(num_rows, 48) * spread, draw(num_rows, 16, seed=1) / spread.flip(0)
    a_codes, b_codes = ops.quantize_rows([a]), ops.quantize_rows([b])
    out_scales = torch.full((48,), 4.0)
    found = ops.matmul_over_rows(*a_codes, *b_codes, out_scales, torch.float32)
    exact = (a_codes[0].double() * a_codes[1]).t() @ (b_codes[0].double() * b_codes[1]) / 4
    assert gap(found, exact) < 2e-3


@pytest.mark.ci
def test_a_compiled_sum_over_rows_has_the_same_bits_and_launches_no_small_operation_by_itself() -> None:
    spread = torch.logspace(-9, 9, 33)[:, None]
    given = *ops.quantize_rows([draw(33, 48) * spread]), *ops.quantize_rows([draw(33, 16, seed=1) / spread])
    out_scales = torch.ldexp(torch.ones(48), torch.arange(48) - 24)
    found = torch.compile(ops.matmul_over_rows)(*given, out_scales, torch.float32)
    assert torch.equal(found, ops.matmul_over_rows(*given, out_scales, torch.float32))
    compiled = torch.compile(ops.matmul_over_rows)
    compiled(*given, out_scales, torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(*given, out_scales, torch.float32)
    called = Counter(event.name for event in profile.events())
    assert called["manyhands::fp8_transpose"] == 2 and called["manyhands::fp8_matmul"] == 1
    assert not any("shift" in name or name == "aten::amax" for name in called), called


# -- groups


@pytest.mark.parametrize("counts", [(3, 0, 9, 1, 0), (0, 0, 0, 0, 4), (5, 5, 5, 5, 5)])
def test_products_of_groups_are_those_of_each_group_alone(counts: tuple[int, ...]) -> None:
    """Forward and back to the input, exactly: the same fp8 values, factors and sums."""
    ends = torch.tensor(counts).cumsum(0).int()
    x, gradient = draw(sum(counts), 32, seed=1).exp(), draw(sum(counts), 48, seed=2)
    values, scales = ops.quantize_stacked([draw(5 * 48, 32, seed=3) * draw(5 * 48, 1, seed=4).exp()])
    values, scales = values.unflatten(0, (5, 48)), scales.view(5, 48)
    rows, back = ops.quantize_rows([x]), ops.quantize_group_rows(gradient, scales, ends)
    found = ops.multiply_groups(*rows, values, scales, ends, torch.float32)
    transposed = ops.transpose_stack(values)
    for_x = ops.multiply_groups(*back, transposed, scales.new_ones(5, 32), ends, torch.float32)
    wanted, wanted_back = [], []
    for own, dy, weight, of_weight in zip(x.split(counts), gradient.split(counts), values, scales, strict=True):
        if len(own):
            one = of_weight[:, None]
            wanted.append(ops.scaled_matmul(*ops.quantize_rows([own]), weight, one, torch.float32))
            coded = ops.quantize_rows([dy], of_weight)
            wanted_back.append(ops.scaled_matmul(*coded, weight.t().contiguous(), None, torch.float32))
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(for_x, torch.cat(wanted_back), rtol=1e-6, atol=1e-6)
    weights = values.double() * scales[..., None]
    exact = torch.cat([own.double() @ weight.t() for own, weight in zip(x.split(counts), weights, strict=True)])
    back_exact = torch.cat([dy.double() @ weight for dy, weight in zip(gradient.split(counts), weights, strict=True)])
    assert gap(found, exact) < 2 * ROUNDING and gap(for_x, back_exact) < 2 * ROUNDING


def test_a_device_without_products_of_groups_says_why() -> None:
    assert select.why_no_group_mm(torch.device("cpu")) == "the device is cpu"


# -- layers


def draw_layer(
    num_outputs: int, num_inputs: int, rank: int, trained: bool, bias: bool, seed: int = 0, device: str = "cpu"
) -> Layer:
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    weight = draw(num_outputs, num_inputs, seed=seed, scale=num_inputs**-0.5, dtype=kind, device=device).requires_grad_(
        trained
    )
    offset = draw(num_outputs, seed=seed + 1, dtype=kind, device=device).requires_grad_(trained) if bias else None
    factors: list[Any] = [None, None]
    if rank:
        a = draw(rank, num_inputs, seed=seed + 2, scale=num_inputs**-0.5, device=device)
        b = draw(num_outputs, rank, seed=seed + 3, scale=0.3, device=device)
        factors = [a.requires_grad_(), b.requires_grad_()]
    return Layer((weight,), offset, *factors, scaling=0.7)


def plain(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """In float32"""
    y = F.linear(x, layer.base[0].float(), None if layer.bias is None else layer.bias.float())
    return y if layer.a is None or layer.b is None else y + F.linear(F.linear(x, layer.a) * layer.scaling, layer.b)


def wanted(layers: list[Layer]) -> list[torch.Tensor]:
    return [
        t for layer in layers for t in (*layer.base, layer.bias, layer.a, layer.b) if t is not None and t.requires_grad
    ]


def values_and_gradients(outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [draw(*y.shape, seed=7 + number, device=y.device.type).to(y.dtype) for number, y in enumerate(outputs)]
    return [y.detach() for y in outputs] + [g.detach() for g in torch.autograd.grad(outputs, inputs, given)]


WAYS = {
    "adapters, weights quantized once": (4, False, True),
    "adapters": (4, False, False),
    "trained": (0, True, False),
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 300])
def test_layers_on_one_input_err_by_their_codes_rounding(num_tokens: int, way: str, device: str) -> None:
    rank, trained, once = WAYS[way]
    sizes = ((48, 1), (16, 0), (32, 0))
    layers = [
        draw_layer(o, 32, rank if o != 32 else 0, trained, bool(bias), seed=o, device=device) for o, bias in sizes
    ]
    x = draw(num_tokens, 32, seed=9, device=device, dtype=layers[0].base[0].dtype).requires_grad_()
    coded = quantize_weights([layer.base[0] for layer in layers]) if once else None
    found = values_and_gradients(fp8_linears(x, layers, coded), [x, *wanted(layers)])
    wide = x.float()
    expected = values_and_gradients(tuple(plain(layer, wide) for layer in layers), [x, *wanted(layers)])
    assert [t.shape for t in found] == [t.shape for t in expected]
    limit = (2.2 if num_tokens < 17 else 1.3) * ROUNDING
    assert all(gap(a, b) < limit for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [0, 17, 300])
def test_a_gated_mlp_errs_by_the_rounding_of_three_matmuls(
    num_tokens: int, way: str, activation: str, device: str
) -> None:
    rank, trained, once = WAYS[way]
    layers = [
        draw_layer(o, i, rank, trained, o == 48, seed=number, device=device)
        for number, (o, i) in enumerate([(48, 32)] * 2 + [(32, 48)])
    ]
    x = draw(num_tokens, 32, seed=9, device=device, dtype=layers[0].base[0].dtype).requires_grad_()
    coded = (
        [quantize_weights([layer.base[0] for layer in group]) for group in (layers[:2], layers[2:])]
        if once
        else [None, None]
    )
    found = values_and_gradients((fp8_mlp(x, *layers, activation, *coded),), [x, *wanted(layers)])
    wide = x.float()
    h = ACTIVATIONS[activation](plain(layers[0], wide)) * plain(layers[1], wide)
    expected = values_and_gradients((plain(layers[2], h),), [x, *wanted(layers)])
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert all(gap(a, b) < 3 * ROUNDING for a, b in zip(found, expected, strict=True))


def test_no_gradient_is_computed_for_an_input_that_wants_none() -> None:
    layer = draw_layer(32, 16, 4, False, False)
    (y,) = fp8_linears(draw(5, 16), [layer])
    y.sum().backward()
    assert layer.a is not None and layer.a.grad is not None and layer.base[0].grad is None


@pytest.mark.ci
def test_one_compiled_graph_serves_every_number_of_tokens_and_gives_the_same_numbers() -> None:
    layers = [
        draw_layer(48, 32, 4, False, False, seed=1),
        draw_layer(48, 32, 4, False, False, seed=2),
        draw_layer(32, 48, 4, False, False),
    ]
    coded = quantize_weights([layer.base[0] for layer in layers[:2]])

    def block(x: torch.Tensor) -> torch.Tensor:
        g, u = fp8_linears(x, layers[:2], coded)
        return fp8_mlp(x + 1, *layers, "silu", coded) + (g * u).sum()

    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=count, bw_compiler=count), dynamic=True)
    for num_tokens in (24, 40, 17):
        x = draw(num_tokens, 32).requires_grad_()
        eager = values_and_gradients((block(x),), [x, *wanted(layers)])
        found = values_and_gradients((compiled(x),), [x, *wanted(layers)])
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, eager, strict=True))
    assert len(graphs) == 2  # forward and backward


# -- GPU kernels against the emulation


@pytest.mark.gpu
def test_triton_gives_the_codes_of_plain_torch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernels, why = select.load_triton(device)
    if not architecture_of(device).multiplies_fp8:
        pytest.skip("no fp8 on this GPU")
    assert kernels is not None, why
    for num_rows, width in ((1, 16), (17, 48), (129, 4096), (40, 14336), (9, 28672)):
        x, y = (draw(num_rows, width, seed=seed, dtype=torch.bfloat16, device="cuda") for seed in (0, 1))
        factors = draw(2 * width, seed=3, device="cuda").exp()
        both = torch.cat([x, y], 1)
        scales = reference.stacked_reference([x, y])[1]
        pairs = [
            (kernels.quantize_rows([x]), reference.rows_reference([x])),
            (kernels.quantize_rows([x, both[:, width:]], factors), reference.rows_reference([x, y], factors)),
            (kernels.quantize_stacked([x, y]), reference.stacked_reference([x, y])),
            ([kernels.transpose([x, y], scales, True)], [reference.transpose_reference([x, y], scales, True)]),
        ]
        for found, expected in pairs:
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True)
            )
        for activation in ACTIVATIONS:
            g, u = both[:, :width], both[:, width:]
            near = [(kernels.gated_rows(g, u, activation)[0], reference.gated_reference(g, u, activation)[0])]
            back = (y, g, u, factors, activation, True)
            near += zip(
                kernels.gated_rows_backward(*back)[:2], reference.gated_backward_reference(*back)[:2], strict=True
            )
            assert all(gap(a, b) < 1e-3 for a, b in near)
            h, codes, scales_h = kernels.gated_rows(g, u, activation)
            assert torch.equal(codes.float(), reference.rows_reference([h])[0].float()) and torch.equal(
                scales_h, reference.rows_reference([h])[1]
            )


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 17, 512])
def test_products_of_the_gpu_equal_the_emulation(num_tokens: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not select.has_scaled_mm(device):
        pytest.skip("no fp8 with a scale a row on this GPU")
    x, w = (
        draw(num_tokens, 1024, device="cuda", dtype=torch.bfloat16),
        draw(48, 1024, seed=1, device="cuda", dtype=torch.bfloat16),
    )
    given = (*ops.quantize_rows([x]), *ops.quantize_rows([w]), torch.bfloat16, w[:, 0].contiguous())
    assert (
        gap(select.scaled_mm(*given), reference.matmul_reference(*given)) < 4e-3
    )  # a rounding to bfloat16, and the order of sums
