"""Seconds of what ranks exchange in a step, of copies on the way there, and of sums of micro-batches. Pure arithmetic;
knows no torch. The notation is that of ``terms.py``; h bytes of an
element of a trained weight as ZeRO computes with it (DeepSpeed 0.19.8, options of ``engine/deepspeed.py``).
"""

from __future__ import annotations

from manyhands.core.limits import ZERO_BUCKET
from manyhands.planner.context import sent_bytes
from manyhands.planner.memory import zero
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.rates import LATENCY_S, NODE_LATENCY_S

# A bfloat16 gradient added to a float32 sum moves 10 bytes, by a kernel that is not vectorised and takes as long as
# others for 18: 15.8 ms of 3.8e9 parameters, 31.7 ms of 7.2e9
MIXED_SUM_BYTES = 18
# Assumed: the GPU idles while the host reads the numbers of rows, and launches what sends them
READ_ROWS_S = 1e-4


def gathers(s: TimeInput) -> float:
    """Times that a block's shards are gathered in a step: once or twice for each micro-batch, and for each pass beside
    the trained one.

    By ZeRO's stages 1 and 2 once, after the update; by stage 3 in each micro-batch's forward and backward pass, and
    again where blocks are computed again.
    """
    layout, more = s.estimate.layout, s.estimate.num_more_passes
    if layout.zero_stage == 3:
        return s.work.num_micro * ((3.0 if layout.activation_checkpointing == "full" else 2.0) + more)
    if layout.zero_stage:
        return 1.0
    return s.work.num_micro * (2 + more if layout.reshard_after_forward else 1)


def copies(s: TimeInput) -> float:
    """What ``fully_shard`` copies beside its collectives: shards into the gathered buffer and out of it, and gradients
    into one to be reduced. Where there is nothing to scatter it copies that, and of replicas divides it by 1, each read
    and written. A copy that one process keeps is written by the update.
    """
    e = s.estimate
    if e.layout.zero_stage:
        return _zero_copies(s)
    if e.layout.wrapper != "fully_shard":
        return 0.0
    held, c = whole_bytes(e), e.compute_bytes
    inward = held * (1 + (e.master_bytes / c if e.is_cast else 1)) / e.num_shards
    outward = 2 * held / s.fitted.shard_copies
    seconds = gathers(s) * (inward + outward)
    if e.trains_everything:
        times = s.work.num_micro if e.layout.reduce_every else 1
        seconds += times * (e.model.num_parameters - e.trained_in_experts) * (c + e.sum_bytes) * 0.75
    seconds *= s.fitted.shard_copies
    if e.trains_everything and e.num_shards == 1:
        seconds += times * e.model.num_parameters * (4 if e.layout.world_size > 1 else 2) * e.sum_bytes
    if e.is_cast:  # divided experts, where they are used, and their gradients
        own = e.trained_in_experts / e.layout.expert_degree
        seconds += s.work.num_micro * (forward_passes(s) + 1) * own * (e.master_bytes + c)
    return seconds / s.rates.memory


def accumulation(s: TimeInput) -> float:
    """Bytes over M that sums of a step's micro-batches move: the first one's gradients to float32, ``c + 4``, and each
    later one's added, 12 where shards are reduced before; else ``MIXED_SUM_BYTES`` of unreduced ones.
    """
    e, later = s.estimate, s.work.num_micro - 1
    if later <= 0 or e.layout.zero_stage:  # ZeRO's sums are among its copies
        return 0.0
    if e.num_shards > 1 and e.layout.reduce_every:
        return e.trained_here * 12 * later / s.rates.memory
    widened = (e.compute_bytes + 4, MIXED_SUM_BYTES) if e.is_cast else (0, 12)
    moved = (e.num_trained - e.trained_in_experts) * (widened[0] + widened[1] * later)
    return (moved + e.trained_in_experts / e.layout.expert_degree * 12 * later) / s.rates.memory


def whole_bytes(e: EstimateInput) -> int:
    """Of all weights as they are gathered, which divided experts are not."""
    if e.trains_everything:
        return (e.model.num_parameters - e.trained_in_experts) * e.compute_bytes
    blocks = e.frozen_blocks_bytes - e.frozen_block_in_experts * e.model.num_layers
    return e.num_root_parameters * e.frozen_bytes + blocks


def communication(s: TimeInput, compute: float) -> float:
    """Collectives that no compute hides, and what they slow where it does.

    By ``fully_shard`` each micro-batch gathers ``(S - 1) / S`` of all weights once or twice and reduces as much of
    the gradients' sums; a copy a rank reduces its gradients once a step, there and back. The first gather and the last
    reduction have nothing beside them: a root's share of all.
    """
    e, layout = s.estimate, s.estimate.layout
    if layout.world_size == 1:
        return 0.0
    shard, copies_of = layout.num_shards, layout.num_copies
    across = shard > s.num_local
    rate = s.rates.node_link if across else s.rates.link
    latency = NODE_LATENCY_S if layout.world_size > s.num_local else LATENCY_S
    if layout.zero_stage:
        beside, alone = _zero_collectives(s, rate, latency)
        hidden = min(beside, compute)
        return alone + (beside - hidden) + s.fitted.overlap_cost * hidden
    rounds = s.work.num_micro if layout.reduce_every else 1.0
    trained = e.num_trained - e.trained_in_experts
    units = e.model.num_layers + (2 if e.num_apart else 1)
    seconds = 0.0
    if shard > 1:
        times, held = gathers(s), whole_bytes(e)
        seconds += times * (held * (shard - 1) / shard / rate + units * latency)
        seconds += rounds * (trained * e.sum_bytes * (shard - 1) / shard / rate + units * latency)
    if copies_of > 1:
        over = s.rates.node_link if layout.world_size > s.num_local else s.rates.link
        reduced = trained * e.sum_bytes / shard * 2 * (copies_of - 1) / copies_of
        seconds += (rounds if shard > 1 else 1.0) * (reduced / over + units * latency)
    in_units = layout.wrapper == "fully_shard"
    keys = _exchanges_in_attention(s)
    alone = keys + seconds * (e.num_root_parameters / e.model.num_parameters if in_units else 0.05)
    beside = seconds + keys - alone
    hidden = min(beside, compute)
    return alone + (beside - hidden) + s.fitted.overlap_cost * hidden + exchanges(s)


