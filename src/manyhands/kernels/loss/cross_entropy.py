"""Cross-entropy fused with the head: neither all logits nor their gradients are ever held.

A chunk of rows at a time: logits, loss and, at once, the gradient of the logits in their place; from it the gradients
of the hidden states and, where the head is trained, of its weight. The backward pass only scales what the forward pass
has made, so each logit is computed once. Knows no model, no ranks and no divisor: it returns a sum.

With m trained rows, e hidden sizes and v words: forward plus backward are 4 m e v operations for a frozen head (6 m e v
where chunks are recomputed), 6 m e v for a trained one (8 m e v). Logits are written once, read twice and overwritten
once in their own dtype: 8 m v bytes in bfloat16, where float32 copies and a recomputation move more than 40 m v. For 8B
(e 4096, v 128256) and 8,192 rows that saves 8.6 TFLOP (11 ms at 780 TFLOP/s) and some 35 GB (8 ms at 4.3 TB/s).

Why no ``scale``: the known divisor reaches the backward pass as a 0-d tensor, and the multiplication by it is one with
the cast of the sums to the weight's dtype; on hidden states it moves 4 m e bytes (30 us for 8B). Unscaled gradients
also suit float16.

Shapes: m rows, all with a target; e hidden size, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch.autograd.function import once_differentiable

from manyhands.core.limits import MAX_LOGITS_FROZEN, MAX_LOGITS_TRAINED
from manyhands.kernels.loss.reference import softmax_rows
from manyhands.kernels.loss.select import choose_backend, compiled_softmax
from manyhands.kernels.matmul import add_mm_, mm_wide, sum_dtype

ROW_MULTIPLE = 128  # chunks are whole tiles of a matrix product
COLUMN_MULTIPLE = 64  # rows of logits begin aligned, whatever the vocabulary
WORD_MULTIPLE = 8  # of a 16-bit operand's dimensions: for others cuBLAS takes kernels at a tenth of the speed


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    metrics: bool = False,
    by_row: bool = False,
    max_logits: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_i weights_i * cross_entropy(logits_i, targets_i), and the number of labels that are their row's arg max.

    logits = softcap * tanh(logit_scale * hidden weight^T / softcap), without a cap logit_scale * hidden weight^T.

    ``hidden`` (m, e) and ``weight`` (v, e) of one dtype; ``labels`` (m) int64, a negative one counts nothing;
    ``weights`` (m) float32. Both results are 0-d: the sum in float32 (float64 for float64), the hits int64, counted
    only with ``metrics``. m may be 0: the sum is then a zero that depends on both arguments. ``max_logits`` bounds a
    chunk, ``backend`` is triton, compile or eager, None what ``choose_backend`` takes. ``by_row`` gives each row's
    loss (m) in place of the sum, for a frozen ``weight``: the gradient of a trained one needs to know what each row
    will weigh.

    ``weight`` must be whole: the parameter that ``fully_shard`` has gathered is, since a unit's forward pass sees plain
    tensors; it is not kept for the backward pass, so its unit may free it. A sharded head (DTensor) raises
    ``TypeError``:
    a softmax over a sharded vocabulary needs a collective, which has no place here. A tied weight needs nothing:
    autograd adds the embedding's share. Gradients of gradients raise.
    """
    _check(hidden, weight, labels, weights)
    chosen = backend or choose_backend(hidden.device, hidden.dtype).name
    grad_enabled = torch.is_grad_enabled()
    if by_row and grad_enabled and weight.requires_grad:
        raise ValueError("losses by row are for a head that is not trained")
    options = _Options(
        hidden_grad=grad_enabled and hidden.requires_grad,
        weight_grad=grad_enabled and weight.requires_grad,
        logit_scale=float(logit_scale),
        softcap=float(softcap) if softcap else None,
        metrics=metrics,
        by_row=by_row,
        max_logits=max_logits,
        backend=chosen,
    )
    return _LinearCrossEntropy.apply(hidden, weight, labels, weights, options)  # type: ignore[no-any-return]


