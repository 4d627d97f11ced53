"""Attention over packs by FlashAttention 4: when it is chosen, its operators on a stand-in, and the real kernels on a
GPU.

On a Hopper or Blackwell GPU with the package flash-attn-4: ``pytest tests/kernels/test_flash4.py -m gpu``.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from manyhands.core import limits
from manyhands.core.machine import GpuArchitecture
from manyhands.kernels.attention import flash4
from manyhands.kernels.attention.flash4 import attend_flash4, bind, choose_packed, compare, find_obstacle, try_flash4
from manyhands.kernels.attention.reference import ALLOWED, attend_reference
from manyhands.kernels.backend import architecture_of
from tests.kernels.flash4_stub import interface

CPU = torch.device("cpu")
HALF = torch.bfloat16
LENGTHS = (3, 0, 30, 1, 17, 0)


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    """What a test has bound holds for the process."""
    before = flash4._calls
    yield
    flash4._calls = before
    choose_packed.cache_clear()  # it would answer without binding again


def attempt(load: Callable[[], Any], with_window: bool = True) -> str:
    return try_flash4(CPU, HALF, 4, 2, 16, with_window=with_window, load=load)


def pack(
    lengths: tuple[int, ...], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """q, k and v, a gradient of the output, and cu_seq_lens."""
    draw = torch.Generator().manual_seed(sum(lengths) + dim)
    q, k, v, given = (
        torch.randn(sum(lengths), n, dim, generator=draw).to(device, dtype)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], given, bounds


def with_gradients(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], given: torch.Tensor
) -> list[torch.Tensor]:
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, given.to(out.dtype))]


# -- the measure


@pytest.mark.parametrize("window", [-1, 0, 4])
def test_the_measure_is_masked_attention(window: int) -> None:
    (q, k, v), _, bounds = pack(LENGTHS, (4, 2), 8, torch.float64)
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    seen = (documents[:, None] == documents[None]) & (distance >= 0) & (distance <= (window if window >= 0 else len(q)))
    heads_first = [x.detach().transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=seen, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(attend_reference(q, k, v, bounds, 0.3, window), expected, rtol=1e-12, atol=1e-12)


# -- when it is chosen


@pytest.mark.parametrize(
    "device, dtype, architecture, reason",
    [
        ("cpu", HALF, None, "the device is cpu"),
        ("cuda", torch.float32, GpuArchitecture("nvidia", (9, 0)), "does not compute in float32"),
        ("cuda", HALF, GpuArchitecture("amd", gfx="gfx942"), "needs an NVIDIA GPU"),
        ("cuda", HALF, GpuArchitecture("nvidia", (8, 0)), "this GPU has compute capability 8.0"),
        ("cuda", HALF, GpuArchitecture("nvidia", (12, 0)), "this GPU has compute capability 12.0"),
        ("cuda", HALF, GpuArchitecture("nvidia", (9, 0)), ""),
        ("cuda", torch.float16, GpuArchitecture("nvidia", (10, 3)), ""),
    ],
)
def test_what_stands_against_it_is_said(
    device: str, dtype: torch.dtype, architecture: GpuArchitecture | None, reason: str
) -> None:
    found = find_obstacle(device, dtype, architecture)
    assert reason in found and bool(found) == bool(reason)


def test_a_cpu_computes_packs_by_varlen_and_says_why() -> None:
    chosen = choose_packed(CPU, HALF, 4, 2, 16)
    assert chosen.name == "varlen" and chosen.reason == "the device is cpu"


def test_what_passes_the_self_test_is_taken() -> None:
    assert attempt(interface) == ""


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"forward_bias": 0.1}, "deviates by"),
        ({"gradient_factor": 1.05}, "deviates by"),
        ({"forward_bias": float("nan")}, "deviates by inf"),
        (
            {"error": AssertionError("head_dim is not supported\nand more")},
            "does not run here: AssertionError: head_dim is not supported",
        ),
    ],
)
def test_what_fails_the_self_test_is_not(wrong: dict[str, Any], reason: str) -> None:
    found = attempt(lambda: interface(**wrong))
    assert reason in found and "and more" not in found


def test_windows_are_tested_where_the_model_has_some() -> None:
    def load() -> Any:
        return interface(window_ignored=True)

    assert attempt(load, with_window=False) == ""
    assert "deviates with a window of 33" in attempt(load)


def test_an_absent_or_broken_package_is_said() -> None:
    def broken() -> Any:
        raise OSError("libcuda.so.1: cannot open\nshared object file")

    def part_missing() -> Any:
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    if importlib.util.find_spec("flash_attn") is None:
        assert attempt(flash4.import_interface) == "flash-attn-4 is not installed"
    assert attempt(broken) == "flash-attn-4 cannot be imported: OSError: libcuda.so.1: cannot open"
    assert attempt(part_missing) == "flash-attn-4 cannot be imported: No module named 'cutlass'"


def test_another_version_is_refused_before_it_runs() -> None:
    def fewer(q, k, v):  # type: ignore[no-untyped-def]
        raise AssertionError("called")

    def _flash_attn_bwd(q, k, v, out, dout, lse, extra, **others):  # type: ignore[no-untyped-def]
        raise AssertionError("called")

    module = interface()
    assert "has other functions" in bind(types.SimpleNamespace(flash_attn_varlen_func=fewer))
    module.flash_attn_varlen_func = fewer
    assert "(fewer: cu_seqlens_q, cu_seqlens_k" in bind(module)
    module = interface()
    module._flash_attn_bwd = _flash_attn_bwd
    assert "another signature (_flash_attn_bwd: " in attempt(lambda: module)


# -- the operators, on the stand-in


@pytest.fixture
def bound() -> None:
    calls = bind(interface())
    assert not isinstance(calls, str)
    flash4._calls = calls


def test_unbound_operators_refuse() -> None:
    flash4._calls = None
    (q, k, v), _, bounds = pack(LENGTHS, (4, 2), 8, HALF)
    with pytest.raises(RuntimeError, match="not chosen"):
        attend_flash4(q, k, v, bounds, 32, None, -1)


@pytest.mark.parametrize("window", [-1, 0, 4])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_gradients_pass_through_the_operators(bound: None, heads: tuple[int, int], window: int) -> None:
    inputs, given, bounds = pack(LENGTHS, heads, 8, torch.float64)
    found = with_gradients(lambda *qkv: attend_flash4(*qkv, bounds, 32, 0.3, window), inputs, given)
    expected = with_gradients(lambda *qkv: attend_reference(*qkv, bounds, 0.3, window), inputs, given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_operators_say_their_shapes_and_gradients_to_torch(bound: None) -> None:
    inputs, given, bounds = pack(LENGTHS, (4, 2), 8, torch.float32)
    torch.library.opcheck(flash4.flash4_forward, (*inputs, bounds, 32, 0.3, -1))
    saved = (given, *(x.detach() for x in inputs), given, torch.zeros(4, sum(LENGTHS)), bounds, 32, 0.3, 4)
    torch.library.opcheck(flash4.flash4_backward, saved)


def test_views_and_expanded_gradients_arrive_whole(bound: None) -> None:
    """What transformers hands over is transposed, and a sum's gradient is one number for all."""
    (q, k, v), _, bounds = pack(LENGTHS, (4, 2), 8, torch.float64)
    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(attend_flash4(*turned, bounds, 32, None, -1).sum(), turned)
    expected = torch.autograd.grad(attend_reference(q, k, v, bounds, None, -1).sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_packs_of_any_fill_run_one_graph(bound: None) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, bounds: attend_flash4(q * 2, k, v, bounds, 32, None, 4) * 3, backend=backend, fullgraph=True
    )
    for lengths in ((3, 30, 1), (17, 0, 5), (32, 32, 9)):
        inputs, given, bounds = pack(lengths, (4, 2), 8, torch.float64)
        for x in (*inputs, given):
            torch._dynamo.mark_dynamic(x, 0)
        found = with_gradients(lambda *qkv: compiled(*qkv, bounds), inputs, given)  # noqa: B023
        expected = with_gradients(lambda q, k, v: attend_reference(q * 2, k, v, bounds, None, 4) * 3, inputs, given)  # noqa: B023
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("heads, parts", [((8, 4), 4), ((8, 2), 2), ((4, 4), 4), ((4, 1), 1)])
def test_heads_of_long_packs_are_computed_in_parts(
    bound: None, heads: tuple[int, int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ATTENTION_WORKSPACE", 1)
    ran, calls = [], flash4._bound()
    forward = lambda q, *others: ran.append(q.shape[1]) or calls.forward(q, *others)  # noqa: E731
    monkeypatch.setattr(flash4, "_calls", flash4.Calls(forward, calls.backward))
    inputs, given, bounds = pack(LENGTHS, heads, 8, torch.float64)
    found = with_gradients(lambda *qkv: attend_flash4(*qkv, bounds, 32, None, 4), inputs, given)
    expected = with_gradients(lambda *qkv: attend_reference(*qkv, bounds, None, 4), inputs, given)
    assert ran == [heads[0] // parts] * parts
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# -- the real kernels

MANY = tuple(1 + i % 5 for i in range(300))  # above 256 documents the package finds them by other kernels
RAGGED = (700, 1, 13, 0, 512, 129, 0, 0)


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        pytest.skip("needs the package flash-attn-4")
    device = torch.device("cuda", 0)
    obstacle = find_obstacle("cuda", HALF, architecture_of(device))
    if obstacle:
        pytest.skip(obstacle)
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("heads, dim", [((32, 8), 128), ((9, 3), 64), ((16, 8), 256), ((4, 4), 128)])
def test_the_real_kernels_pass_the_self_test(gpu: torch.device, heads: tuple[int, int], dim: int) -> None:
    chosen = choose_packed(gpu, HALF, *heads, dim, 1024)
    assert (chosen.name, chosen.reason) == ("flash4", "")
    assert compare(gpu, torch.float16, *heads, dim, -1) <= ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("compiled, in_parts", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("lengths", [RAGGED, MANY, (4096,)])
@pytest.mark.parametrize("window", [-1, 0, 99])
def test_the_real_kernels_agree_with_float64(
    gpu: torch.device,
    window: int,
    lengths: tuple[int, ...],
    compiled: bool,
    in_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if in_parts:
        monkeypatch.setattr(limits, "MAX_ATTENTION_WORKSPACE", 1)
    assert choose_packed(gpu, HALF, 32, 8, 128, 1024).name == "flash4"
    inputs, given, bounds = pack(lengths, (32, 8), 128, HALF, gpu)
    bound = 1 << (max(lengths) - 1).bit_length()
    torch._dynamo.reset()
    attend = torch.compile(attend_flash4, fullgraph=True, dynamic=True) if compiled else attend_flash4
    found = with_gradients(lambda *qkv: attend(*qkv, bounds, bound, None, window), inputs, given)
    plain = with_gradients(lambda *qkv: attend_reference(*qkv, bounds, None, window), inputs, given)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = with_gradients(lambda *qkv: attend_reference(*qkv, bounds, None, window), wide, given)
    nothing = (
        1e-5 * given.double().norm()
    )  # a query that sees itself alone has no gradient, and the plain way none to the last bit
    for ours, theirs, reference in zip(found, plain, exact, strict=True):
        assert (ours - reference).norm() <= ALLOWED * (theirs - reference).norm() + nothing


@pytest.mark.gpu
def test_real_packs_of_any_fill_compile_once(gpu: torch.device) -> None:
    assert choose_packed(gpu, HALF, 32, 8, 128).name == "flash4"
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(
            lambda q, k, v, bounds: attend_flash4(q * 2, k, v, bounds, 1024, None, -1) * 3, fullgraph=True
        )
        for lengths in (RAGGED, (1000, 24, 7, 1, 0, 0, 0, 0), (128,) * 8):
            inputs, given, bounds = pack(lengths, (32, 8), 128, HALF, gpu)
            for x in (*inputs, given):
                torch._dynamo.mark_dynamic(x, 0)
            found = with_gradients(lambda *qkv: compiled(*qkv, bounds), inputs, given)  # noqa: B023
            eager = with_gradients(
                lambda q, k, v: attend_flash4(q * 2, k, v, bounds, 1024, None, -1) * 3,  # noqa: B023
                inputs,
                given,
            )
            for one, other in zip(found, eager, strict=True):  # gradients of queries are summed in any order
                assert (one - other).norm() <= 2e-3 * other.norm()
    torch._dynamo.reset()
