"""Bytes a rank holds at its worst moment: one small function a term. Pure arithmetic; knows no torch and reads nothing.

Its input is an ``EstimateInput`` (``input.py``); what blocks keep and need is in ``activations.py``, gradients are
in ``gradients.py``, and what is offloaded in ``host.py``; on a CPU the device is the machine, and nothing moves.

Notation, here and there: P parameters, A trained parameters of adapters, B parameters of one block, R of the rest
(embeddings, last norm, head), L blocks, T tokens of a micro-batch, H hidden size, I inner size of the MLP, V
vocabulary, c bytes of a compute element, m of a master's, f of a frozen one, S ranks that share one copy of the state
(1 unless fsdp or hsdp).

The worst moment is one of three: the loss, when every block's activations are held beside a chunk of logits; the start
of the backward pass, when the last block works on top of them; or its end, when all gradients are there and those of
the root unit (embeddings and head) are reduced. ``estimate_terms`` takes the worst. Compared with measured peaks in
``tests/planner/test_memory_measured.py``, with peers' in ``test_memory_peers.py``.
"""

from __future__ import annotations

import math

from manyhands.core.limits import (
    GIB,
    MAX_AHEAD_BYTES,
    MAX_CHUNK_LOGITS,
    MAX_LEAVING_BYTES,
    MAX_LOGITS_FROZEN,
    MAX_LOGITS_TRAINED,
    MIN_CHUNK_TOKENS,
)
from manyhands.optim.registry import OPTIMIZERS, TrainedCounts
from manyhands.planner.memory import zero
from manyhands.planner.memory.activations import (
    attention_mask,
    block_at_work,
    block_scores,
    kept_activations,
    kept_bytes_per_token,
)
from manyhands.planner.memory.gradients import (
    BLOCKS_IN_FLIGHT,
    earlier_gradients,
    gradients,
    gradients_leave,
    gradients_on_host,
    reduction,
    root_reduction,
    unreduced,
)
from manyhands.planner.memory.images import with_images
from manyhands.planner.memory.input import EstimateInput, TrainedWeights