def exchanges(s: TimeInput) -> float:
    """What the ranks that divide experts send one another, which no compute hides and the rank with the largest load
    decides: of T tokens with k experts each ``LARGEST_LOAD T k c H (D - 1) / D`` there and as much back in a block, in
    each forward pass and once backward; before a forward pass the numbers of rows, which the host reads. Once a step
    the gradients are summed over groups. From the operations of ``convert/experts.py``; not measured.
    """
    e, layout = s.estimate, s.estimate.layout
    degree, groups = layout.expert_degree, layout.world_size // layout.expert_degree
    if degree == 1:
        return 0.0
    rate = s.rates.node_link if degree > s.num_local else s.rates.link
    latency = NODE_LATENCY_S if degree > s.num_local else LATENCY_S
    forward = forward_passes(s)
    tokens = sum(micro.count * micro.tokens for micro in s.work.micros)
    sent = e.expert_load * tokens * e.model.rows_per_token * e.compute_bytes * e.model.hidden_size
    waits = s.work.num_micro * (2 * (forward + 1) * latency + forward * (latency + READ_ROWS_S))
    seconds = e.model.num_layers * (2 * (forward + 1) * sent * (degree - 1) / degree / rate + waits)
    if groups > 1:
        over = s.rates.node_link if layout.world_size > s.num_local else s.rates.link
        seconds += e.trained_in_experts * e.sum_bytes / degree * 2 * (groups - 1) / groups / over
    return seconds


def forward_passes(s: TimeInput) -> float:
    """Of a micro-batch through a mean block: more than one where the backward pass computes blocks again, selectively
    too, and beside the trained pass.
    """
    modes = s.estimate.layout.checkpointing_by_layer(s.estimate.model.num_layers)
    again = sum(mode != "none" for mode in modes) + s.estimate.layout.repeated_inputs
    return 1 + again / len(modes) + s.estimate.num_more_passes


def _exchanges_in_attention(s: TimeInput) -> float:
    """Seconds in which ranks that divide packs exchange heads or keys and values, which attention waits for: of the
    tokens of a rank ``sent_bytes`` a layer, the forward pass twice where the backward pass computes blocks again. Not
    measured.
    """
    e, layout = s.estimate, s.estimate.layout
    degree, heads = layout.mesh.context, layout.exchanges_heads
    if degree == 1:
        return 0.0
    passes = 2 if layout.activation_checkpointing != "none" else 1
    tokens = sum(micro.count * micro.tokens for micro in s.work.micros)
    sent = sent_bytes(e.model, degree, e.compute_bytes, heads=heads, passes=passes)
    rate = s.rates.node_link if degree > s.num_local else s.rates.link
    latency = NODE_LATENCY_S if degree > s.num_local else LATENCY_S
    exchanges = (4 if heads else 2) * (passes + 1) * s.work.num_micro
    return e.model.num_layers * (sent * tokens / rate + exchanges * latency)


def between_nodes(s: TimeInput) -> float:
    """Bytes that a node sends to others in a step, 0 where all ranks are on one.

    In rings over all ranks what is gathered or reduced passes each link between two nodes once, and what is summed
    everywhere twice. Shards within a node leave it only as sums of shards: ``2 (C - 1) / C`` of the gradients.
    """
    e, layout = s.estimate, s.estimate.layout
    shard, copies_of = layout.num_shards, layout.num_copies
    if layout.world_size <= s.num_local:
        return 0.0
    rounds, sums = (
        s.work.num_micro if layout.reduce_every else 1.0,
        (e.num_trained - e.trained_in_experts) * e.sum_bytes,
    )
    groups = layout.world_size // layout.expert_degree
    moved = e.trained_in_experts * e.sum_bytes * 2 * (groups - 1) / groups
    if shard > s.num_local:
        whole = (shard - 1) / shard
        gathered = gathers(s) * whole_bytes(e)
        if e.weight_shards == 1:
            gathered = e.num_trained * e.held_bytes
        times = 2 if e.layout.zero_stage in (1, 2) else 1  # which sum everywhere
        moved += whole * (gathered + times * rounds * sums)
    if copies_of > 1:
        leaving = sums * min(shard, s.num_local) / shard
        moved += (rounds if shard > 1 else 1.0) * leaving * 2 * (copies_of - 1) / copies_of
    return moved


def _zero_copies(s: TimeInput) -> float:
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
        moved += gathers(s) * e.model.num_parameters * zero.gathered_bytes(e) * (2 / shards + 2)
    return moved / s.rates.memory


def _zero_collectives(s: TimeInput, rate: float, latency: float) -> tuple[float, float]:
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
        held = e.model.num_parameters * zero.gathered_bytes(e)
        fetching = gathers(s) * (held * share / rate + weights * latency)
        return fetching + (1 - root) * reducing, root * reducing
    gathering = e.num_trained * e.held_bytes * share / rate + units * latency
    return (1 - root) * reducing, root * reducing + gathering
