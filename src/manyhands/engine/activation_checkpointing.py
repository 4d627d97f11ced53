"""Activation checkpointing: the backward pass recomputes all of a block, or only its cheap operations. Parameter names
do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from manyhands.model.structure import find_blocks
from manyhands.plan.layout import Checkpointing

LINEAR = {"aten::mm": 0, "aten::addmm": 1}  # which argument the inputs are; the weight (i, o) is the next one
KEPT = {
    "manyhands::nf4_linear",
    "manyhands::nf4_low_rank_linear",
    "manyhands::low_rank_linear",
    "manyhands::fp8_matmul",
    "manyhands::flash4_forward",
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
}
WIDEST = 16  # a matmul whose result is wider than so many times its inner dimension is cheaper to repeat than to keep


def checkpoint_blocks(model: nn.Module, modes: Sequence[Checkpointing], *, compiled: bool) -> None:
    """Keep less from the forward pass of training; gradients are bit-equal to keeping everything.

    ``modes`` has one entry a block, first to last (``Layout.checkpointing_by_layer``): ``full`` keeps the block's
    input; ``selective`` also the results of its linear layers and attention, so that norms, activations and sums are
    repeated; ``none`` keeps everything. ValueError for another number of entries.

    ``compiled``: whether ``compile_blocks`` follows. Then a selective checkpoint has to be *inside* the compiled
    region: around it, a compiled block is opaque, its operations are never seen, and selective would recompute
    everything. Inside, what is kept travels as marks on the nodes of the graph, which the partitioner of AOTAutograd
    obeys.
    ``torch._functorch.config.activation_memory_budget`` does something like it with a knapsack over guessed run times;
    it is one number for the process, knows nothing of operators of our own, and with symbolic sizes it works on hints,
    so that what is kept would depend on the first micro-batch.
    """
    blocks: list[Any] = list(find_blocks(model).values())
    for block, mode in zip(blocks, modes, strict=True):
        if mode == "selective" and compiled:
            # The instance's own ``forward``: the only place between FSDP2's hooks and the block's operations.
            block.forward = functools.partial(_checkpoint_in_training, block, block.forward)
        elif mode != "none":
            options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, **options)


def selective_contexts() -> Any:
    """The two modes of ``torch.utils.checkpoint``, for the forward pass and for the recomputation."""
    return create_selective_checkpoint_contexts(_choose)


def _choose(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0]  # without the overload
    if name in KEPT:
        return CheckpointPolicy.MUST_SAVE
    if name in LINEAR:
        inner, width = args[LINEAR[name] + 1].shape
        # The second factor of an adapter: a result as wide as the layer's own, for rank / inner of its work.
        return CheckpointPolicy.MUST_SAVE if width <= WIDEST * inner else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_in_training(block: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return checkpoint(inner, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)