GATHERED_BLOCKS = 3  # these two, and the buffer that the next one came in, until it is copied out of it
# CUDA context and loaded kernels, 0.80 to 0.82 GiB measured on H200s; on CPU the imports
CONTEXT_BYTES = {"cuda": int(0.82 * GIB), "cpu": int(0.6 * GIB)}
WORKSPACE_BYTES = {"cuda": 2**26, "cpu": 0}  # of cuBLAS and cuBLASLt, 32 MiB each on Hopper: torch allocates them
# NCCL's / gloo's buffers, with more than one rank: 0.74 to 0.76 GiB measured on 2 and 4 H200s
COMMUNICATION_BYTES = {"cuda": int(0.76 * GIB), "cpu": GIB // 16}
# more of NCCL's where ranks divide packs, or experts: measured on 2 H200s
CONTEXT_GROUP_BYTES, EXPERT_GROUP_BYTES = int(0.91 * GIB), int(0.43 * GIB)
GRAPH_BYTES = 10 * 2**20  # a layer in CUDA graphs: 5 to 11 MiB more than without on an H200, 8,192 tokens, 0.1 to 1.5B
# Share of what comes and goes that the allocator cannot use: 0.1 to 1.9 % of fitted rows, whose segments expand.
FRAGMENTATION = {"cuda": 0.015, "cpu": 0.05}
UNFUSED_FRAGMENTATION = 0.079  # adapters in modules that are not fused: the more of 4.0 and 7.9 %, two fitted shapes


def estimate_terms(setup: EstimateInput) -> dict[str, int]:
    """Every term in bytes, by name, at the worst moment. Their sum is the estimated peak of one rank."""
    standing = {"weights": weights(setup), "optimizer": optimizer(setup), "gathered": gathered(setup) + fetched(setup)}
    moments: tuple[dict[str, int], ...] = (at_the_loss(setup), in_the_backward_pass(setup), at_its_end(setup))
    standing, moments = with_images(setup, standing, moments)
    every = [standing | moment | {"pools": unused(setup, standing | moment)} for moment in moments]
    terms = max(every, key=lambda terms: sum(terms.values()) - gradients_on_host(setup, terms))
    terms["overhead"] = overhead(setup)
    return terms


def at_the_loss(s: EstimateInput) -> dict[str, int]:
    """The end of the forward pass: all that the blocks keep, and ``3 T c H`` of the last block's result, what the head
    gets of it and its gradient.
    """
    hidden = 3 * s.layout.full_micro_tokens * s.compute_bytes * s.model.hidden_size
    kept = kept_activations(s, MAX_LEAVING_BYTES) + hidden + attention_mask(s)
    return earlier_gradients(s) | {"dequantized": 0, "activations": kept, "logits": logits(s), "reduction": 0}


def in_the_backward_pass(s: EstimateInput) -> dict[str, int]:
    """The last block's backward pass: all that the blocks keep, this block at work, and the gradients that it and the
    head give.
    """
    at_work = (
        kept_activations(s, MAX_AHEAD_BYTES)
        + block_at_work(s, s.layout.last_checkpointing)
        + attention_mask(s)
        + block_scores(s)
    )
    terms = {"dequantized": dequantized(s), "activations": at_work, "logits": 0, "reduction": reduction(s)}
    return earlier_gradients(s) | terms


def at_its_end(s: EstimateInput) -> dict[str, int]:
    """All gradients are there; the first block is at work, or those of the root are reduced, whichever is more. Of what
    waited for the last micro-batch, the blocks' have been reduced. ``gap_bytes`` lies between the gradients.
    """
    first = (
        s.layout.full_micro_tokens * kept_bytes_per_token(s, s.layout.activation_checkpointing)
        + block_at_work(s, s.layout.activation_checkpointing)
        + attention_mask(s)
        + block_scores(s)
    )
    block = {"dequantized": dequantized(s), "activations": first, "logits": 0, "reduction": reduction(s) + gap_bytes(s)}
    root = {"dequantized": 0, "activations": 0, "logits": 0, "reduction": root_reduction(s)}
    terms = max(block, root, key=lambda terms: sum(terms.values()))
    waiting = min(unreduced(s), s.num_root_parameters * s.sum_bytes) if s.layout.accumulates else 0
    return {"gradients": gradients(s), "unreduced": waiting} | terms


def weights(s: EstimateInput) -> int:
    """Masters, or frozen weights and adapters: ``P m / S``, or ``P f / S + A m / S``; NF4 as in ``frozen_block_bytes``.

    By patterns each weight is one or the other: ``(P - trained) f / S + trained m / S``. ZeRO's are in compute dtype
    where that is not the masters', and at its stages 1 and 2 whole: ``P c``; its masters are among the states. Frozen
    stacks in fp8 may be there transposed as well.
    """
    if s.partially_trained is not None:
        return (
            (s.model.num_parameters - s.partially_trained.total) * s.frozen_bytes
            + s.partially_trained.total * s.master_bytes
        ) // s.weight_shards
    if s.trains_everything:
        return s.model.num_parameters * s.held_bytes // s.weight_shards + s.by_experts(
            s.trained_in_experts * s.held_bytes
        )
    frozen = s.num_root_parameters * s.frozen_bytes + s.frozen_blocks_bytes
    in_experts = s.frozen_block_in_experts * s.model.num_layers + s.trained_in_experts * s.master_bytes
    shared = (frozen + s.num_adapter_parameters * s.master_bytes) // s.weight_shards + s.by_experts(in_experts)
    return shared + quantized_weights(s) + s.layout.keeps_transposed * s.transposed_bytes


def quantized_weights(s: EstimateInput) -> int:
    """Frozen whole weights in fp8, quantized once beside themselves: a byte a value for y and one for dX, ``2 L (linear
    layers)``.
    """
    if not s.fp8_blocks or s.fp8_weights or s.trains_everything or s.num_shards > 1 or s.layout.offload == "all":
        return 0
    return 2 * (s.num_in_linears - s.model.sum_linears(lambda shape: shape.size if shape.groups > 1 else 0))


