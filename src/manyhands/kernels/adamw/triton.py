"""AdamW's update as one Triton kernel: every tensor is read once and written once. The arithmetic is
``reference.update_reference``'s.

Importing this needs Triton; ``select`` does so only on a GPU, and compares with the reference before use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manyhands.kernels.adamw.reference import AdamWTensors, Rates, Update, make_key, make_rows

BLOCK = 1024  # elements a program
NUM_WARPS = 4  # 8 elements a thread: 16 bytes of bfloat16 at a time


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _random_bits(key_pointer, count, at):  # type: ignore[no-untyped-def]
    """32 random bits an element, as ``adamw.random_bits``."""
    low = tl.load(key_pointer).to(tl.uint32, bitcast=True)
    high = tl.load(key_pointer + 1).to(tl.uint32, bitcast=True)
    first_low = tl.load(key_pointer + 2).to(tl.uint32, bitcast=True).to(tl.int64)
    first_high = tl.load(key_pointer + 3).to(tl.int64)
    step = count.to(tl.int32).to(tl.uint32, bitcast=True)
    index = first_low + (first_high << 32) + at
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    first = _mix(low ^ (step * golden))
    second = _mix(high + step)
    return _mix(_mix(index.to(tl.uint32) ^ first) ^ second ^ ((index >> 32).to(tl.uint32) * golden))


@triton.jit
def _round_to_bfloat16(values, bits):  # type: ignore[no-untyped-def]
    kept = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(tl.abs(values) < float("inf"), kept.to(tl.float32, bitcast=True), values)


@triton.jit
def _update_kernel(  # type: ignore[no-untyped-def]
    weight_pointer,
    gradient_pointer,
    exp_avg_pointer,
    exp_avg_sq_pointer,
    copy_pointer,
    row_pointer,
    factor_pointer,
    key_pointer,
    num_elements,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    COPIED: tl.constexpr,
    SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # passes 2**31 in large embeddings
    at = start + tl.arange(0, BLOCK)
    inside = at < num_elements
    weight = tl.load(weight_pointer + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_pointer + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avg_pointer + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_pointer + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.load(row_pointer)
    root = tl.load(row_pointer + 1)
    if SCALED:
        gradient = gradient * tl.load(factor_pointer)
    weight = weight - decay * weight
    exp_avg = beta1 * exp_avg + rest1 * gradient
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * gradient * gradient
    weight = weight - tl.div_rn(size * exp_avg, tl.div_rn(tl.sqrt_rn(exp_avg_sq), root) + eps)
    if STOCHASTIC:
        bits = _random_bits(key_pointer, tl.load(row_pointer + 2), at)
        weight = _round_to_bfloat16(weight, bits & 0xFFFF)
        exp_avg_sq = _round_to_bfloat16(exp_avg_sq, bits >> 16)
    tl.store(weight_pointer + at, weight.to(weight_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_pointer + at, exp_avg.to(exp_avg_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_pointer + at, exp_avg_sq.to(exp_avg_sq_pointer.dtype.element_ty), mask=inside)
    if COPIED:
        tl.store(copy_pointer + at, weight.to(copy_pointer.dtype.element_ty), mask=inside)


def update_triton(part: AdamWTensors, rates: Rates, factor: torch.Tensor | None) -> None:
    """What ``adamw.update_reference`` does. One launch, which waits for nothing."""
    num_elements = part.weight.numel()
    _update_kernel[(triton.cdiv(num_elements, BLOCK),)](
        part.weight,
        part.gradient,
        part.exp_avg,
        part.exp_avg_sq,
        part.weight if part.copy is None else part.copy,
        part.row,
        part.row if factor is None else factor,
        part.row if part.key is None else part.key,
        num_elements,
        rates.beta1,
        1 - rates.beta1,
        rates.beta2,
        1 - rates.beta2,
        rates.eps,
        rates.decay,
        COPIED=part.copy is not None,
        SCALED=factor is not None,
        STOCHASTIC=part.key is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def compare(device: torch.device, reference: Update) -> float:
    """Worst deviation from ``reference`` after three steps of a part longer than a block, as a multiple of what is
    allowed.
    """
    worst = 0.0
    for dtype, gradient_dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        mine, other = (_try(update, device, dtype, gradient_dtype) for update in (update_triton, reference))
        worst = max(worst, *(_deviation(one, two) for one, two in zip(mine, other, strict=True)))
    return worst


def _try(update: Update, device: torch.device, dtype: torch.dtype, gradient_dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    size = BLOCK + 77
    weight = torch.randn(size, generator=draw).to(device, dtype)
    copy = torch.empty_like(weight, dtype=torch.bfloat16) if dtype == torch.float32 else None
    moments = [torch.zeros_like(weight) for _ in range(2)]
    key = None if copy is not None else torch.tensor(make_key(1, 2, 2**33), dtype=torch.int32, device=device)
    factor = torch.tensor(0.3, device=device)
    for step in range(1, 4):
        gradient = torch.randn(size, generator=draw).to(device, gradient_dtype)
        row = make_rows(torch.tensor([float(step)], device=device), 1e-2, 0.9, 0.99)[0]
        update(
            AdamWTensors(weight, gradient, moments[0], moments[1], row, copy, key), Rates(0.9, 0.99, 1e-8, 1e-3), factor
        )
    return [weight, *moments, *([] if copy is None else [copy])]


def _deviation(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest, over what a last digit is to the tensor's largest value: 8 of float32 are allowed, 2 of bfloat16."""
    digits = 8 if wanted.dtype == torch.float32 else 2
    allowed = digits * torch.finfo(wanted.dtype).eps * wanted.float().abs().max()
    return float(((found.float() - wanted.float()).abs() / allowed).nan_to_num(nan=float("inf")).max())
