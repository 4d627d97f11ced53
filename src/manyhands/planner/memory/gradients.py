"""Bytes of gradients: those that stay until the step, those that wait, and those on their way over ranks. Pure
arithmetic; knows no torch.

The notation is that of ``terms.py``.
"""

from __future__ import annotations

from manyhands.core.limits import UPDATE_HELD_BYTES
from manyhands.planner.memory import zero
from manyhands.planner.memory.input import EstimateInput

BLOCKS_IN_FLIGHT = 2  # FSDP2 gathers the next block while one computes, and reduces one while the next gives gradients


def gradients(s: EstimateInput) -> int:
    """One gradient for each trained weight, reduced and kept until the step: ``trained m / S``, or as
    ``gradient_bytes`` has it.
    """
    if s.layout.zero_stage == 1:  # sums of all on every rank, and where they are cast what the backward pass gives
        return s.num_trained * (s.sum_bytes + (s.compute_bytes if s.is_cast else 0))
    return s.num_trained * s.gradient_bytes // s.num_shards + s.by_experts(s.trained_in_experts * s.gradient_bytes)


def gradients_on_host(s: EstimateInput, moment: dict[str, int]) -> int:
    """Of the gradients of a moment, what is in the machine's memory and not on a GPU: all that are offloaded, but
    ``hsdp``'s, which FSDP2 holds there as well until the backward pass ends.
    """
    return moment["gradients"] if gradients_leave(s) else 0


def gradients_leave(s: EstimateInput) -> bool:
    """Whether gradients are moved to host memory block by block during the backward pass."""
    return s.layout.offload == "all" and s.layout.device == "cuda" and s.layout.strategy != "hsdp"


def unreduced(s: EstimateInput) -> int:
    """Gradients that wait for the last micro-batch of a step, whole on every rank: ``trained m``; none if each one
    reduces.
    """
    if s.layout.reduce_every or s.num_shards == 1 or s.layout.zero_stage:
        return 0
    return (s.num_trained - s.trained_in_experts) * s.sum_bytes


def earlier_gradients(s: EstimateInput) -> dict[str, int]:
    """Of a step's earlier micro-batches: they are there while one is at work, reduced or not. None where a step is one
    micro-batch, as gradients are freed after each step, but in DDP's own buckets.
    """
    in_buckets = (s.layout.strategy == "ddp" and not s.is_cast) or s.layout.zero_stage > 0
    waiting = unreduced(s) if s.layout.accumulates else 0
    return {
        "gradients": gradients(s) if (s.layout.accumulates and not waiting) or in_buckets else 0,
        "unreduced": waiting,
    }


def reduction(s: EstimateInput) -> int:
    """Gradients on their way during the backward pass, where the model's own weights are trained.

    By ``fully_shard``: two blocks, unsharded in compute dtype and in master dtype for the reduction, ``2 B (c + m)``,
    and the head's, which waits for the rest of the root: ``V H c``. A kept copy's go into the masters' as they come: a
    compiled block's, ``B (c + m)``, and the head's, ``V H c`` where it waits for the embeddings that it is tied to,
    else ``V H m``; where the optimizer takes them as they are, ``B c`` and ``V H c``. Plain ones are those that are
    kept. By patterns the same of what is trained. Adapters' gradients are too small to count. Where weights compute in
    the dtype they have, ``m`` is ``c``: nothing is summed over ranks. By ZeRO its buckets, and ``V H c`` of a head that
    waits for the embeddings. Where weights are updated in the backward pass, the block's, ``B c``, beside those whose
    updates are not done: at most ``UPDATE_HELD_BYTES``, or one larger.
    """
    c, m, head = s.compute_bytes, s.sum_bytes if s.is_cast else s.master_bytes, s.num_trained_in_head
    if s.layout.zero_stage:
        return zero.buckets(s) + (head * c if s.model.tied_embeddings else 0)
    if s.partially_trained is not None:
        largest = s.partially_trained.num_in_largest_block
        return head * c + (largest * c if s.num_shards == 1 else BLOCKS_IN_FLIGHT * largest * (c + m))
    if not s.trains_everything:
        return 0
    if not s.gathers_whole and s.num_shards == 1:
        return head * c
    if s.updates_in_backward:
        return s.model.num_block_parameters * c + max(UPDATE_HELD_BYTES, head * c)
    if s.keeps_copy:
        narrow = s.gradient_bytes == c
        return s.model.num_block_parameters * (c if narrow else c + m) + head * (
            c if narrow or s.model.tied_embeddings else m
        )
    block = s.model.num_block_parameters - s.block_in_experts + s.block_in_experts // s.layout.expert_degree
    return BLOCKS_IN_FLIGHT * block * (c + m) + head * c


def root_reduction(s: EstimateInput) -> int:
    """Gradients of the root, reduced last of all: ``R (c + m)``, or one unit after the other, ``R c + max(R - E, E)
    m``. A kept copy's are widened one after the other: ``V H c``. Where weights are updated in the backward pass, those
    of the embeddings are beside others that are held.
    """
    if s.layout.zero_stage:
        return zero.buckets(s)
    if s.updates_in_backward:
        return UPDATE_HELD_BYTES + s.head_elements * s.compute_bytes
    if s.partially_trained is not None:
        return s.partially_trained.num_in_root * (s.compute_bytes + (s.sum_bytes if s.num_shards > 1 else 0))
    if not s.trains_everything or (not s.gathers_whole and s.num_shards == 1):
        return 0
    if s.keeps_copy:
        return s.head_elements * s.compute_bytes
    reduced = s.largest_outer_unit * (s.sum_bytes if s.is_cast else s.master_bytes)
    return s.num_root_parameters * s.compute_bytes + reduced
