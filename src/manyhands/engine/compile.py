"""Compile each block with torch.compile: equal blocks share one graph, so start-up does not grow with depth."""

from __future__ import annotations

from torch import nn
from torch.fx.experimental import _config as shapes

from manyhands.model.structure import find_blocks


def compile_blocks(model: nn.Module, *, dynamic: bool | None = True, **options: object) -> None:
    """Compile every block in place; names and state do not change. ``options`` go to ``torch.compile``.

    ``dynamic=True`` makes every size symbolic from the first micro-batch on (those that meet a weight become numbers
    again), so packs of any fill and any number of documents run one graph for each kind of block in training, and one
    in evaluation. None makes sizes numbers, which is fastest where there is one shape; a second shape compiles once
    more, with the sizes that changed as symbols. Kinds of blocks differ in what they compute: with and without a
    window; under adapters the first block, whose input needs no gradient; with masks (``sdpa``) also a pack of one
    single document, for which transformers builds none.
    """
    if dynamic:
        # Sizes that happen to be equal in the first micro-batch (tokens and hidden size, documents and head size) would
        # share a symbol, and a weight would then fix both. Read while tracing, that is at the first micro-batch.
        shapes.use_duck_shape = False
    for block in find_blocks(model).values():
        block.compile(dynamic=dynamic, **options)  # type: ignore[operator]
