"""What the terms of the memory estimate are functions of. Plain values; no torch.

The notation is that of ``memory.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.core.limits import NF4_ROW_BYTES, NF4_ROW_VALUES
from manyhands.facts.types import ModelFacts
from manyhands.plan.layout import DTYPE_BYTES, Layout
from manyhands.plan.trained import TrainedWeights


@dataclass(frozen=True)
class EstimateInput:
    """One layout of one model, as far as memory is concerned."""

    model: ModelFacts
    layout: Layout
    num_adapter_parameters: int  # 0: everything is trained, or the model ``partially_trained``
    adapter_rank: int
    adapter_dropout: bool
    builds_mask: bool  # a dense attention mask over the micro-batch
    nf4_blocks: bool = False  # qlora: the blocks' linear layers are held in NF4
    fp8_blocks: bool = False  # matmuls of the blocks' linear layers in fp8
    partially_trained: TrainedWeights | None = None  # patterns: the model's own weights that are trained
    optimizer_name: str = "adamw"
    fuse_loss: bool = False  # cross-entropy fused with the head
    fuse_optimizer: bool = False  # AdamW takes gradients in the dtype of the copy that computes
    mixed_lengths: bool = False  # varlen, and samples differ in length or layers have windows
    adapter_dora: bool = False

    @property
    def trains_everything(self) -> bool:
        return self.layout.trains_everything

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.compute_dtype]

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.master_dtype]

    @property
    def frozen_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.frozen_dtype]

    @property
    def num_shards(self) -> int:
        return self.layout.mesh.shard

    @property
    def num_trained(self) -> int:
        if self.partially_trained is not None:
            return self.partially_trained.total
        return self.num_adapter_parameters or self.model.num_parameters

    @property
    def is_cast(self) -> bool:
        """Trained weights are copied to the dtype that computes."""
        return self.layout.compute_copy != "none"

    @property
    def keeps_copy(self) -> bool:
        """One process keeps the bfloat16 copy of all weights beside their masters (engine/masters.py)."""
        return self.layout.compute_copy == "kept"

    @property
    def sum_bytes(self) -> int:
        """Of an element of a gradient while it is summed."""
        return max(4, self.master_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient as the optimizer finds it: in the masters' dtype, or where micro-batches are
        summed in the sums'. A kept copy's, of one micro-batch, stays in the copy's where the optimizer takes that.
        """
        if self.layout.accumulates:
            return self.sum_bytes
        return self.compute_bytes if self.keeps_copy and self.fuse_optimizer else self.master_bytes

    @property
    def gathers_whole(self) -> bool:
        """Whether even unsharded weights are copied to where they compute: cast, or from host memory."""
        return self.is_cast or self.layout.offload == "all"

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
        if self.partially_trained is not None:
            return min(self.partially_trained.num_in_root, self.head_elements)
        return self.head_elements if self.trains_everything else 0

    @property
    def offloads(self) -> bool:
        return self.layout.offload != "none" or self.layout.offload_activations
