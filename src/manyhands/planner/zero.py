"""What DeepSpeed's ZeRO takes beyond what it shards: buffers in bytes, copies, collectives and hooks in seconds. Pure
arithmetic; knows no torch. As DeepSpeed 0.19.8 does it with the options of ``engine/deepspeed.py``.

The notation is that of ``memory.py`` and ``time.py``; h bytes of an element of a trained weight as it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.core.limits import GIB, ZERO_BUCKET, ZERO_LIVE, ZERO_PREFETCH
from manyhands.planner.estimate_input import EstimateInput

if TYPE_CHECKING:
    from manyhands.planner.time import TimeInput

# Of stage 3, times the host's time of a block that is not compiled: each module is fetched and released by hooks in
# Python, each weight is a gather of its own. Processor time of a rank's main thread by blocks of a tiny model, on a
# CPU, beside DDP's: 3.5 times without activation checkpointing, 2.6 times with.
STAGE_3_HOOKS = 3.0
# Buffers of the group of ranks in which stages 1 and 2 reduce, a copy of the one that is there: 2.05 to 2.06 GiB were
# outside of torch's allocator in place of 1.58 (shapes of 1.2e9, 8e9 and 27e9, two H200s)
GROUP_BYTES = int(0.47 * GIB)


def live_weights(e: EstimateInput) -> int:
    """Weights that stage 3 has gathered: at most 1.05e9 elements, in the dtype they are held in."""
    if e.layout.zero_stage < 3:
        return 0
    return min(e.model.num_parameters, ZERO_LIVE + ZERO_PREFETCH) * _gathered_bytes(e)


def released_weights(e: EstimateInput) -> int:
    """Gathered weights that stage 3 has released and no longer counts, while the GPU has yet to use them: at most those
    of one pass, ``P h``.

    The gathers' stream waits only for its own last two gathers, so the host gathers ahead of the compute stream. Memory
    that the compute stream still reads is not reused until it has finished (``record_stream``).
    """
    return e.model.num_parameters * _gathered_bytes(e) if e.layout.zero_stage == 3 else 0


def _gathered_bytes(e: EstimateInput) -> int:
    """Of an element of a weight that stage 3 gathers."""
    return e.held_bytes if e.trains_everything else e.frozen_bytes


def buckets(e: EstimateInput) -> int:
    """Buffers that gradients pass through on their way to their partitions.

    Stages 1 and 2: two in the weights' dtype that fill in turn, and one of float32 that travels. Stage 3: one of
    float32, ``4 bucket``, and what is packed of it for all ranks, or the largest weight's gradient in float32, which
    fits into no bucket: ``4 V H`` where the head is trained.
    """
    bucket = min(e.num_trained, ZERO_BUCKET)
    if e.layout.zero_stage < 3:
        return bucket * (2 * e.held_bytes + 4)
    return 4 * bucket + 4 * max(bucket, e.num_trained_in_head)


def copies(s: TimeInput) -> float:
    """Bytes over M that ZeRO copies beside its collectives.

    ==================================  =================  ======================
    a gradient, each micro-batch        stages 1 and 2     stage 3
    ==================================  =================  ======================
    into the bucket                     2 h                h + 4
    packed for all ranks                2 h                8
    divided by their number             0                  8
    to float32 and back (h is not 4)    2 (h + 4)          0
    into the partition                  (20 + h) / S       8 / S
    ==================================  =================  ======================

    Once a step the update copies its part from float32, ``(4 + h) / S``; stage 3 flattens the gradients before,
    ``8 / S``. By stage 3 each gather packs shards and unpacks weights: ``h (2 / S + 2)`` of all.
    """
    e = s.estimate
    h, shards = e.held_bytes, e.num_shards
    if e.layout.zero_stage == 3:
        gradient, update = h + 4 + 8 + 8 + 8 / shards, (4 + h + 8) / shards
    else:
        gradient = 4 * h + (2 * (h + 4) if h != 4 else 0) + (16 + 4 + h) / shards
        update = (4 + h) / shards
    moved = e.num_trained * (s.work.num_micro * gradient + update)
    if e.layout.zero_stage == 3:
        moved += gathers(s) * e.model.num_parameters * _gathered_bytes(e) * (2 / shards + 2)
    return moved / s.rates.memory


def gathers(s: TimeInput) -> float:
    """Times that all weights are gathered in a step: by stages 1 and 2 once, after the update; by stage 3 in each
    micro-batch's forward and backward pass, and once more where blocks are computed again.
    """
    layout = s.estimate.layout
    if layout.zero_stage < 3:
        return 1.0
    return s.work.num_micro * (3.0 if layout.activation_checkpointing == "full" else 2.0)


def collectives(s: TimeInput, rate: float, latency: float) -> tuple[float, float]:
    """Seconds of collectives of N bytes/s: those that compute may hide, and those that nothing can.

    Stages 1 and 2 sum whole buckets on all ranks (``use_multi_rank_bucket_allreduce``), in float32, and gather what the
    update has changed: ``4 trained 2 (S - 1) / S`` and ``h trained (S - 1) / S``. Stage 3 gathers and reduces shards.
    Nothing is beside the gather after the update, nor beside the root's gradients, the last to come: R / P of all.
    """
    e = s.estimate
    share = (e.num_shards - 1) / e.num_shards
    units = e.num_trained / min(e.num_trained, ZERO_BUCKET) + 1
    root = e.num_root_parameters / e.model.num_parameters if e.trains_everything else 0.0
    both_ways = 1 if e.layout.zero_stage == 3 else 2
    reducing = s.work.num_micro * (both_ways * e.num_trained * e.sum_bytes * share / rate + units * latency)
    if e.layout.zero_stage == 3:
        weights = e.model.num_layers * len(e.model.block_linear_shapes) + 1
        held = e.model.num_parameters * _gathered_bytes(e)
        fetching = gathers(s) * (held * share / rate + weights * latency)
        return fetching + (1 - root) * reducing, root * reducing
    gathering = e.num_trained * e.held_bytes * share / rate + units * latency
    return (1 - root) * reducing, root * reducing + gathering