def state_bytes(s: EstimateInput) -> int:
    """Of an optimizer's states over all shards, as a checkpoint holds them: AdamW's two moments are ``2 trained m``."""
    model, linears = s.model, s.model.block_linear_shapes.values()
    num_root = (
        s.num_root_parameters if s.trains_everything else s.partially_trained.num_in_root if s.partially_trained else 0
    )
    matrices = 1 if model.tied_embeddings else 2
    sides = model.num_layers * sum(shape.out + shape.into for shape in linears) + matrices * (
        model.vocab_size + model.hidden_size
    )
    if s.num_adapter_parameters:  # a factor of rank r has one side for each r elements, and r more
        sides = s.num_adapter_parameters // s.adapter_rank + 2 * s.adapter_rank * model.num_layers * len(linears)
    counts = TrainedCounts(s.num_trained, num_root + s.outer_trained, min(num_root, s.head_elements), sides)
    return int(OPTIMIZERS[s.optimizer_name].state_bytes(counts, s.master_bytes))


def optimizer(s: EstimateInput) -> int:
    """States over S, or nothing of paged ones: the driver moves them to the host when activations need the room. Fused
    AdamW needs no copy. ZeRO's masters, ``trained m / S``, are flat tensors beside them.
    """
    states = 0 if OPTIMIZERS[s.optimizer_name].is_paged else state_bytes(s)
    masters = s.num_trained * s.master_bytes if s.layout.zero_stage else 0
    counts = TrainedCounts(s.trained_in_experts, 0, 0, 0)
    in_experts = s.by_experts(OPTIMIZERS[s.optimizer_name].state_bytes(counts, s.master_bytes)) if states else 0
    return (masters + states) // s.num_shards + in_experts


