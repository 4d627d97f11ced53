"""The softmax of the fused loss in torch operations: what the Triton kernel is compared with."""

from __future__ import annotations

import torch

EAGER_LOGITS = 2**24  # logits widened at once: 64 MiB in float32


def softmax_rows(
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
    """The reference: fill ``losses`` (m) and ``hits`` (m) of ``logits`` (m, v), and put the gradient in their
    place.

    Everything is computed in ``sum_dtype``; the gradient is rounded to the logits' dtype once.
    """
    step = max(EAGER_LOGITS // max(logits.shape[1], 1), 1)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        softmax_part(
            logits[rows],
            labels[rows],
            None if weights is None else weights[rows],
            losses[rows],
            None if hits is None else hits[rows],
            logit_scale,
            softcap,
            with_grad,
        )


def softmax_part(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    losses: torch.Tensor,
    hits: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
    with_grad: bool,
) -> None:
    x = logits.to(losses.dtype) * logit_scale
    bent = None
    if softcap is not None:
        bent = torch.tanh(x / softcap)
        x = bent * softcap
    wanted = labels.clamp(min=0)[:, None]
    factor = (labels >= 0).to(losses.dtype)
    if weights is not None:
        factor = factor * weights
    log_sum = torch.logsumexp(x, 1, keepdim=True)
    losses.copy_((log_sum - x.gather(1, wanted)).squeeze(1) * factor)
    if hits is not None:
        hits.copy_(x.argmax(1) == labels)
    if not with_grad:
        return
    columns = torch.arange(x.shape[1], device=x.device)
    gradient = torch.exp(x - log_sum) - (columns == wanted).to(x.dtype)
    if bent is not None:
        gradient = gradient * (1 - bent * bent)
    logits.copy_(gradient * (factor * logit_scale)[:, None])
