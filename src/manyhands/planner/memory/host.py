"""Host memory: what a rank holds there, and what is left of it on the device. Pure arithmetic, as in
``terms.py``.
"""

from __future__ import annotations

import math

from manyhands.core.limits import (
    PINNED_PIECE,
    STATE_CHUNK_BYTES,
    STATE_CHUNKS_ON_DEVICE,
    UPDATE_SLICE,
    UPDATE_SLICES_ON_DEVICE,
)
from manyhands.planner.memory.activations import moved_bytes
from manyhands.planner.memory.gradients import gradients, gradients_on_host
from manyhands.planner.memory.input import EstimateInput

PINNED = 1 / math.log(2)  # torch rounds pinned blocks up to powers of 2: this much on average
# Of pinned memory, the GPU's page tables: 8 bytes for each page of 4 KiB. Outside of torch's allocator were 0.84, 0.85,
# 0.89 and 0.95 GiB beside 8, 16, 32 and 64 GiB of pinned activations, in place of 0.82.
PAGE_TABLE_SHARE = 8 / 4096


def estimate_host_terms(s: EstimateInput, terms: dict[str, int]) -> dict[str, int]:
    """By name, what a rank holds in host memory; ``terms`` are the device's before anything moves.

    ``all``: shards of weights (pinned), gradients (none where weights are updated in the backward pass) and optimizer
    states, which are pinned where bfloat16 masters are updated on the GPU. ``optimizer``: the states, pinned.
    Activations: see ``moved_bytes``, in pieces that are pinned. ZeRO's ``optimizer`` holds masters, states and
    gradients, and while a checkpoint is written or read its masters and states pass through host memory.
    """
    host: dict[str, int] = {}
    if s.layout.offload == "all":
        values = s.master_bytes if s.trains_everything else s.frozen_bytes
        leaving = 0 if s.updates_in_backward else gradients(s)
        host |= {
            "weights": int(pinned(s, values) * terms["weights"]),
            "gradients": int((pinned(s, s.gradient_bytes) if s.streams_update else 1.0) * leaving),
            "optimizer": int((pinned(s, s.master_bytes) if s.streams_update else 1.0) * terms["optimizer"]),
        }
    elif s.layout.offload == "optimizer":
        host["optimizer"] = int(PINNED * terms["optimizer"])
        if s.layout.zero_stage:
            host["gradients"] = int(PINNED * s.num_trained * s.sum_bytes // s.num_shards)
    if s.layout.zero_stage:
        host["checkpoint"] = terms["optimizer"]
    if s.layout.offload_activations:
        tensor = s.layout.full_micro_tokens * s.compute_bytes * s.model.hidden_size
        last = tensor % PINNED_PIECE  # rounded up; all moved tensors as large as a block's input
        host["activations"] = moved_bytes(s) * (tensor - last + (2 ** (last - 1).bit_length() if last else 0)) // tensor
    return host


def pinned(s: EstimateInput, value_bytes: int) -> float:
    """What blocks of pinned memory take, over what they hold, where each holds a rank's shard of one weight: of those
    in blocks and of the embeddings, ``value_bytes`` a value.
    """
    if s.nf4_blocks or s.fp8_weights or s.model.stored_mxfp4:
        return PINNED
    sizes = [shape.size for shape in s.model.block_linear_shapes.values()] * s.model.num_layers
    sizes += [s.head_elements] * (1 if s.model.tied_embeddings else 2)
    shards = [max(1, size // s.num_shards) * value_bytes for size in sizes]
    return sum(2 ** math.ceil(math.log2(size)) for size in shards) / sum(shards)


def pinned_bytes(s: EstimateInput, terms: dict[str, int]) -> int:
    """Of a rank's host memory, what is pinned: all that is moved, but gradients and states that a CPU updates."""
    updated_there = s.layout.offload == "all" and not s.streams_update
    names = {"weights", "activations"} | (set() if updated_there else {"gradients", "optimizer"})
    return sum(value for name, value in estimate_host_terms(s, terms).items() if name in names)


def keep_on_device(s: EstimateInput, terms: dict[str, int]) -> dict[str, int]:
    """The device's terms without what has moved. Activations have been counted so already.

    Of optimizer states two chunks are there while it steps: ``2 states/parameters max(2**28, largest parameter)``. Of
    masters in bfloat16 three slices are, in whatever is streamed; where that is all, activations are gone by then, but
    where weights are updated in the backward pass: slices of weights and states, ``3 m`` a value.
    The GPU's page tables of what is pinned are there as well.
    """
    kept = dict(terms)
    if s.layout.device == "cuda" and s.offloads and "overhead" in terms:
        kept["overhead"] += math.ceil(PAGE_TABLE_SHARE * pinned_bytes(s, terms))
    if s.layout.offload == "all":
        kept |= {"weights": 0, "optimizer": 0, "gradients": terms["gradients"] - gradients_on_host(s, terms)}
        if s.updates_in_backward:
            kept["optimizer"] = min(terms["optimizer"], UPDATE_SLICES_ON_DEVICE * UPDATE_SLICE * 3 * s.master_bytes)
    elif s.layout.offload == "optimizer" and s.layout.zero_stage:
        kept |= {"optimizer": 0} | ({"gradients": 0} if s.layout.zero_stage == 3 else {})
    elif s.layout.offload == "optimizer" and s.streams_update:
        kept["optimizer"] = min(terms["optimizer"], UPDATE_SLICES_ON_DEVICE * UPDATE_SLICE * 2 * s.master_bytes)
    elif s.layout.offload == "optimizer":
        largest = max(s.head_elements, *(shape.size for shape in s.model.block_linear_shapes.values())) * s.master_bytes
        parameters = max(1, s.num_trained * s.master_bytes // s.num_shards)
        chunk = max(STATE_CHUNK_BYTES, min(largest // s.num_shards, parameters))
        kept["optimizer"] = min(terms["optimizer"], STATE_CHUNKS_ON_DEVICE * chunk * terms["optimizer"] // parameters)
    return kept


def fetched_alone(s: EstimateInput, num_micro: float, gathers: float, whole_bytes: int) -> tuple[float, float]:
    """(bytes of weights that come from host memory in a step while nothing computes, those that come beside a block).

    ``gathers``: times that blocks are gathered; ``whole_bytes`` of all weights. Of shards over several ranks all are
    prefetched. Of a single shard nothing is before the root, which stays, and the first block of a forward pass, ``R c
    + B c`` a micro-batch; the last block comes back while the head's gradient is computed. Where the engine does not
    prefetch (``Layout.prefetches_blocks``), every block's come alone.
    """
    if s.layout.offload != "all":
        return 0.0, 0.0
    if s.num_shards > 1:
        return 0.0, gathers * whole_bytes / s.num_shards
    if not s.layout.prefetches_blocks:
        return gathers * whole_bytes, 0.0
    blocks = s.model.num_layers * (
        s.model.num_block_parameters * s.compute_bytes if s.trains_everything else s.frozen_block_bytes
    )
    root, first = num_micro * (whole_bytes - blocks), num_micro * blocks / s.model.num_layers
    return root + first, gathers * blocks - first
