"""Attention with sinks by a kernel that has none: output and gradients, on a stand-in and by the real kernels on a GPU.

On a GPU: ``pytest tests/kernels/test_sinks.py -m gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.kernels.attention import sinks as module
from manyhands.kernels.attention.flash4 import choose_packed
from manyhands.kernels.attention.sinks import attend_with_sinks

LENGTHS = (3, 0, 30, 1, 17)


def scores_of(q: Any, k: Any, bounds: Any, scale: float, window: int) -> torch.Tensor:
    """(h, t, t), -inf where nothing is seen."""
    places = torch.arange(len(q), device=q.device)
    documents = torch.bucketize(places, bounds[1:].long(), right=True)
    distance = places[:, None] - places[None]
    seen = (documents[:, None] == documents[None]) & (distance >= 0) & (distance <= (window if window >= 0 else len(q)))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)


def reference(q: Any, k: Any, v: Any, sinks: Any, bounds: Any, scale: float, window: int) -> torch.Tensor:
    scores = scores_of(q, k, bounds, scale, window)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def forward(q: Any, k: Any, v: Any, bounds: Any, length: int, scale: float, window: int) -> Any:
    """What a kernel without sinks computes."""
    scores = scores_of(q, k, bounds, scale, window)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, length: int, scale: float, window: int
) -> Any:
    """From ``out`` and ``lse`` alone, as FlashAttention's (https://arxiv.org/abs/2205.14135, algorithm 4)."""
    groups = k.shape[1]
    weights = (scores_of(q, k, bounds, scale, window) - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
    inner = torch.einsum("qhd,khd->hqk", g, wide_v) - (g * out).sum(-1).T[..., None]
    for_scores = weights * inner * scale
    for_k, for_v = torch.einsum("hqk,qhd->khd", for_scores, q), torch.einsum("hqk,qhd->khd", weights, g)
    return torch.einsum("hqk,khd->qhd", for_scores, wide_k), *(
        x.unflatten(1, (groups, -1)).sum(2) for x in (for_k, for_v)
    )


def draw(heads: int, groups: int, dim: int, dtype: torch.dtype, device: str = "cpu", factor: int = 1) -> Any:
    generator = torch.Generator().manual_seed(0)
    lengths = [length * factor for length in LENGTHS]
    shapes = [(sum(lengths), n, dim) for n in (heads, groups, groups)] + [(heads,), (sum(lengths), heads, dim)]
    *inputs, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return [x.requires_grad_() for x in inputs], gradient, bounds, max(lengths)


@pytest.mark.parametrize("window", [-1, 0, 4])
def test_a_kernel_without_sinks_gives_output_and_gradients_exactly(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.PASSES, "plain", (forward, backward))
    inputs, gradient, bounds, longest = draw(4, 2, 8, torch.float64)
    out = attend_with_sinks(*inputs, bounds, longest, 0.3, window, "plain")
    wanted = reference(*inputs, bounds, 0.3, window)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(x, inputs, gradient) for x in (out, wanted))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_it_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, gradient, bounds, longest = draw(4, 2, 8, torch.float64)
    monkeypatch.setitem(module.PASSES, "plain", (forward, backward))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return attend_with_sinks(*tensors, bounds, longest, None, -1, "plain")

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*inputs), inputs, gradient) for f in (compiled, attend))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [-1, 33])
@pytest.mark.parametrize("kernel", ["varlen", "flash4"])
def test_the_real_kernels_agree_with_float64(kernel: str, window: int) -> None:
    """Errors are those of the same in bfloat16 by plain operators, at most one and a half times."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if kernel == "flash4":
        chosen = choose_packed(torch.device("cuda"), torch.bfloat16, 16, 2, 64, 33)
        if chosen.name != "flash4":
            pytest.skip(chosen.reason)
    inputs, gradient, bounds, longest = draw(16, 2, 64, torch.bfloat16, "cuda", factor=9)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = reference(*wide, bounds, 0.125, window)
    exact = [wanted, *torch.autograd.grad(wanted, wide, gradient.double())]
    plain = reference(*inputs, bounds, 0.125, window)
    allowed = [plain, *torch.autograd.grad(plain, inputs, gradient)]
    out = attend_with_sinks(*inputs, bounds, longest, 0.125, window, kernel)
    found = [out, *torch.autograd.grad(out, inputs, gradient)]
    compiled = torch.compile(attend_with_sinks, fullgraph=True)(*inputs, bounds, longest, 0.125, window, kernel)
    found += [compiled, *torch.autograd.grad(compiled, inputs, gradient)]
    for one, other, right in zip(found, allowed * 2, exact * 2, strict=True):
        error, usual = (float((x.double() - right).norm() / right.norm()) for x in (one, other))
        assert error < 1.5 * usual, (error, usual)
