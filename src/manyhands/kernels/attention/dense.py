"""Causal attention over rows of one length, by the fastest kernel that this device has and that passes a numeric
self-test.

On an H200 cuDNN takes half the time of FlashAttention 2 (1.9 against 3.7 ms for 2 x 4,096 tokens, 32 heads, forward and
backward), and its gradients are as near to float32 (0.25 to 0.30 %). It wants rows of one length: packs of mixed
lengths take another kernel. Long rows are computed a part of the heads at a time: the workspace of cuDNN's backward
pass grows with tokens times heads, 4 GiB of 131,072 tokens with 32 heads of 128 dimensions. Knows nothing of models,
packs or batches.

Shapes: b rows, t positions, h query heads, g key-value heads (h a multiple of g), d dimensions a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from manyhands.core import limits
from manyhands.core.limits import count_head_parts
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
    _, num_heads, length, dim = query.shape
    num_parts = count_head_parts(length, num_heads, key.shape[1], dim, query.element_size())
    if num_parts > 1:
        return attend_in_parts(query, key, value, scaling, name, num_parts)[0]
    keeps = torch.is_grad_enabled()  # the sums of rows, for the backward pass
    return _run_forward(query, key, value, scaling, name, keeps)[0]


def _run_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, name: str, keeps: bool
) -> Any:
    """A kernel's results, of which the first two are the output and the sums of rows."""
    aten = torch.ops.aten
    if name == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(query, key, value, None, keeps, 0.0, True, scale=scaling)
    if query.is_cuda:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)


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


# -- a part of the heads at a time: operators of our own, as compiled code would hold the results of all parts at once

_sums_dims: dict[str, int] = {}  # dimensions of the sums of rows that a kernel gives: 3, or 4 with a last one of 1


def split_heads(num_parts: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of each part's heads, of tensors (b, heads, ...)."""
    return zip(*(x.chunk(num_parts, 1) for x in tensors), strict=True)


def _compact(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A part of the heads in memory of its own where offsets within those of ``whole`` need more than 32 bits."""
    return x.contiguous() if whole.numel() > limits.MAX_STRIDED_VALUES else x


def _empty_rows(x: torch.Tensor) -> torch.Tensor:
    """Like ``x`` (b, heads, t, d), in memory (b, t, heads, d), as models take and give it."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _store(results: tuple[torch.Tensor, ...], *places: torch.Tensor) -> None:
    for place, result in zip(places, results, strict=True):
        place.copy_(result)


@torch.library.custom_op(
    "manyhands::attend_in_parts",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float? scale, str name, int num_parts) -> (Tensor, Tensor)",
)
def attend_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, name: str, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (b, h, t, d), and the logarithms of the softmax's denominators (b, h, t), which have no gradient.

    ``num_parts`` divides g. Beside the output one part's is held.
    """
    out, sums = _empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for *part, out_part, sums_part in split_heads(num_parts, q, k, v, out, sums):
        q_part, k_part, v_part = (_compact(x, q) for x in part)
        found, logarithms = _run_forward(q_part, k_part, v_part, scale, name, keeps=True)[:2]
        _sums_dims[name] = logarithms.dim()
        _store((found, logarithms.view(sums_part.shape)), out_part, sums_part)
        del found, logarithms  # before the next part's
    return out, sums


@torch.library.custom_op(
    "manyhands::attend_in_parts_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, float? scale, str name, "
    "int num_parts) -> (Tensor, Tensor, Tensor)",
)
def attend_in_parts_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float | None,
    name: str,
    num_parts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q (b, h, t, d), k and v (b, g, t, d). Beside these one part's are held, and its workspace."""
    # Before torch 2.12 cuDNN's graphs are kept by the strides of q, k and v alone: those of the others must follow.
    gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = _empty_rows(q), _empty_rows(k), _empty_rows(v)
    for *part, dq, dk, dv in split_heads(num_parts, gradient, q, k, v, out, sums, *gradients):
        _store(_run_backward(name, scale, *(_compact(x, q) for x in part)), dq, dk, dv)
    return gradients


def _run_backward(name: str, scale: float | None, *tensors: torch.Tensor) -> Any:
    """Gradients of q, k and v, from the arguments of ``attend_in_parts_backward``, of one part."""
    gradient, q, k, v, out, sums = tensors
    aten, length, sums = torch.ops.aten, q.shape[2], sums.contiguous()
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    bounds = (None, None, length, length)
    if name == "cudnn":
        sums = sums.view(*sums.shape, *(1,) * (_sums_dims[name] - 3))
        backward = aten._scaled_dot_product_cudnn_attention_backward
        return backward(gradient, q, k, v, out, sums, unused, unused, None, *bounds, 0.0, True, scale=scale)
    if q.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_backward
        return backward(gradient, q, k, v, out, sums, *bounds, 0.0, True, unused, unused, scale=scale)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, out, sums, 0.0, True, scale=scale)


@attend_in_parts.register_fake
def _(q, k, v, scale, name, num_parts):  # type: ignore[no-untyped-def]
    return _empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@attend_in_parts_backward.register_fake
def _(gradient, q, k, v, out, sums, scale, name, num_parts):  # type: ignore[no-untyped-def]
    return _empty_rows(q), _empty_rows(k), _empty_rows(v)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *ctx.others = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *attend_in_parts_backward(gradient, *ctx.saved_tensors, *ctx.others), None, None, None


attend_in_parts.register_autograd(_backward, setup_context=_keep_for_backward)
