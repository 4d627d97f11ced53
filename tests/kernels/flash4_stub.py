"""A stand-in for the package flash-attn-4 on the CPU: its two functions, with its own argument names, by plain
torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def interface(
    *,
    forward_bias: float = 0.0,
    gradient_factor: float = 1.0,
    window_ignored: bool = False,
    error: Exception | None = None,
) -> Any:
    """The package's module. The arguments make it wrong in the output, in the gradients, with windows, or let it
    fail.
    """

    def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        deterministic=False,
        return_lse=False,
    ):
        if error is not None:
            raise error
        assert causal and return_lse and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max() and window_size[1] in (0, None)
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        _, _, wide_v, weights, lse = _weigh(
            q, k, v, cu_seqlens_q, softmax_scale, None if window_ignored else window_size[0]
        )
        return torch.einsum("hqk,khd->qhd", weights, wide_v).to(q.dtype) + forward_bias, lse

    def _flash_attn_bwd(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
    ):
        assert causal and lse.shape == (q.shape[1], q.shape[0]) and out.shape == dout.shape and lse.is_contiguous()
        # below autograd, as a kernel is: the gradients are written out
        wide_q, wide_k, wide_v, weights, _ = _weigh(q, k, v, cu_seqlens_q, softmax_scale, window_size_left)
        wide_dout = dout.to(wide_q.dtype)
        inner = torch.einsum("qhd,khd->hqk", wide_dout, wide_v)
        scores = weights * (inner - (weights * inner).sum(-1, keepdim=True)) * softmax_scale
        gradients = [
            torch.einsum("hqk,khd->qhd", scores, wide_k),
            torch.einsum("hqk,qhd->khd", scores, wide_q).unflatten(1, (k.shape[1], -1)).sum(2),
            torch.einsum("hqk,qhd->khd", weights, wide_dout).unflatten(1, (k.shape[1], -1)).sum(2),
        ]
        return tuple((x * gradient_factor).to(q.dtype) for x in gradients)

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, _flash_attn_bwd=_flash_attn_bwd)


def _weigh(q, k, v, cu_seqlens, scale, left):  # type: ignore[no-untyped-def]
    """q, k and v in at least float32, k and v once for each query head; the softmax (h, t, t); logarithms of its
    denominators.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    documents = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:].long(), right=True)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    seen = (documents[:, None] == documents[None]) & (distance >= 0) & (distance <= (len(q) if left is None else left))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
    return q, k, v, scores.softmax(-1), scores.logsumexp(-1).float()
