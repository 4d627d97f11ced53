"""A layer in NF4 holds bitsandbytes' own bytes, computes what bitsandbytes computes, and keeps no weight in 16 bits."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.convert import nf4
from manyhands.convert.nf4 import Nf4Linear, count_rows
from manyhands.core.errors import UserError

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = bitsandbytes.functional

# one row and several, whole and not, blocks that run across rows of the weight, an odd number of values
SHAPES = [(64, 64), (75, 96), (33, 75), (300, 200), (512, 256), (1, 5)]
DTYPES = [torch.float32, torch.bfloat16]
PARTITIONED = "aot_eager_decomp_partition"  # inductor's graphs, without compiling kernels


def linear(out: int, into: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out)
    return nn.Linear(into, out, bias=bias, dtype=dtype)


def quantised(base: nn.Linear, double_quant: bool = True) -> Nf4Linear:
    layer = Nf4Linear(base, double_quant)
    layer.fill(base.weight.detach())
    return layer


def plain_dequantise(packed: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The definition, in float32: a value is its code's level times its block's absolute maximum."""
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1).long()[: shape[0] * shape[1]]
    return (functional.get_4bit_type("nf4", device="cpu")[codes] * absmax.repeat_interleave(64)[: len(codes)]).view(
        shape
    )


@pytest.mark.ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    base = linear(*shape, dtype)
    layer = quantised(base)
    packed, state = functional.quantize_4bit(base.weight.data, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, statistics = layer.weight_codes.view(torch.uint8), layer.weight_statistics.view(torch.uint8)
    assert torch.equal(codes.view(-1)[: packed.numel()], packed.view(-1))
    assert torch.equal(statistics[:, :256].reshape(-1)[: state.absmax.numel()], state.absmax)
    assert torch.equal(layer.weight_statistics.view(torch.float32)[:, -2], state.state2.absmax)
    assert torch.equal(layer.weight_statistics.view(torch.float32)[:, -1], state.offset.expand(count_rows(shape)))
    absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(layer.weight, plain_dequantise(packed, absmax, shape).to(dtype))
    assert layer.weight.dtype == layer.weight_codes.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_that_are_not_quantized_are_those_of_bitsandbytes_too(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    base = linear(*shape, dtype)
    layer = quantised(base, double_quant=False)
    packed, state = functional.quantize_4bit(
        base.weight.data, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    maxima = layer.weight_statistics.view(torch.float32)
    assert maxima.shape == (count_rows(shape), 256) and maxima.view(-1)[state.absmax.numel() :].count_nonzero() == 0
    assert torch.equal(layer.weight_codes.view(torch.uint8).view(-1)[: packed.numel()], packed.view(-1))
    assert torch.equal(maxima.view(-1)[: state.absmax.numel()], state.absmax)
    assert torch.equal(layer.weight, plain_dequantise(packed, state.absmax, shape).to(dtype))
    assert not torch.equal(layer.weight, quantised(base).weight) or base.weight.numel() <= 64


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_gradient_are_those_of_linear4bit(dtype: torch.dtype, double_quant: bool) -> None:
    base = linear(192, 128, dtype)
    theirs = bitsandbytes.nn.Linear4bit(128, 192, compute_dtype=dtype, quant_type="nf4")
    theirs.weight = bitsandbytes.nn.Params4bit(
        base.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=double_quant
    )
    theirs.bias = base.bias
    theirs = theirs.to("cpu")  # quantises
    x = torch.randn(3, 7, 128, dtype=dtype, requires_grad=True)
    outputs = [module(x) for module in (quantised(base, double_quant), theirs)]
    assert torch.equal(*outputs)
    upstream = torch.randn_like(outputs[0])
    assert torch.equal(*(torch.autograd.grad(output, x, upstream)[0] for output in outputs))


def test_float64_dequantises_in_float32() -> None:
    layer = quantised(linear(96, 128, torch.float64))
    assert torch.equal(layer.weight, quantised(linear(96, 128, torch.float64).float()).weight.double())
    assert layer(torch.randn(2, 128, dtype=torch.float64)).dtype == torch.float64


def test_a_weight_quantised_in_pieces_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    base = linear(300, 200, torch.bfloat16)
    whole = quantised(base)
    monkeypatch.setattr(nf4, "CHUNK_VALUES", 128)
    pieces = quantised(base)
    assert torch.equal(whole.weight_codes.view(torch.uint8), pieces.weight_codes.view(torch.uint8))
    assert torch.equal(whole.weight_statistics.view(torch.uint8), pieces.weight_statistics.view(torch.uint8))


def test_one_value_takes_little_more_than_half_a_byte() -> None:
    layer = Nf4Linear(nn.Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16))
    stored = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert stored / 4096**2 == pytest.approx(1 / 2 + 1 / 64 + 8 / 16384, rel=1e-9)


def saved_bytes(run: object, *arguments: torch.Tensor) -> int:
    """Bytes of distinct tensors that autograd keeps for the backward pass, parameters left out."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(*arguments)  # type: ignore[operator]
    return sum(kept.values())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_dequantised_weight_is_kept_for_the_backward_pass(compiled: bool) -> None:
    layer = quantised(linear(256, 256, torch.bfloat16, bias=False))
    first = nn.Linear(8, 256, dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(first(x)))

    x = torch.randn(4, 8, dtype=torch.bfloat16)
    held = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert held
    function = torch.compile(run, fullgraph=True, backend=PARTITIONED) if compiled else run
    stored = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    assert saved_bytes(function, x) <= stored + 4 * x.numel() * 256 < 2 * 256 * 256 + stored


def test_compiled_and_recomputed_gradients_are_the_eager_ones() -> None:
    layer = quantised(linear(128, 128, torch.float32))
    x = torch.randn(2, 5, 128, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x).tanh())

    (expected,) = torch.autograd.grad(run(x).sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), x)
    assert torch.equal(recomputed, expected)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=PARTITIONED)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, expected)


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nf4.bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"manyhands\[qlora\]"):
        nf4.bitsandbytes()
    nf4.bitsandbytes.cache_clear()
