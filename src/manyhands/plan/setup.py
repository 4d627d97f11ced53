"""One way to run, as far as its memory is concerned: what the terms of the estimate are functions of. Plain values; no
torch.

The notation is that of ``memory.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.facts.types import ModelFacts
from manyhands.plan.trained import TrainedWeights
from manyhands.plan.types import LIGHTER, Checkpointing, Offload, Strategy

NF4_ROW_VALUES, NF4_ROW_BYTES = 16_384, 8_192 + 264  # of weights in NF4, as in convert/nf4.py


@dataclass(frozen=True)
class Setup:
    """One way to run, as far as memory is concerned. ``micro_tokens``: tokens of one micro-batch, padding included."""

    model: ModelFacts
    num_adapter_parameters: int  # 0: everything is trained, or ``in_place``
    adapter_rank: int
    adapter_dropout: bool
    device: Literal["cuda", "cpu"]
    world_size: int
    strategy: Strategy
    reshard_after_forward: bool
    activation_checkpointing: Checkpointing
    compile: bool
    compute_bytes: int
    master_bytes: int
    frozen_bytes: int
    micro_tokens: int
    builds_mask: bool  # a dense attention mask over the micro-batch
    nf4_blocks: bool = False  # qlora: the blocks' linear layers are held in NF4
    fp8_blocks: bool = False  # products of the blocks' linear layers in fp8
    in_place: TrainedWeights | None = None  # patterns: the model's own weights that are trained where others are frozen
    optimizer_name: str = "adamw"
    shard_degree: int = 1  # hybrid: ranks that hold one copy together
    reduce_every: bool = True  # sharded gradients after every micro-batch
    offload: Offload = "none"
    offload_activations: bool = False
    accumulates: bool = True  # a step may have several micro-batches: gradients of the first are there during the next
    fuse_loss: bool = False  # cross-entropy fused with the head
    fuse_optimizer: bool = False  # AdamW takes gradients in the dtype of the copy that computes
    mixed_lengths: bool = (
        False  # varlen, and rows differ in length or layers have windows: no kernel for rows of one length
    )
    adapter_dora: bool = False
    lighter_layers: int = 0  # of the last blocks: recomputed the next lighter way

    @property
    def trains_everything(self) -> bool:
        return self.num_adapter_parameters == 0 and self.in_place is None

    @property
    def num_shards(self) -> int:
        return {"fsdp": self.world_size, "hsdp": self.shard_degree}.get(self.strategy, 1)

    @property
    def num_trained(self) -> int:
        if self.in_place is not None:
            return self.in_place.total
        return self.num_adapter_parameters or self.model.num_parameters

    @property
    def is_mixed(self) -> bool:
        """Masters and compute, or masters and sums, differ in dtype: ``fully_shard`` casts, whatever the strategy
        (engine/apply.py).

        One process that keeps bfloat16 masters has nothing to cast and nothing to reduce.
        """
        narrow = self.has_narrow_masters and self.strategy != "single"
        return self.trains_everything and (self.compute_bytes != self.master_bytes or narrow)

    @property
    def has_narrow_masters(self) -> bool:
        """Masters in bfloat16: gradients are summed over ranks and micro-batches in float32 all the same."""
        return self.master_bytes == 2

    @property
    def sum_bytes(self) -> int:
        """Of an element of a gradient while it is summed."""
        return max(4, self.master_bytes)

    @property
    def keeps_copy(self) -> bool:
        """One process keeps the whole bfloat16 copy beside its masters, without ``fully_shard`` (engine/masters.py)."""
        kept = self.strategy == "single" and not self.reshard_after_forward and self.offload != "all"
        return kept and self.is_mixed and (self.master_bytes, self.compute_bytes) == (4, 2)

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient as the optimizer finds it: in the masters' dtype, or where micro-batches are
        summed in the sums'. A kept copy's, of one micro-batch, stays in the copy's where the optimizer takes that.
        """
        if self.accumulates:
            return self.sum_bytes
        return self.compute_bytes if self.keeps_copy and self.fuse_optimizer else self.master_bytes

    @property
    def gathers_whole(self) -> bool:
        """Whether even whole weights are copied to where they compute: cast, or from host memory."""
        return self.is_mixed or self.offload == "all"

    @property
    def last_recompute(self) -> Checkpointing:
        """How the last block, the first of the backward pass, is recomputed."""
        return LIGHTER[self.activation_checkpointing] if self.lighter_layers else self.activation_checkpointing

    @property
    def num_root_parameters(self) -> int:
        """R = P - L B: what is in no block."""
        return self.model.num_parameters - self.model.num_layers * self.model.num_block_parameters

    @property
    def frozen_block_bytes(self) -> int:
        """One block's frozen weights as they are kept: ``B f``, or its linear layers in NF4 and the rest in f.

        NF4 takes 1/2 byte a value, 1/64 for its block's scale and 8 / 16,384 for the scales' own (convert/nf4.py), in
        whole rows.
        """
        if not self.nf4_blocks:
            return self.model.num_block_parameters * self.frozen_bytes
        sizes = [out * into for out, into in self.model.block_linear_shapes.values()]
        in_nf4 = sum(math.ceil(size / NF4_ROW_VALUES) for size in sizes) * NF4_ROW_BYTES
        return (self.model.num_block_parameters - sum(sizes)) * self.frozen_bytes + in_nf4

    @property
    def head_elements(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def num_trained_in_head(self) -> int:
        """Elements of the head whose gradient the loss makes; embeddings alone, by patterns, are taken for it."""
        if self.in_place is not None:
            return min(self.in_place.num_in_root, self.head_elements)
        return self.head_elements if self.trains_everything else 0

    @property
    def offloads(self) -> bool:
        return self.offload != "none" or self.offload_activations
