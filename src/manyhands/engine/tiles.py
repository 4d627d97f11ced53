"""A block's MLP by tiles of the sequence, each computed again in the backward pass. Names of parameters do not change.

Of one very long sample, a block that is computed again needs most for its MLP: results as wide as its inner size, and
their gradients. An MLP looks at one token at a time, so a tile of tokens can be taken forward and backward before the
next one (TiledMLP of https://arxiv.org/abs/2506.13996): what is as long as the sequence is as wide as the hidden size.
Norms stay whole: what they keep is no wider than what attention does.

Results are those of the whole. Gradients of trained weights are summed over tiles in float32 at least, and rounded once
to the weights' dtype. Must not know the model's family or how parameters are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.model.structure import find_blocks, find_mlps

Compute = Callable[[torch.Tensor], torch.Tensor]


class TiledForward:
    """Takes the place of ``mlp.forward``: (b, t, e) -> (b, t, e), at most ``tile`` tokens at a time.

    In compiled code it is a break: the block's parts before and after are graphs of their own, and so is a tile.
    """

    def __init__(self, mlp: nn.Module, tile: int) -> None:
        self.mlp, self.tile = mlp, tile
        self.compute: Compute = mlp.forward

    @torch.compiler.disable
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, x.shape[-1])
        if rows.shape[1] <= self.tile:
            return self.compute(x)
        if not torch.is_grad_enabled():
            return self.forward(rows).view_as(x)
        weights = [weight for weight in self.mlp.parameters() if weight.requires_grad]
        held: torch.Tensor = _BackwardByTiles.apply(rows, self, weights, *weights)  # type: ignore[no-untyped-call]
        out: torch.Tensor = _ForwardByTiles.apply(held, self)  # type: ignore[no-untyped-call]
        return out.view_as(x)

    def split(self, rows: torch.Tensor) -> Iterator[slice]:
        """Slices of tokens, of one length but for the last."""
        num_tokens = rows.shape[1]
        size = math.ceil(num_tokens / math.ceil(num_tokens / self.tile))
        return (slice(start, start + size) for start in range(0, num_tokens, size))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(1, t, e) -> (1, t, e), without gradients."""
        out = torch.empty_like(rows)
        for tokens in self.split(rows):
            out[:, tokens] = self.compute(rows[:, tokens])
        return out

    def backward(
        self, rows: torch.Tensor, gradient: torch.Tensor, weights: list[nn.Parameter], wants_rows: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """From the result's gradient (1, t, e) those of ``rows`` and ``weights``."""
        for_rows = torch.empty_like(rows) if wants_rows else None
        sums: list[torch.Tensor] = []
        for tokens in self.split(rows):
            tile = rows[:, tokens].detach().requires_grad_(wants_rows)
            with torch.enable_grad():
                out = self.compute(tile)
            inputs = [tile, *weights] if wants_rows else weights
            found = list(torch.autograd.grad(out, inputs, gradient[:, tokens]))
            if for_rows is not None:
                for_rows[:, tokens] = found.pop(0)
            if sums:
                torch._foreach_add_(sums, [part.to(total.dtype) for part, total in zip(found, sums, strict=True)])
            else:
                sums = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in found]
        return for_rows, [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]


class _BackwardByTiles(torch.autograd.Function):
    """Nothing in the forward pass; the backward pass of the whole MLP, from the gradient of its *result*.

    It is apart from the forward pass because a block's recomputation ends with the last tensor that it keeps
    (``torch.utils.checkpoint``): that is the MLP's input here, so tiles are not computed there for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, tiled: TiledForward, weights: list[nn.Parameter], *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.tiled, ctx.weights = tiled, weights
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        for_rows, for_weights = ctx.tiled.backward(rows, gradient, ctx.weights, ctx.needs_input_grad[0])
        return for_rows, None, None, *for_weights


class _ForwardByTiles(torch.autograd.Function):
    """The result in the forward pass; the identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tiled: TiledForward) -> torch.Tensor:
        return tiled.forward(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def tile_mlps(model: nn.Module, tile: int) -> None:
    """Let each block's MLP compute at most ``tile`` tokens at a time. UserError where a block has none that can."""
    for name, block in find_blocks(model).items():
        found = find_mlps(block)
        if not found:
            raise UserError(
                f"{name} of {type(model).__name__} has no MLP that can be computed by tiles of the sequence",
                where="the plan's layout.mlp_tile_tokens",
                why="samples this long fit only with tiles, and no module of the block is an MLP of linear layers",
                fix="shorten the samples (data.max_length), or use more GPUs",
            )
        for mlp in found:
            mlp.forward = TiledForward(mlp, tile)


def compile_tiles(model: nn.Module, dynamic: bool | None, **options: object) -> None:
    """Compile what a tile computes, in place."""
    for module in model.modules():
        if isinstance(tiled := vars(module).get("forward"), TiledForward):
            tiled.compute = torch.compile(tiled.compute, dynamic=dynamic, **options)  # type: ignore[call-overload]
