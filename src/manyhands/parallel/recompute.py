"""Recompute activations in the backward pass, a block at a time. Parameter names do not change."""

from __future__ import annotations

from torch import nn

from manyhands.model.blocks import find_blocks


def recompute_blocks(model: nn.Module) -> None:
    """Keep only each block's input in the forward pass of training; gradients are bit-equal to keeping everything."""
    find_blocks(model)  # a clear error where there are none
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.disable_input_require_grads()  # type: ignore[operator]  # only reentrant checkpointing needs them
