"""Bytes of DeepSpeed's ZeRO beyond what it shards. As DeepSpeed 0.19.8 does it with the options of
``engine/deepspeed.py``. The notation is that of ``terms.py``.
"""

from __future__ import annotations

from manyhands.core.limits import GIB, ZERO_BUCKET, ZERO_LIVE, ZERO_PREFETCH
from manyhands.planner.memory.input import EstimateInput

# Buffers of the group of ranks in which stages 1 and 2 reduce, a copy of the one that is there: 2.05 to 2.06 GiB were
# outside of torch's allocator in place of 1.58 (shapes of 1.2e9, 8e9 and 27e9, two H200s)
GROUP_BYTES = int(0.47 * GIB)


def live_weights(e: EstimateInput) -> int:
    """Weights that stage 3 has gathered: at most 1.05e9 elements, in the dtype they are held in."""
    if e.layout.zero_stage < 3:
        return 0
    return min(e.model.num_parameters, ZERO_LIVE + ZERO_PREFETCH) * gathered_bytes(e)


def released_weights(e: EstimateInput) -> int:
    """Gathered weights that stage 3 has released and no longer counts, while the GPU has yet to use them: at most those
    of one pass, ``P h``.

    The gathers' stream waits only for its own last two gathers, so the host gathers ahead of the compute stream. Memory
    that the compute stream still reads is not reused until it has finished (``record_stream``).
    """
    return e.model.num_parameters * gathered_bytes(e) if e.layout.zero_stage == 3 else 0


def gathered_bytes(e: EstimateInput) -> int:
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
