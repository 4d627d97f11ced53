"""The softmax of the fused loss as one Triton kernel: one program a row, two reads (the second mostly from cache), one
write.

Importing this needs Triton; ``select`` does so only on a GPU, and compares with the reference before use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192  # columns a program holds at once


@triton.jit
def _bend(logits_pointer, at, inside, logit_scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled and capped logits in float32, minus infinity outside; and tanh where there is a cap."""
    x = tl.load(logits_pointer + at, mask=inside, other=0.0).to(tl.float32) * logit_scale
    bent = x
    if CAPPED:
        bent = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = bent * softcap
    return tl.where(inside, x, -float("inf")), bent


@triton.jit
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits_pointer,
    row_stride,
    targets_pointer,
    weights_pointer,
    losses_pointer,
    hits_pointer,
    num_columns,
    logit_scale,
    softcap,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    METRICS: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * row_stride passes 2**31
    logits_pointer += row * row_stride
    target = tl.load(targets_pointer + row)
    factor = tl.where(target >= 0, 1.0, 0.0)
    if WEIGHTED:
        factor = factor * tl.load(weights_pointer + row).to(tl.float32)
    # read before any write: the reductions below keep the warps of a program together
    wanted = tl.load(logits_pointer + tl.maximum(target, 0)).to(tl.float32) * logit_scale
    if CAPPED:
        wanted = softcap * (2.0 * tl.sigmoid(2.0 * wanted / softcap) - 1.0)

    top = -float("inf")
    total = 0.0
    best = 0
    columns = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        at = start + columns
        x, _ = _bend(logits_pointer, at, at < num_columns, logit_scale, softcap, CAPPED)
        if METRICS:
            block_top, block_best = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.where(block_top > top, start + block_best, best)
        else:
            block_top = tl.max(x, 0)
        new_top = tl.maximum(top, block_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    log_sum = top + tl.log(total)
    tl.store(losses_pointer + row, (log_sum - wanted) * factor)
    if METRICS:
        tl.store(hits_pointer + row, (best == target).to(tl.int8))
    if WITH_GRAD:
        for start in range(0, num_columns, BLOCK):
            at = start + columns
            inside = at < num_columns
            x, bent = _bend(logits_pointer, at, inside, logit_scale, softcap, CAPPED)
            gradient = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
            if CAPPED:
                gradient = gradient * (1.0 - bent * bent)
            gradient = gradient * (factor * logit_scale)
            tl.store(logits_pointer + at, gradient.to(logits_pointer.dtype.element_ty), mask=inside)


def softmax_rows_triton(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    losses: torch.Tensor,
    hits: torch.Tensor | None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_grad: bool = True,
) -> None:
    """What ``reference.softmax_rows`` does; ``logits`` (m, v) with columns side by side, ``losses`` float32."""
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    if logits.stride(1) != 1 or not labels.is_contiguous():
        raise ValueError("the columns of logits, and labels, must lie side by side")
    block = min(triton.next_power_of_2(num_columns), MAX_BLOCK)
    _softmax_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        labels,
        labels if weights is None else weights.contiguous(),
        losses,
        labels if hits is None else hits.view(torch.int8),
        num_columns,
        logit_scale,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        WEIGHTED=weights is not None,
        METRICS=hits is not None,
        WITH_GRAD=with_grad,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )


@triton.jit
def _scale_kernel(  # type: ignore[no-untyped-def]
    values_pointer, factor_pointer, out_pointer, num_elements, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    values = tl.load(values_pointer + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_pointer).to(
        tl.float32
    )
    tl.store(out_pointer + at, values.to(out_pointer.dtype.element_ty), mask=inside)


def scale_triton(values: torch.Tensor, factor: torch.Tensor, *, out: torch.Tensor) -> None:
    """out = values * factor, 0-d, each element read and written once. All in one piece of memory."""
    if not (values.is_contiguous() and out.is_contiguous()):
        raise ValueError("values and their place must lie in one piece")
    _scale_kernel[(triton.cdiv(values.numel(), 1024),)](values, factor, out, values.numel(), BLOCK=1024, num_warps=4)


def compare(device: torch.device, dtype: torch.dtype, reference: Callable[..., None]) -> float:
    """Worst deviation from ``reference`` over rows longer than a block, as a multiple of what is allowed."""
    draw = torch.Generator().manual_seed(0)
    num_rows, num_columns = 5, MAX_BLOCK + 77
    start = (torch.randn(num_rows, num_columns, generator=draw) * 4).to(device, dtype)
    labels = torch.tensor([0, 1, num_columns - 1, MAX_BLOCK, -100], device=device)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0], device=device)
    worst = 0.0
    scaled = torch.empty_like(start)
    scale_triton(start.float(), weights[1], out=scaled)
    if not torch.equal(scaled, (start.float() * weights[1]).to(dtype)):
        return float("inf")
    for softcap in (None, 8.0):
        found = []
        for function in (softmax_rows_triton, reference):
            logits, losses = start.clone(), torch.empty(num_rows, device=device)
            hits = torch.zeros(num_rows, dtype=torch.bool, device=device)
            function(logits, labels, weights, losses, hits, logit_scale=0.7, softcap=softcap)
            found.append((logits.float(), losses, hits))
        (logits, losses, hits), (logits_ref, losses_ref, hits_ref) = found
        if not torch.equal(hits, hits_ref):
            return float("inf")
        rounding = max(torch.finfo(dtype).eps, 1e-5)
        worst = max(worst, float(((logits - logits_ref).abs() / (rounding * logits_ref.abs() + 1e-6)).max()))
        worst = max(worst, float((losses - losses_ref).abs().max()) / 1e-4)
    return worst
