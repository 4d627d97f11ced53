"""Attention over a pack whose tokens are divided over the ranks of a group (``data/batch/divide.py``), with gradients.

Either each rank gathers all ranks' keys and values, and the gradients that all ranks have for them are summed in the
backward pass, in float32 at least. Or ranks exchange heads for tokens (Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509): each computes the whole pack for its own heads, and what has no sum is exact.

Shapes: t tokens of a rank, T = W t of the pack on W ranks, s keys that a rank's queries see, h or g heads, of which W
is a divisor where they are exchanged, d dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from manyhands.kernels.matmul import sum_dtype

# Renamed in torch 2.13, where the names of 2.11 warn; equal arguments.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_group: dist.ProcessGroup | None = None  # one for the process: operators take tensors alone
_rank = 0  # this process's place in it; compiled code reads it as a constant


def use_group(group: dist.ProcessGroup | None) -> None:
    """The ranks that divide each pack from now on, in the order of their parts; None: packs are not divided."""
    global _group, _rank
    _group, _rank = group, group.rank() if group is not None else 0


def _join(parts: torch.Tensor) -> torch.Tensor:
    """(W, 2, t / 2, ...) of all ranks -> (T, ...) in the order of the pack."""
    return torch.cat([parts[:, 0], parts[:, 1].flip(0)]).flatten(0, 1)


def _part(whole: torch.Tensor, degree: int) -> torch.Tensor:
    """The inverse of ``_join``: (T, ...) -> (W, 2, t / 2, ...)."""
    first, second = whole.unflatten(0, (2, degree, -1))
    return torch.stack([first, second.flip(0)], dim=1)


@torch.library.custom_op("manyhands::gather_keys", mutates_args=())
def gather_keys(part: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows ``positions`` (s) int64 of the whole pack's keys or values, of which each rank has ``part`` (t, g, d) ->
    (s, g, d). Collective.
    """
    assert _group is not None, "no group divides packs"
    degree = _group.size()
    parts = part.new_empty((degree * part.shape[0], *part.shape[1:]))
    _all_gather(parts, part.contiguous(), group=_group)
    return _join(parts.unflatten(0, (degree, 2, -1))).index_select(0, positions)


@torch.library.custom_op("manyhands::scatter_keys", mutates_args=())
def scatter_keys(gradient: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The gradient of ``part`` (t, g, d), t = ``num_tokens``, from that of each rank's result (s, g, d). Collective."""
    assert _group is not None, "no group divides packs"
    degree, dtype = _group.size(), sum_dtype(gradient.dtype)
    whole = gradient.new_zeros((degree * num_tokens, *gradient.shape[1:]), dtype=dtype)
    whole.index_add_(0, positions, gradient.to(dtype))  # at most two rows to one place: in any order the same sum
    part = whole.new_empty((num_tokens, *gradient.shape[1:]))
    _reduce_scatter(part, _part(whole, degree).flatten(0, 2), group=_group)
    return part.to(gradient.dtype)


@gather_keys.register_fake
def _(part, positions):  # type: ignore[no-untyped-def]
    return part.new_empty((positions.shape[0], *part.shape[1:]))


@scatter_keys.register_fake
def _(gradient, positions, num_tokens):  # type: ignore[no-untyped-def]
    return gradient.new_empty((num_tokens, *gradient.shape[1:]))


def _keep_for_backward(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    part, positions = inputs
    ctx.save_for_backward(positions)
    ctx.num_tokens = part.shape[0]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return scatter_keys(gradient, *ctx.saved_tensors, ctx.num_tokens), None


gather_keys.register_autograd(_backward, setup_context=_keep_for_backward)


def _exchange(parts: torch.Tensor) -> torch.Tensor:
    """(W, ...): entry r goes to rank r -> (W, ...): entry r is rank r's. Collective."""
    assert _group is not None, "no group divides packs"
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=_group)
    return received


@torch.library.custom_op("manyhands::exchange_for_heads", mutates_args=())
def exchange_for_heads(part: torch.Tensor, degree: int) -> torch.Tensor:
    """(t, h, d) of each rank's tokens -> (T, h / W, d) of all tokens in the order of the pack; rank r gets the r-th of
    W = ``degree`` groups of neighboring heads. Collective.
    """
    parts = _exchange(part.unflatten(1, (degree, -1)).transpose(0, 1))
    return _join(parts.unflatten(1, (2, -1)))


@torch.library.custom_op("manyhands::exchange_for_tokens", mutates_args=())
def exchange_for_tokens(whole: torch.Tensor, degree: int) -> torch.Tensor:
    """The inverse of ``exchange_for_heads``: (T, h / W, d) -> (t, h, d). Collective."""
    return _exchange(_part(whole, degree).flatten(1, 2)).transpose(0, 1).flatten(1, 2)


@exchange_for_heads.register_fake
def _(part, degree):  # type: ignore[no-untyped-def]
    return part.new_empty((part.shape[0] * degree, part.shape[1] // degree, *part.shape[2:]))


@exchange_for_tokens.register_fake
def _(whole, degree):  # type: ignore[no-untyped-def]
    return whole.new_empty((whole.shape[0] // degree, whole.shape[1] * degree, *whole.shape[2:]))


def _keep_degree(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
    ctx.degree = inputs[1]


exchange_for_heads.register_autograd(
    lambda ctx, gradient: (exchange_for_tokens(gradient, ctx.degree), None), setup_context=_keep_degree
)
exchange_for_tokens.register_autograd(
    lambda ctx, gradient: (exchange_for_heads(gradient, ctx.degree), None), setup_context=_keep_degree
)


def rank_in_group() -> int:
    """This rank's place among those that divide each pack."""
    return _rank
