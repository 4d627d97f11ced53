"""Causal attention by matmuls and a softmax, a document at a time: the fast kernels are compared with it before they
run.

Shapes: t positions of all documents, h query heads, g key-value heads (h a multiple of g), d dimensions a head, n
documents; ``cu_seq_lens`` (n + 1) int32 holds where documents begin, and t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

ALLOWED = 1.2  # a fast kernel's error, as a multiple of the reference's in the same dtype

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """``query`` (t, h, d), ``key`` and ``value`` (t, g, d) -> (t, h, d). Matmuls in their dtype, the softmax in
    float32 at least.

    ``scale`` None is d ** -0.5. ``window``: positions that a query sees to its left, itself not counted; -1 for all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = key.shape[1]
    lengths = cu_seq_lens.diff().tolist()
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qgrd,kgd->grqk", q.unflatten(1, (groups, -1)), k) * scale
        positions = torch.arange(len(q), device=q.device)
        distance = positions[:, None] - positions[None]
        hidden = (distance < 0) | (distance > (window if window >= 0 else len(q)))
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("grqk,kgd->qgrd", wide.softmax(-1).to(v.dtype), v).flatten(1, 2))
    return torch.cat(outs)


def error_ratio(
    attend: Attend,
    lengths: Sequence[int],
    heads: tuple[int, int],
    dim: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Error of ``attend`` against float64, as a multiple of the reference's in ``dtype``; inf for nan.

    The worst of output and gradients, each by its norm, over random documents of ``lengths``; ``heads`` are h and g.
    torch's own MATH attention is no measure: it widens half precision to float32 and rounds once, at the end.
    """
    draw = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    tensors = [torch.randn((sum(lengths), count, dim), generator=draw).to(device, dtype) for count in counts]
    cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_reference(query, key, value, cu_seq_lens, None, window)

    worst = 0.0
    found, allowed = _run(attend, tensors), _run(reference, tensors)
    exact = _run(reference, [x.double() for x in tensors])
    for ours, theirs, wanted in zip(found, allowed, exact, strict=True):
        error, expected_error = (float((x.double() - wanted).norm()) for x in (ours, theirs))
        worst = max(worst, error / expected_error) if math.isfinite(error) else math.inf
    return worst


def _run(attend: Attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and the three gradients."""
    with torch.enable_grad():
        query, key, value = (x.detach().requires_grad_() for x in tensors[:3])
        out = attend(query, key, value)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), tensors[3])]
