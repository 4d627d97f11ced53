"""Compile each block with torch.compile: equal blocks share one graph, so start-up does not grow with depth."""

from __future__ import annotations

from torch import nn

from manyhands.model.blocks import find_blocks


def compile_blocks(model: nn.Module, **options: object) -> None:
    """Compile every block in place; names and state do not change. ``options`` go to ``torch.compile``.

    The first micro-batches of each shape compile; with packing to a fixed number of tokens there is one.
    """
    for block in find_blocks(model).values():
        block.compile(**options)  # type: ignore[operator]