def gathered(s: EstimateInput) -> int:
    """Whole weights in compute dtype that FSDP2, or engine/masters.py, makes from shards or masters.

    ``(R - E) c`` for the root, which stays gathered, plus ``min(3, L) B c`` if blocks are resharded after the forward
    pass, else ``L B c``; of a single shard one block's, as FSDP2 gathers none ahead then, or two where the engine
    copies the next one from host memory (``Layout.prefetches_blocks``). Frozen weights are gathered as they are kept.
    Nothing where the weights are whole and in compute dtype already. Experts that ranks divide are not gathered, but
    cast where they are used, ``X c / expert_degree`` of a block's X. Weights trained by patterns are gathered as
    masters, and cast where they are used: see ``_gathered_partially_trained``.
    """
    if s.partially_trained is not None and not s.layout.zero_stage:
        return _gathered_partially_trained(s, s.partially_trained)
    if s.layout.zero_stage:
        return zero.live_weights(s)
    if s.num_shards == 1 and not s.gathers_whole:
        return 0
    in_experts = s.frozen_block_in_experts
    ahead = GATHERED_BLOCKS if s.num_shards > 1 else BLOCKS_IN_FLIGHT if s.layout.prefetches_blocks else 1
    num_blocks = min(ahead, s.model.num_layers) if s.layout.reshard_after_forward else s.model.num_layers
    if s.trains_everything:
        dense = s.num_root_parameters - s.num_apart + num_blocks * (s.model.num_block_parameters - s.block_in_experts)
        casts = s.model.num_layers if s.layout.last_checkpointing == "none" else 1  # kept for the backward pass
        return (dense + casts * s.is_cast * s.block_in_experts // s.layout.expert_degree) * s.compute_bytes
    root = (s.num_root_parameters - s.num_apart) * s.frozen_bytes
    return root + num_blocks * (s.frozen_block_bytes - in_experts)


def fetched(s: EstimateInput) -> int:
    """Shards of two blocks that come from host memory, before they are gathered: ``2 B m / S``, or as frozen ones are
    kept.

    Of a single shard one weight at a time, the largest: as it lies there, cast if it is, and the one before, which
    FSDP2 holds until the next is there.
    """
    if s.layout.offload != "all" or s.layout.zero_stage:
        return 0
    if s.num_shards == 1:
        everything = s.trains_everything
        held, used = (s.master_bytes, s.compute_bytes) if everything else (s.frozen_bytes, s.frozen_bytes)
        largest = max(shape.size for shape in s.model.block_linear_shapes.values())
        return largest * (held + used + (used if s.is_cast else 0))
    block = s.model.num_block_parameters * s.master_bytes if s.trains_everything else s.frozen_block_bytes
    return min(BLOCKS_IN_FLIGHT, s.model.num_layers) * block // s.num_shards


def _gathered_partially_trained(s: EstimateInput, t: TrainedWeights) -> int:
    """The same for partially trained models, and ``c`` for each trained weight: autograd keeps the cast copy until the
    backward pass is there.

    Of copies in blocks that are computed again one block's are held.
    """
    casts = 0 if s.compute_bytes == s.master_bytes else s.compute_bytes
    held = t.num_in_root + (t.num_in_blocks if s.layout.last_checkpointing == "none" else t.num_in_largest_block)
    if s.num_shards == 1 and not s.gathers_whole:
        return held * casts
    num_blocks = min(GATHERED_BLOCKS, s.model.num_layers) if s.layout.reshard_after_forward else s.model.num_layers
    trained = t.num_in_root + min(num_blocks * t.num_in_largest_block, t.num_in_blocks)
    plain = s.num_root_parameters - s.num_apart + num_blocks * s.model.num_block_parameters
    return plain * s.frozen_bytes + trained * (s.master_bytes - s.frozen_bytes) + held * casts


def dequantized(s: EstimateInput) -> int:
    """The largest weight in NF4 while it is multiplied: ``n c``, and ``5 n / 64`` for the scales of its blocks if these
    are quantized. In fp8 quantized values, and ``n c`` of a stack that is kept so, or ``n`` where it multiplies in fp8:
    its transposed values, if these are not kept.
    """
    shapes = s.model.block_linear_shapes.values()
    stack = max((shape.size for shape in shapes if shape.groups > 1), default=0) * s.fp8_weights
    stack *= (not s.layout.keeps_transposed) if s.fp8_groups else s.compute_bytes
    if s.fp8_blocks and not quantized_weights(s):  # fp8 values of gate and up, for y or for dX
        return max(stack, sum(sorted(shape.size for shape in shapes if shape.groups == 1)[-2:]))
    if s.model.stored_mxfp4:
        return max(s.model.block_linear_shapes[name].size for name in s.model.stored_mxfp4) * s.compute_bytes
    if not s.nf4_blocks:
        return stack
    largest = max(shape.size for shape in shapes)
    return largest * s.compute_bytes + 5 * largest // 64 * s.nf4_double


def logits(s: EstimateInput) -> int:
    """What the loss holds beside the hidden states.

    Fused (kernels/loss): a chunk of logits in compute dtype, in whose place their gradient comes, ``chunk V c``; of
    a trained head also the sum of its gradient over the chunks, ``4 V H``, and then, in the logits' place, the same in
    compute dtype. Else a chunk's logits in compute dtype, in float32, and their gradient, ``chunk V (c + 4 + 4)``, and
    ``2 V H c`` of a trained head.

    ``chunk`` is at most T tokens, and 2**27 / V of them, fused 2**28 / V or, where the head is trained, 2**29 / V.
    """
    vocabulary, trained, c = s.model.vocab_size, s.num_trained_in_head, s.compute_bytes
    if s.fuse_loss:
        most = (MAX_LOGITS_TRAINED if trained else MAX_LOGITS_FROZEN) // vocabulary
        chunk = min(s.layout.full_micro_tokens, max(1, most))
        total = trained * (max(4, c) if chunk < s.layout.full_micro_tokens else c)
        return max(chunk * vocabulary, trained) * c + total
    chunk = min(s.layout.full_micro_tokens, max(MIN_CHUNK_TOKENS, MAX_CHUNK_LOGITS // vocabulary))
    return chunk * vocabulary * (c + 4 + 4) + 2 * trained * c


def unused(s: EstimateInput, terms: dict[str, int]) -> int:
    """What torch's allocator has reserved and nothing is in, at the moment of ``terms``: whole pools, a share of what
    comes and goes, and the room of a dequantized weight, which larger tensors do not fit into while it is away.
    """
    passing = sum(terms[name] for name in ("gathered", "dequantized", "activations", "logits", "reduction"))
    room = dequantized(s) if s.layout.device == "cuda" else 0
    return pools(s, terms) + room + partly_filled(s) + between_inputs(s) + math.ceil(fragmentation(s) * passing)


def between_inputs(s: EstimateInput) -> int:
    """Memory that stays reserved where inputs of blocks are recomputed: two inputs, ``2 T c H``. Measured once, on an
    H200 with 131,072 tokens and inputs of 1 GiB: 1.98 GiB more than without.
    """
    if not s.layout.repeated_inputs or s.layout.device == "cpu":
        return 0
    return 2 * s.layout.full_micro_tokens * s.compute_bytes * s.model.hidden_size


def partly_filled(s: EstimateInput) -> int:
    """Room of dequantized weights that smaller activations take and do not fill: ``min(D - A, T H c / 2)`` a block.

    With fewer tokens than hidden sizes, a result of the MLP (``A = T I c``) is smaller than a dequantized weight
    (``D = H I c``). It is kept where a weight was, and tensors of the residual stream fill all but half of one of what
    it leaves. Only blocks that keep all activations do so. Measured with a 34B model's blocks (H 7168), in MiB a block
    more than with 7,168 tokens: 26, 45, 45 and 26 with 4,096, 5,120, 6,144 and 8,192; estimated: 28, 35, 40 and 0.
    """
    if not s.nf4_blocks or s.layout.device == "cpu" or s.model.norms_mlp_output:  # measured: none there
        return 0
    layers = (s.model.num_layers - s.layout.lighter_layers) * (s.layout.activation_checkpointing == "none")
    layers += s.layout.lighter_layers * (s.layout.last_checkpointing == "none")
    tokens, hidden = s.layout.full_micro_tokens, s.model.hidden_size
    left = min((hidden - tokens) * s.model.intermediate_size, tokens * hidden // 2)
    return layers * max(0, left) * s.compute_bytes


def gap_bytes(s: EstimateInput) -> int:
    """Room between sharded gradients that none of them fits into, beyond what is counted as on its way.

    A unit's sums are one tensor of ``g = 4 B / S``; a block's backward pass frees the ``a`` bytes that it kept. Where
    ``g / 2 < a < g`` only every second tensor lies where activations were, in the room of two blocks, and ``2 a - g``
    stay free each time: ``L / 2 (2 a - g) / 2`` until rooms join, about halfway through the blocks (by the allocator's
    own rules, best fit in segments that expand, over the tensors of a step; 4.1 GiB of 40 blocks measured). Where
    blocks keep more, activations are the worst moment. A second block on its way is counted by ``reduction`` and
    ``gathered``, but is not there: ``B (3 c + 4)``.
    """
    if s.num_shards == 1 or s.layout.zero_stage or not s.trains_everything or not s.layout.sums_are_gradients:
        return 0
    if s.layout.device == "cpu" or not s.layout.reshard_after_forward:
        return 0  # a block's own weights are freed beside its activations, and make the room large enough
    shard = s.model.num_block_parameters * s.sum_bytes // s.num_shards
    kept = s.layout.full_micro_tokens * kept_bytes_per_token(s, s.layout.activation_checkpointing)
    on_its_way = s.model.num_block_parameters * (3 * s.compute_bytes + s.sum_bytes)
    return max(0, s.model.num_layers * (2 * min(kept, shard) - shard) // 4 - on_its_way)


def pools(s: EstimateInput, terms: dict[str, int]) -> int:
    """What torch's allocator holds for one stream and another cannot use, at the moment of ``terms``.

    ``fully_shard`` gathers in a stream of its own, whose pool keeps the largest buffer: an outer unit's, or two
    blocks', of which one block's is counted in ``gathered``; and of weights that are cast that unit's shards in compute
    dtype beside it, ``max(R - E, E) c / S`` (``foreach_all_gather``). Blocks whose gathered weights come and go among
    activations that stay leave one block's room between them. Reductions have another pool, in which the next steps'
    activations find no room: see ``reduce_pool_bytes`` and ``divide_buffer_bytes``. So have DeepSpeed's buckets, and
    weights that its stage 3 has released.
    """
    if s.layout.zero_stage and s.layout.device == "cuda":
        return (0 if terms["reduction"] else zero.buckets(s)) + zero.released_weights(s)
    if s.layout.wrapper != "fully_shard" or s.layout.device == "cpu":
        return 0
    apart = reduce_pool_bytes(s, terms["gradients"])
    if s.num_shards == 1:
        return apart + divide_buffer_bytes(s)
    block = s.model.num_block_parameters * s.compute_bytes if s.trains_everything else s.frozen_block_bytes
    root = s.largest_outer_unit * (s.compute_bytes if s.trains_everything else s.frozen_bytes)
    cast = root // s.num_shards if s.is_cast and s.layout.offload != "all" else 0
    resharded = s.layout.reshard_after_forward and s.model.num_layers >= GATHERED_BLOCKS
    gathering = max(0, max(root + cast, BLOCKS_IN_FLIGHT * block) - resharded * block)
    between = block if resharded and s.layout.last_checkpointing != "full" else 0
    return gathering + between + apart


def divide_buffer_bytes(s: EstimateInput) -> int:
    """What FSDP2 makes of the largest unit's sums where replicas have nothing to scatter: a quotient of its own, by the
    factor of 1 that several ranks are given, in the stream that reduces (``foreach_reduce``): ``4 max(R - E, E, B)``.
    """
    return largest_sums(s) if s.trains_everything and s.layout.world_size > 1 else 0


def largest_sums(s: EstimateInput) -> int:
    """Of the largest unit, the result of a reduction: ``4 max(R - E, E, B) / S``, in the gradients' own dtype where
    weights compute in the dtype they have.
    """
    largest = max(s.largest_outer_unit, s.model.num_block_parameters)
    several = s.is_cast or s.layout.world_size > 1
    return largest * (s.sum_bytes if several else s.master_bytes) // s.num_shards


def reduce_pool_bytes(s: EstimateInput, counted: int) -> int:
    """Gradients in the pool of the stream that reduces them, beyond those that are ``counted``.

    All of them until the step where they are cast when they are reduced, and of replicas that reduce several
    micro-batches (``engine/gradient_memory.py``): there the largest unit's result lies beside its earlier sum as well
    (``foreach_reduce``: ``partial_reduce_output``). Of those that are offloaded the largest unit's: the pool keeps its
    room, of which ``reduction`` counts two blocks'. None where weights are updated in the backward pass: nothing is
    reduced.
    """
    if s.updates_in_backward:
        return 0
    if gradients_leave(s):
        blocks = BLOCKS_IN_FLIGHT * s.model.num_block_parameters * s.master_bytes // s.num_shards
        return max(0, largest_sums(s) - blocks) if s.trains_everything else 0
    reduces_each = s.layout.reduce_every or s.num_shards == 1
    several = s.layout.accumulates and s.layout.mesh.replicate > 1 and reduces_each
    if not several and s.layout.sums_are_gradients:
        return 0
    return max(0, gradients(s) - counted) + (largest_sums(s) if several and s.trains_everything else 0)


def fragmentation(s: EstimateInput) -> float:
    """The share of memory that comes and goes which the allocator loses to fragmentation."""
    unfused = s.layout.device == "cuda" and s.num_adapter_parameters > 0 and not s.fuses_modules
    return UNFUSED_FRAGMENTATION if unfused else FRAGMENTATION[s.layout.device]


def overhead(s: EstimateInput) -> int:
    """Outside of torch's allocator: context, and communication buffers with more than one rank, of DeepSpeed's own
    group and those that divide packs or experts too. And inside, cuBLAS' workspaces and what CUDA graphs copy.
    """
    communication = COMMUNICATION_BYTES[s.layout.device] if s.layout.world_size > 1 else 0
    if s.layout.device == "cuda":
        communication += zero.GROUP_BYTES * (s.layout.zero_stage in (1, 2))
        communication += CONTEXT_GROUP_BYTES * (s.layout.mesh.context > 1)
        communication += EXPERT_GROUP_BYTES * (s.layout.expert_degree > 1)
    graphs = GRAPH_BYTES * s.model.num_layers * s.layout.cuda_graphs
    return CONTEXT_BYTES[s.layout.device] + WORKSPACE_BYTES[s.layout.device] + communication + graphs
