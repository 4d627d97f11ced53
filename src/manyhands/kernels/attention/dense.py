"""Causal attention over rows of one length, by the fastest kernel that this device has and that passes a numeric
self-test.

On an H200 cuDNN takes half the time of FlashAttention 2 (1.9 against 3.7 ms for 2 x 4,096 tokens, 32 heads, forward and
backward), and its gradients are as near to float32 (0.25 to 0.30 %). It wants rows of one length: packs of mixed
lengths take another kernel. Knows nothing of models, packs or batches.

Shapes: b rows, t positions, h query heads, g key-value heads (h a multiple of g), d dimensions a head.
"""

from __future__ import annotations

from functools import cache

import torch

from manyhands.kernels.attention.reference import ALLOWED, error_ratio
from manyhands.kernels.backend import Backend

ORDER = ("cudnn", "flash")
PROBE_ROWS, PROBE_LENGTH = 2, 200


def attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, name: str
) -> torch.Tensor:
    """Causal attention of (b, h, t, d) over (b, g, t, d) -> (b, h, t, d). ``name`` is one of ``choose_dense``'s.

    By torch's operators and not ``F.scaled_dot_product_attention`` within ``sdpa_kernel``: torch.compile keeps no graph
    with that on the disk, and every start would trace the backward pass again.
    """
    aten = torch.ops.aten
    if name == "cudnn":
        keeps = torch.is_grad_enabled()  # the sums of rows, for the backward pass
        out = aten._scaled_dot_product_cudnn_attention(query, key, value, None, keeps, 0.0, True, scale=scaling)
    elif query.is_cuda:
        out = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)
    else:
        out = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)
    return out[0]  # type: ignore[no-any-return]


@cache
def choose_dense(device: torch.device, dtype: torch.dtype, num_heads: int, num_groups: int, dim: int) -> Backend:
    """The first of ``ORDER`` that runs here and whose output and gradients are as near to float32 as the
    reference's are; its name is empty where none does.
    """
    if device.type != "cuda":
        return Backend("", f"the device is {device.type}")
    if dtype not in (torch.bfloat16, torch.float16):
        return Backend("", f"{str(dtype).removeprefix('torch.')} is computed by torch's own attention")
    reasons = []
    for name in ORDER:
        if name == "cudnn" and torch.are_deterministic_algorithms_enabled():
            reasons.append("cudnn sums gradients in no fixed order")
            continue
        try:
            worst = compare(name, device, dtype, num_heads, num_groups, dim)
        except RuntimeError as error:
            reasons.append(f"{name} does not run here: {str(error).splitlines()[0][:120]}")
            continue
        if worst <= ALLOWED:
            return Backend(name, "; ".join(reasons))
        reasons.append(f"{name} deviates by {worst:.1f} times the reference's error")
    return Backend("", "; ".join(reasons))


def compare(name: str, device: torch.device, dtype: torch.dtype, num_heads: int, num_groups: int, dim: int) -> float:
    """Error of output and gradients, as a multiple of the reference's in ``dtype``; inf for nan."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = [x.unflatten(0, (PROBE_ROWS, PROBE_LENGTH)).transpose(1, 2) for x in (query, key, value)]
        return attend_dense(rows[0], rows[1], rows[2], None, name).transpose(1, 2).flatten(0, 1)

    return error_ratio(attend, [PROBE_LENGTH] * PROBE_ROWS, (num_heads, num_groups), dim, -1, dtype, device)