def chunk_rows(num_rows: int, vocab_size: int, trained_head: bool, max_logits: int | None = None) -> int:
    """Rows of a chunk: as even as whole tiles allow, so that no short chunk is left at the end."""
    limit = max_logits or (MAX_LOGITS_TRAINED if trained_head else MAX_LOGITS_FROZEN)
    most = max(limit // vocab_size, 1)
    if most >= num_rows:
        return max(num_rows, 1)
    multiple = ROW_MULTIPLE if most >= ROW_MULTIPLE else 1
    even = math.ceil(num_rows / math.ceil(num_rows / most))
    return min(math.ceil(even / multiple), most // multiple) * multiple


@dataclass(frozen=True)
class _Options:
    hidden_grad: bool
    weight_grad: bool
    logit_scale: float
    softcap: float | None
    metrics: bool
    by_row: bool
    max_logits: int | None
    backend: str


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (num_rows, _), num_words = hidden.shape, weight.shape[0]
        wide = sum_dtype(hidden.dtype)
        step = chunk_rows(num_rows, num_words, options.weight_grad, options.max_logits)
        many = num_rows > step
        padded = math.ceil(num_words / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        whole = torch.empty(min(step, num_rows), padded, dtype=hidden.dtype, device=hidden.device)
        # oneDNN's AMX kernels (torch 2.13) read past a row's end and multiply what they find by 0: it must not be NaN
        whole[:, num_words:].zero_()
        buffer = whole[:, :num_words]
        losses = torch.empty(num_rows, dtype=wide, device=hidden.device)
        hits = torch.zeros(num_rows if options.metrics else 1, dtype=torch.bool, device=hidden.device)
        hidden_grad = torch.empty_like(hidden, memory_format=torch.contiguous_format) if options.hidden_grad else None
        weight_grad = torch.zeros_like(weight) if options.weight_grad and num_rows == 0 else None
        softmax = _softmax(options)
        even = num_words // COLUMN_MULTIPLE * COLUMN_MULTIPLE
        if hidden.element_size() != 2 or num_words % WORD_MULTIPLE == 0:
            even = num_words
        # the words beyond, padded with zeros; nothing where all are even
        tail = functional.pad(weight[even:], (0, 0, 0, padded - num_words)) if even < num_words else weight[:0]
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            logits = buffer[: rows.stop - start]
            torch.mm(hidden[rows], weight[:even].t(), out=logits[:, :even])
            if len(tail):
                torch.mm(hidden[rows], tail.t(), out=whole[: len(logits), even:])
            part = None if weights is None else weights[rows]
            softmax(logits, labels[rows], part, losses[rows], hits[rows] if options.metrics else None)
            if hidden_grad is not None:
                if len(tail):
                    torch.mm(whole[: len(logits), even:], tail, out=hidden_grad[rows])
                    hidden_grad[rows].addmm_(logits[:, :even], weight[:even])
                else:
                    torch.mm(logits, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                add_mm_(weight_grad, logits.t(), hidden[rows])
            elif options.weight_grad:  # one chunk needs no sum, and the product is rounded once
                weight_grad = mm_wide(logits.t(), hidden[rows]) if many else torch.mm(logits.t(), hidden)
        num_correct = hits.sum()
        ctx.weight_dtype, ctx.scale = weight.dtype, _scale(options)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(num_correct)
        ctx.set_materialize_grads(False)
        return losses if options.by_row else losses.sum(), num_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        if grad_sum is None:
            return None, None, None, None, None
        scaled_weight = None
        if weight_grad is not None:  # scaled and cast in one pass
            scaled_weight = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            ctx.scale(weight_grad, grad_sum, out=scaled_weight)
        if hidden_grad is not None and grad_sum.dim():  # of each row
            hidden_grad = torch.mul(hidden_grad, grad_sum[:, None], out=torch.empty_like(hidden_grad))
        elif hidden_grad is not None:
            hidden_grad = hidden_grad * grad_sum
        return hidden_grad, scaled_weight, None, None, None


def _softmax(options: _Options) -> Any:
    settings: dict[str, Any] = dict(
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        with_grad=options.hidden_grad or options.weight_grad,
    )
    if options.backend == "triton":
        from manyhands.kernels.loss.triton import softmax_rows_triton

        return partial(softmax_rows_triton, **settings)
    if options.backend == "compile":
        return partial(compiled_softmax(), **settings)
    return partial(softmax_rows, **settings)


def _scale(options: _Options) -> Any:
    """``torch.mul`` of a tensor and a number on the device, into another dtype, which torch does at a third of the
    bandwidth.
    """
    if options.backend != "triton":
        return torch.mul
    from manyhands.kernels.loss.triton import scale_triton

    return scale_triton


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> None:
    if hasattr(weight, "placements") or hasattr(hidden, "placements"):
        raise TypeError(
            "linear_cross_entropy takes whole tensors: gather the head first, or call it inside its fully_shard unit"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (m, e) and (v, e)")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden ({hidden.dtype}) and weight ({weight.dtype}) must have one dtype")
    if labels.shape != hidden.shape[:1] or (weights is not None and weights.shape != labels.shape):
        raise ValueError(f"labels and weights must have the shape {tuple(hidden.shape[:1])}")
