"""Causal attention over packs whose heads have sinks: learned scores that take a share of the softmax and have no value
(Xiao et al. 2023, https://arxiv.org/abs/2309.17453, as gpt-oss learns them).

Any kernel without sinks computes it exactly. Of its output o and the logarithm l of its softmax's denominator, a sink s
makes o' = o sigmoid(l - s) and l' = log(exp(l) + exp(s)). A kernel's backward pass takes probabilities from l' and
the row's sum of gradient times output from o', so given these two in place of its own results it returns the gradients
of q, k and v. That of s is minus the sum over rows of exp(s - l') times the row's sum.

Shapes: t positions of all documents, h query heads, g key-value heads (h a multiple of g), d dimensions a head, n
documents; ``cu_seq_lens`` (n + 1) int32 holds where documents begin, and t. ``window``: positions that a query sees to
its left, itself not counted; -1 for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from manyhands.kernels.attention.flash4 import flash4_backward, flash4_forward

TAKES_GROUPS = (
    "enable_gqa" in inspect.signature(varlen_attn).parameters
)  # torch 2.12 and later; asked once: compiled code cannot


def _varlen_forward(q, k, v, cu_seq_lens, max_length, scale, window):  # type: ignore[no-untyped-def]
    extra = {"enable_gqa": q.shape[1] != k.shape[1]} if TAKES_GROUPS else {}
    bounds = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    return torch.ops.torch_attn._varlen_attn(q, k, v, *bounds, window < 0, scale, [window, 0], **extra)[:2]


def _varlen_backward(  # type: ignore[no-untyped-def]
    gradient, q, k, v, out, lse, cu_seq_lens, max_length, scale, window
):
    bounds = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    return torch.ops.torch_attn._varlen_attn_backward(
        gradient, q, k, v, out, lse, *bounds, window < 0, unused, scale, [window, 0]
    )


PASSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash4": (flash4_forward, flash4_backward),
    "varlen": (_varlen_forward, _varlen_backward),
}
"""Kernels' forward pass, (q, k, v, cu_seq_lens, max_length, scale, window) -> out (t, h, d), lse (h, t); and backward,
(gradient, q, k, v, out, lse, and the last four) -> dq, dk, dv. torch's public ``varlen_attn`` drops lse's gradient."""


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int,
    kernel: str,
) -> torch.Tensor:
    """Each document by itself. ``query`` (t, h, d), ``key`` and ``value`` (t, g, d), ``sinks`` (h) -> (t, h, d).

    ``kernel``: of ``PASSES``. ``scale`` None is d ** -0.5.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "varlen" and not TAKES_GROUPS and key.shape[1] != query.shape[1]:
        repeat = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    out: torch.Tensor = _WithSinks.apply(
        query, key, value, sinks, cu_seq_lens, kernel, max_length, float(scale), window
    )
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        kernel: str,
        *numbers: Any,
    ) -> torch.Tensor:
        out, lse = PASSES[kernel][0](query, key, value, cu_seq_lens, *numbers)
        wide = sinks.to(lse.dtype)[:, None]
        out = out * torch.sigmoid(lse - wide).T[..., None]
        # Compiled by torch 2.11, a forward pass that returns a no-op conversion has gradients of zero.
        if out.dtype != query.dtype:
            out = out.to(query.dtype)
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.save_for_backward(query, key, value, sinks, cu_seq_lens, out, torch.logaddexp(lse, wide))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, cu_seq_lens, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        tensors = (gradient, query, key, value, out, lse, cu_seq_lens)
        for_inputs = PASSES[ctx.kernel][1](*tensors, *ctx.numbers)
        for_sinks = None
        if ctx.needs_input_grad[3]:
            rows = (gradient.to(lse.dtype) * out).sum(-1).T  # (h, t)
            for_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * rows).sum(1).to(sinks.dtype)
        return *for_inputs, for_sinks, *[None] * (2 + len(ctx.numbers))
