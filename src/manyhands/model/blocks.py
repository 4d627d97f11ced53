"""Find the repeated blocks of a decoder and the linear layers in them. Knows only the module tree, no family's name."""

from __future__ import annotations

from torch import nn

from manyhands.convert.towers import text_modules
from manyhands.core.errors import UserError


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder blocks by their names in ``model``, in order.

    A block is an outermost ``GradientCheckpointingLayer``: transformers gives that base to every layer that is
    repeated. Of a multimodal model the text decoder's count, not those of its towers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: dict[str, nn.Module] = {}
    text = text_modules(model)
    for name, module in model.named_modules():
        if text is not None and module not in text:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            blocks[name] = module
    if not blocks:
        raise UserError(
            f"The model {type(model).__name__} has no blocks that can be found.",
            why="None of its layers is a transformers GradientCheckpointingLayer.",
            fix="Use a decoder family whose implementation comes with transformers.",
        )
    return blocks


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer inside a block, by its full name; neither embeddings nor the head."""
    return {
        f"{block_name}.{name}": module
        for block_name, block in find_blocks(model).items()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }
