"""A stand-in for the package flash-attn-4 on the CPU: its two functions, with its own argument names, by plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from manyhands.kernels.flash4 import attend_plain


def interface(*, forward_bias: float = 0.0, gradient_factor: float = 1.0, error: Exception | None = None) -> Any:
    """The package's module. The arguments make it wrong in the output, in the gradients, or let it fail."""

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
        assert all(x.is_contiguous() for x in (q, k, v))
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
        out = attend_plain(*wide, cu_seqlens_q, softmax_scale, _window(window_size[0])).to(q.dtype)
        return out + forward_bias, torch.zeros(q.shape[1], q.shape[0])

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
        assert causal and lse.shape == (q.shape[1], q.shape[0]) and out.shape == dout.shape and dout.is_contiguous()
        with torch.enable_grad():
            wide = [x.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_() for x in (q, k, v)]
            again = attend_plain(*wide, cu_seqlens_q, softmax_scale, _window(window_size_left))
            gradients = torch.autograd.grad(again, wide, dout.to(again.dtype))
        return tuple((x * gradient_factor).to(q.dtype) for x in gradients)

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, _flash_attn_bwd=_flash_attn_bwd)


def _window(left: int | None) -> int:
    return -1 if left is None else left
