"""AdamW's update as one Triton kernel: every tensor is read once and written once. The arithmetic is
``reference.update_reference``'s. Small parts share a launch, which takes the host longer than their update the device.

Importing this needs Triton; ``select`` does so only on a GPU, and compares with the reference before use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from manyhands.kernels.adamw.reference import (
    AdamWTensors,
    Rates,
    Update,
    UpdateAll,
    make_key,
    make_rows,
    one_by_one,
)

BLOCK = 1024  # elements a program
NUM_WARPS = 4  # 8 elements a thread: 16 bytes of bfloat16 at a time
SMALL = 2**22  # elements: moving 28 bytes each takes some 30 us, half as long as a launch
ALIGNMENT = 16  # of addresses in bytes, and of sizes in elements: loads and stores are vectorized
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


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
    number,
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
    """``number``: which block of the part; None: the program's, where a launch has one part."""
    if number is None:
        number = tl.program_id(0)
    start = number.to(tl.int64) * BLOCK  # passes 2**31 in large embeddings
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


@triton.jit
def _load_pointer(entry, KIND: tl.constexpr, ALIGNMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(KIND)), ALIGNMENT)


@triton.jit
def _update_parts_kernel(  # type: ignore[no-untyped-def]
    parts_pointer,
    blocks_pointer,
    factor_pointer,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COPIED: tl.constexpr,
    SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``_addresses`` of each part stand at ``parts_pointer``; which part a program has, and which block of it, at
    ``blocks_pointer``.
    """
    block = blocks_pointer + 2 * tl.program_id(0).to(tl.int64)
    entry = parts_pointer + 8 * tl.load(block).to(tl.int64)
    _update_kernel(
        _load_pointer(entry, WEIGHT, ALIGNMENT),
        _load_pointer(entry + 1, GRADIENT, ALIGNMENT),
        _load_pointer(entry + 2, WEIGHT, ALIGNMENT),
        _load_pointer(entry + 3, WEIGHT, ALIGNMENT),
        _load_pointer(entry + 4, COPY, ALIGNMENT),
        tl.load(entry + 5).to(tl.pointer_type(tl.float32)),
        factor_pointer,
        tl.load(entry + 6).to(tl.pointer_type(tl.int32)),
        tl.load(block + 1), tl.multiple_of(tl.load(entry + 7), ALIGNMENT), beta1, rest1, beta2, rest2, eps, decay,
        COPIED, SCALED, STOCHASTIC, BLOCK,
    )  # fmt: skip


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
        None,
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


def _addresses(part: AdamWTensors) -> list[int]:
    """Of all tensors, and how many elements there are."""
    tensors = (part.weight, part.gradient, part.exp_avg, part.exp_avg_sq, part.copy, part.row, part.key)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [part.weight.numel()]


class MultiTensorUpdate:
    """``update_triton`` of many parts. Small ones of the same dtypes share a launch. Waits for nothing."""

    def __init__(self) -> None:
        # By dtypes and sizes: the blocks on the device, and addresses as the host knows them and on the device.
        self._tables: dict[Any, tuple[torch.Tensor, list[list[int]], torch.Tensor]] = {}

    def __call__(self, parts: Sequence[AdamWTensors], rates: Rates, factor: torch.Tensor | None) -> None:
        together: dict[Any, list[list[int]]] = {}
        for part in parts:
            if part.weight.numel() > SMALL:
                update_triton(part, rates, factor)
            else:
                addresses = _addresses(part)
                aligned = all(number % ALIGNMENT == 0 for number in addresses)
                copy_dtype = None if part.copy is None else part.copy.dtype
                kind = (part.weight.dtype, part.gradient.dtype, copy_dtype, part.key is not None, aligned)
                together.setdefault(kind, []).append(addresses)
        for kind, some in together.items():
            self._launch(kind, some, rates, factor, parts[0].row.device)

    def _launch(
        self, kind: Any, addresses: list[list[int]], rates: Rates, factor: torch.Tensor | None, device: torch.device
    ) -> None:
        blocks, table = self._find_tables(kind, addresses, device)
        weight, gradient, copy, stochastic, aligned = kind
        _update_parts_kernel[(len(blocks),)](
            table,
            blocks,
            table if factor is None else factor,
            rates.beta1,
            1 - rates.beta1,
            rates.beta2,
            1 - rates.beta2,
            rates.eps,
            rates.decay,
            WEIGHT=TRITON_DTYPES[weight],
            GRADIENT=TRITON_DTYPES[gradient],
            COPY=TRITON_DTYPES[weight if copy is None else copy],
            ALIGNMENT=ALIGNMENT if aligned else 1,
            COPIED=copy is not None,
            SCALED=factor is not None,
            STOCHASTIC=stochastic,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def _find_tables(
        self, kind: Any, addresses: list[list[int]], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and addresses on the device. Gradients may move from step to step, sizes do not change."""
        sizes = tuple(entry[-1] for entry in addresses)
        blocks, known, table = self._tables.get((kind, sizes), (None, None, None))
        if blocks is None:
            counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
            owners = torch.arange(len(counts)).repeat_interleave(counts)
            numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
            blocks = _upload(torch.stack([owners, numbers], 1).int(), device)
        if table is None or known != addresses:
            table = _upload(torch.tensor(addresses), device)
        self._tables[kind, sizes] = (blocks, addresses, table)
        return blocks, table


def _upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def compare(device: torch.device, reference: Update) -> float:
    """Worst deviation from ``reference`` after three steps of parts longer and shorter than a block, one by one and
    together, as a multiple of what is allowed.
    """
    worst = 0.0
    for dtype, gradient_dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        wanted = _try(one_by_one(reference), device, dtype, gradient_dtype)
        for update in (one_by_one(update_triton), MultiTensorUpdate()):
            found = _try(update, device, dtype, gradient_dtype)
            worst = max(worst, *(_deviation(one, two) for one, two in zip(found, wanted, strict=True)))
    return worst


def _try(
    update: UpdateAll, device: torch.device, dtype: torch.dtype, gradient_dtype: torch.dtype
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (BLOCK + 77, 5, 2 * BLOCK)
    weights = [torch.randn(size, generator=draw).to(device, dtype) for size in sizes]
    copies = [torch.empty_like(weight, dtype=torch.bfloat16) if dtype == torch.float32 else None for weight in weights]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    keys = [
        None if copy is not None else torch.tensor(make_key(1, 2 + part, 2**33), dtype=torch.int32, device=device)
        for part, copy in enumerate(copies)
    ]
    factor = torch.tensor(0.3, device=device)
    for step in range(1, 4):
        rows = make_rows(torch.tensor([float(step)] * len(sizes), device=device), 1e-2, 0.9, 0.99)
        parts = [
            AdamWTensors(w, torch.randn(len(w), generator=draw).to(device, gradient_dtype), m, v, row, copy, key)
            for w, (m, v), row, copy, key in zip(weights, moments, rows.unbind(0), copies, keys, strict=True)
        ]
        update(parts, Rates(0.9, 0.99, 1e-8, 1e-3), factor)
    return [*weights, *(one for both in moments for one in both), *(copy for copy in copies if copy is not None)]


def _deviation(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest, over what a last digit is to the tensor's largest value: 8 of float32 are allowed, 2 of bfloat16."""
    digits = 8 if wanted.dtype == torch.float32 else 2
    allowed = digits * torch.finfo(wanted.dtype).eps * wanted.float().abs().max()
    return float(((found.float() - wanted.float()).abs() / allowed).nan_to_num(nan=float("inf")).max())
