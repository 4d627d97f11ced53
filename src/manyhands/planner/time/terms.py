"""Seconds of a step: one small function a term. Pure arithmetic; knows no torch and reads nothing.

Its input is a ``TimeInput``: what memory is estimated from (``EstimateInput``), what a mean step computes
(``work.py``), and what the GPUs sustain (``rates.py``, whose fitted shares are in ``fitted.toml``). What ranks exchange
is in ``collectives.py``, what a block's elementwise kernels move in ``elementwise.py``.

Notation, beside that of ``memory/terms.py``: T tokens of a micro-batch, F FLOP/s of matmuls, M bytes/s of memory, N
bytes/s of collectives, c bytes of a compute element, S ranks that share one copy. A matmul of (m, k) and (k, n) takes
``2 m k n`` operations. Time of micro-batches is summed; that of updates is once a step. The GPU's work and the host's
launches run beside each other: a step takes as long as the longer of the two. Measured: ``docs/planner-accuracy.md``.
"""

from __future__ import annotations

import math

import numpy as np

from manyhands.facts.types import LinearShape, ModelFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.layout import Checkpointing
from manyhands.planner.memory.activations import mlp_elements, moved_bytes
from manyhands.planner.memory.host import fetched_alone
from manyhands.planner.memory.images import mlp_of
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.time.collectives import accumulation, communication, copies, gathers, whole_bytes
from manyhands.planner.time.elementwise import moved_values, num_kernels
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.work import MicroBatchGroup

TILE = (128, 256)  # rows and columns that one multiprocessor computes of a matmul at a time
NUM_PROCESSORS = 132  # of Hopper
SPLIT_K = 1024
GROUPED_SHARE = 0.9  # of a dense product's sustained rate: a step of an 8x7B mixture on an H200
UNHIDDEN_WEIGHTS = 0.5  # of the time to read them: fits 256 and 99 ms of steps with 256 and 512 rows a group on an H200
FP8_GROUPED = 1.31  # times the rate of tiles in fp8: four products of 512 rows a group, 1.61 ms in place of 2.17
# Seconds of a mixer's kernels, over those of the bytes and operations that the formula counts: gated delta networks of
# a 9B hybrid with 2 x 4,096 tokens on an H200, 83 ms and 24
MIXER_TIMES = 3.5
# Tokens of a sample, and by what factor the forward kernel is slower than at its rate on short ones: cuDNN on an H200
LONG_FORWARD = (32_768, 131_072, 524_288, 1_048_576), (1.0, 1.14, 1.28, 1.47)
# Parts of the time of cuDNN on short ones that FlashAttention 4 takes; of 131,072 in a step, of others by themselves
FLASH4_TOKENS = (4_096, 131_072, 524_288, 1_048_576)
FLASH4_FORWARD, FLASH4_BACKWARD = (0.95, 0.93, 0.93, 0.94), (0.95, 0.91, 0.87, 0.86)
HEAD_WIDTH = 64  # dimensions that attention kernels compute together
LOGIT_PASSES = 4.0  # times that the fused loss reads or writes a logit
PLAIN_LOGIT_PASSES = 12.0  # the same of transformers' own, with float32 copies
EAGER = 3.0  # times the launches of blocks that are not compiled
DYNAMIC = 2.2  # times the launches of a block compiled for any size: 5.5 ms with adapters, a 0.6B model beside an H200
GRAPH = 0.24  # of the time to launch a compiled block, as a CUDA graph: 135M with 512 tokens, 30 ms a step on an H200
SDPA_MASKED = 2.0  # a kernel that reads a mask takes so many times as long, over all pairs of a pack
# A kernel's time beyond the bytes it moves: 2.5 us (updates of 272 small weights take 1.6 ms for 0.9), and 2 us
# to the next (steps beside the sum of their kernels, over 1,257 to 14,893 launches of fitted shapes)
KERNEL_S = 4.5e-6
# The same in CUDA graphs, where the next kernel follows at once: five shapes of 135M to 1.5B within 1.6 %
GRAPH_KERNEL_S = 2.5e-6
# Of the forward pass's elementwise kernels what selective recomputation adds: compiled, values are computed again in
# kernels of the backward pass that read the same inputs (0 to 1.2 in nine pairs of layouts on H100s, median 0.3; the
# rows of H200s fit best with this)
FUSED_AGAIN = 0.45
# The host's time to gather and reduce one block by ``fully_shard``: 0.9 ms of hooks (processor time on a CPU, with
# collectives that do nothing); the rest, for launches of copies and collectives, is a guess
SHARD_LAYER_S = 0.0012
# Of stage 3, times the host's time of a block that is not compiled: each module is fetched and released by hooks in
# Python, each weight is a gather of its own. Processor time of a rank's main thread by blocks of a tiny model, on a
# CPU, beside DDP's: 3.5 times without activation checkpointing, 2.6 times with.
STAGE_3_HOOKS = 3.0
CHUNK_S = 0.00002  # the host's time for one parameter in the update
# To and from host memory together, by all GPUs of a machine: four H200s moved 27 GB/s each way at the same time
HOST_COPIES_BYTES_S = 216e9
READ_BYTES_S = 1e9  # assumed, of kept features of images: what one machine's disk gives all its ranks
EAGER_PASSES, COMPILED_PASSES = 3.0, 1.5  # times that values of a block of a tower are read or written
SYNC_UPDATE_BYTES = 12  # gradients clipped and their norm summed: read, written, read, in float32


def estimate_step(s: TimeInput) -> dict[str, float]:
    """Seconds of a mean step by term, those that are hidden behind others left out. Their sum is the step."""
    terms = {
        "matmuls": sum(micro.count * matmuls(s, micro) for micro in s.work.micros),
        "attention": sum(micro.count * attention(s, micro) for micro in s.work.micros),
        "elementwise": sum(micro.count * elementwise(s, micro) for micro in s.work.micros),
        "head": sum(micro.count * head(s, micro) for micro in s.work.micros),
        "reference": reference(s),
        "values": values(s),
        "towers": towers_s(s),
        "dequantization": s.work.num_micro * dequantization(s),
        "recomputation": sum(micro.count * recomputation(s, micro) for micro in s.work.micros),
        "copies": copies(s) + accumulation(s),
        "optimizer": optimizer(s),
    }
    compute = sum(terms.values()) - terms["optimizer"]
    terms["communication"] = communication(s, compute)
    terms["offload"] = offload(s, compute)
    device = sum(terms.values())
    hidden = device if s.estimate.layout.device == "cuda" else 0.0
    terms["host"] = max(0.0, host(s) - hidden) + waiting(s, terms["optimizer"])
    terms["input"] = max(0.0, max(collation(s), reading_s(s)) - sum(terms.values()))
    return terms


def matmul_s(s: TimeInput, m: float, n: float, k: float, *, fp8: bool = False) -> float:
    """``2 m n k`` operations at the rate that the power limit leaves; or whole tiles on all multiprocessors at full
    clock, the last wave of them too; or as long as its operands take to read, whichever is longest.

    Where there are fewer tiles than multiprocessors, sums over k are split among these, into pieces of ``SPLIT_K``.
    """
    rate = s.rates.fp8 if fp8 else s.rates.matmul
    tiles = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    waves = math.ceil(tiles / NUM_PROCESSORS)
    pieces = min(max(1.0, k / SPLIT_K), max(1.0, NUM_PROCESSORS / tiles))
    tiled = 2.0 * TILE[0] * TILE[1] * waves * NUM_PROCESSORS * k / pieces
    burst = s.rates.matmul_burst * rate / s.rates.matmul
    width = 1 if fp8 else s.estimate.compute_bytes
    return max(2.0 * m * n * k / rate, tiled / burst, (m * k + k * n + m * n) * width / s.rates.memory)


def block_matmuls(s: TimeInput, tokens: float, *, backward: bool) -> float:
    """One block's linear layers: ``y = x W``, and backward ``dx = dy W`` and, where W is trained, ``dW = x dy``.

    Where blocks' linear layers are in fp8, all three are.
    """
    e, fp8 = s.estimate, s.estimate.fp8_blocks
    total = 0.0
    for shape in e.model.block_linear_shapes.values():
        out, into = shape.active_out, shape.into
        if shape.groups > 1:
            trains = 0.0 if e.num_adapter_parameters else trained_share(e)
            total += (1.0 + trains if backward else 1.0) * grouped_s(s, tokens, shape)
            continue
        if not backward:
            total += matmul_s(s, tokens, out, into, fp8=fp8)
            continue
        total += matmul_s(s, tokens, into, out, fp8=fp8)
        if not e.num_adapter_parameters:
            total += trained_share(e) * matmul_s(s, out, into, tokens, fp8=fp8)
    return mean_block(e.model) * (total + adapters(s, tokens, backward=backward))


def grouped_s(s: TimeInput, tokens: float, shape: LinearShape) -> float:
    """Seconds of the product of each group's rows with its weight, as ``matmul_s``: a group's last tile of rows is half
    full in the mean, all groups' weights are read, and a share of that time is not hidden behind tiles. Of those that
    a rank has, with the largest load.
    """
    degree = s.estimate.layout.expert_degree
    rows, out = tokens * shape.active * s.estimate.expert_load, shape.out // shape.groups
    tiles = (rows / TILE[0] + shape.groups / degree / 2) * math.ceil(out / TILE[1])
    faster = FP8_GROUPED if s.estimate.fp8_groups else 1.0
    tiled = 2.0 * TILE[0] * TILE[1] * shape.into * max(tiles, NUM_PROCESSORS) / (faster * s.rates.matmul_burst)
    width = 1 if s.estimate.fp8_groups else s.estimate.compute_bytes
    weights = shape.size / degree * width / s.rates.memory
    moved = weights + rows * (out * s.estimate.compute_bytes + shape.into * width) / s.rates.memory
    operations = 2.0 * rows * out * shape.into
    return max(operations / (faster * GROUPED_SHARE * s.rates.matmul), tiled + UNHIDDEN_WEIGHTS * weights, moved)


def trained_share(e: EstimateInput) -> float:
    """Of the blocks' weights, those whose gradient is computed."""
    if e.partially_trained is None:
        return 1.0
    return e.partially_trained.num_in_blocks / max(1, e.model.num_in_all_blocks)


def adapters(s: TimeInput, tokens: float, *, backward: bool) -> float:
    """LoRA's narrow matmuls, which only move bytes: forward ``c T (i + 2 o)`` for each adapted layer of i inputs and o
    outputs (its input read, its output read and written); backward ``c T (2 o + 3 i)``. Fused, layers of one input read
    it once, and their sums stay in place; else outputs are scaled and added apart, ``c T 3 o`` more each way.
    """
    e = s.estimate
    if not e.num_adapter_parameters:
        return 0.0
    share = min(1.0, e.num_adapter_parameters / max(1, full_adapter_parameters(e)))
    moved = 0.0
    for shape in e.model.block_linear_shapes.values():
        load = e.expert_load if shape.groups > 1 else 1
        out, into = load * shape.active_out, load * shape.into * shape.active
        if shape.groups > 1 and e.fuses_experts:  # counted with the kernels around grouped products
            continue
        moved += (2 * out + 3 * into) if backward else (into + 2 * out)
        moved += 0 if e.fuses_modules else 3 * out
        moved += into * (1.5 if e.adapter_dropout else 0.0) + out * (2 if e.adapter_dora else 0)
    return share * tokens * e.compute_bytes * moved / s.rates.memory


def full_adapter_parameters(e: EstimateInput) -> int:
    """Of adapters on all linear layers of the blocks."""
    return e.adapter_rank * e.model.sum_linears(lambda shape: shape.adapter_size)


def matmuls(s: TimeInput, micro: MicroBatchGroup) -> float:
    """``L`` times the forward and backward matmuls of one block."""
    both = (block_matmuls(s, micro.tokens, backward=backward) for backward in (False, True))
    return s.estimate.model.num_layers * sum(both)


def mean_block(model: ModelFacts) -> float:
    """Elements that a token is multiplied with in a mean block of a hybrid, in units of its largest block; else 1."""
    if not model.num_mixer_layers:
        return 1.0
    largest = sum(shape.active_size for shape in model.block_linear_shapes.values())
    return model.sum_linears(lambda shape: shape.active_size) / (model.num_layers * max(1, largest))


def block_attention(s: TimeInput, pairs: float, tokens: float, *, backward: bool) -> float:
    """``4 pairs q`` operations forward and ``10 pairs q`` backward, q = heads * head_dim
    (https://arxiv.org/abs/2205.14135), and the softmax of every score, which takes as long as some dimensions more.

    Kernels for samples of one length are less efficient on short ones: by ``1 + ramp / n`` on n tokens, which is
    ``ramp / 2`` pairs more for each token; forward on very long ones too, by ``LONG_FORWARD``. They pad heads to
    multiples of 64 dimensions. FlashAttention 4 takes a part of cuDNN's time (``FLASH4_TOKENS``). None of this holds on
    a CPU.
    """
    model, rates = s.estimate.model, s.rates
    on_gpu = s.estimate.layout.device == "cuda"
    documents = s.estimate.mixed_lengths and not s.has_flash4
    rate = rates.document_attention if documents else rates.attention
    slower, length = 1.0, 2 * pairs / max(1.0, tokens)
    if s.has_flash4:
        slower = float(np.interp(length, FLASH4_TOKENS, FLASH4_BACKWARD if backward else FLASH4_FORWARD))
    elif on_gpu and not documents and not backward:
        slower = float(np.interp(length, *LONG_FORWARD))
    pairs += s.fitted.attention_ramp / 2 * tokens if on_gpu and not documents else 0.0
    tile = HEAD_WIDTH if on_gpu else 1
    width = math.ceil(model.head_dim / tile) * tile + s.fitted.softmax_width
    flops = (10.0 if backward else 4.0) * pairs * model.num_heads * width
    # the forward kernel reaches some sixth more than the backward one
    seconds = slower * flops / (rate * (0.96 if backward else 1.12))
    if s.attention == "blockwise":  # scores as plain matmuls, read and written some eight times in float32
        seconds += 2 * pairs * model.num_heads * 4 * 8 / rates.memory
    return seconds * (SDPA_MASKED if s.estimate.builds_mask else 1.0)


def attention(s: TimeInput, micro: MicroBatchGroup) -> float:
    """All layers, forward and backward; layers with a window see fewer pairs."""
    return sum(all_attention(s, micro, backward=backward) for backward in (False, True))


def all_attention(s: TimeInput, micro: MicroBatchGroup, *, backward: bool) -> float:
    model = s.estimate.model
    windowed = windowed_layers(s)
    whole = (model.attention_share * model.num_layers - windowed) * block_attention(
        s, micro.pairs, micro.tokens, backward=backward
    )
    return whole + windowed * block_attention(s, micro.window_pairs, micro.tokens, backward=backward)


def windowed_layers(s: TimeInput) -> int:
    model = s.estimate.model
    if model.sliding_window is None:
        return 0
    return model.num_layers if model.num_windowed_layers is None else model.num_windowed_layers


def block_elementwise(s: TimeInput, tokens: float, *, backward: bool) -> float:
    """Bytes of ``moved_values``, over M; and begin and end of each kernel, whatever the number of tokens."""
    e = s.estimate
    moved = tokens * e.compute_bytes * moved_values(e, backward=backward)
    kernels = (GRAPH_KERNEL_S if e.layout.cuda_graphs else KERNEL_S) * num_kernels(e, backward=backward)
    return mixers(s, tokens, backward=backward) + moved / s.rates.memory + kernels


def mixers(s: TimeInput, tokens: float, *, backward: bool) -> float:
    """What replaces attention in a hybrid, of a mean block: each of the mixer's numbers written and read forward, and
    twice that backward; 8 operations for each number of the state forward, 20 backward; all that ``MIXER_TIMES``.
    """
    model = s.estimate.model
    if not model.num_mixer_layers:
        return 0.0
    passes, operations = (4 if backward else 2), (20 if backward else 8) * model.mixer_state
    moved = passes * s.estimate.compute_bytes * model.mixer_values / s.rates.memory
    return MIXER_TIMES * model.mixer_share * tokens * (moved + operations / s.rates.attention)


def elementwise(s: TimeInput, micro: MicroBatchGroup) -> float:
    both = (block_elementwise(s, micro.tokens, backward=backward) for backward in (False, True))
    return s.estimate.model.num_layers * sum(both)


def head(s: TimeInput, micro: MicroBatchGroup) -> float:
    """Logits ``T V H``, the gradient of the hidden states, and of a trained head its own; logits are read and written
    some times in place.
    """
    e, model = s.estimate, s.estimate.model
    products = 3 if e.num_trained_in_head else 2
    seconds = products * matmul_s(s, micro.tokens, model.vocab_size, model.hidden_size)
    passes = LOGIT_PASSES if e.fuse_loss else PLAIN_LOGIT_PASSES
    return seconds + passes * micro.tokens * model.vocab_size * e.compute_bytes / s.rates.memory


def forward(s: TimeInput, micro: MicroBatchGroup) -> float:
    """Blocks and head of one micro-batch, without gradients."""
    blocks = block_matmuls(s, micro.tokens, backward=False) + block_elementwise(s, micro.tokens, backward=False)
    layers = s.estimate.model.num_layers * blocks + all_attention(s, micro, backward=False)
    return layers + head(s, micro) / 2


def reference(s: TimeInput) -> float:
    """A forward pass of each micro-batch with the adapters switched off, where a preference loss compares with it."""
    if s.estimate.reference != "adapters":
        return 0.0
    adapted = (s.estimate.model.num_layers * adapters(s, micro.tokens, backward=False) for micro in s.work.micros)
    return sum(m.count * (forward(s, m) - spared) for m, spared in zip(s.work.micros, adapted, strict=True))


def values(s: TimeInput) -> float:
    """For each value that the loss needs of the whole step first: a forward pass of as many tokens, without gradients,
    and one through the reference that it compares with.
    """
    if not s.estimate.num_values:
        return 0.0
    trained = sum(micro.count * forward(s, micro) for micro in s.work.micros)
    return s.estimate.num_values * (trained + reference(s))


def dequantization(s: TimeInput) -> float:
    """NF4 weights to compute dtype for y, for dx and where blocks are computed again: ``(1/2 + c) B`` bytes each. Of
    stacks that multiply in fp8, values transposed for dx, unless these are kept.
    """
    e = s.estimate
    again = sum(mode in ("full", "except_attention") for mode in modes(e)) + e.layout.repeated_inputs
    passes = 2 + again / e.model.num_layers
    passes += e.num_more_passes
    if e.nf4_blocks:
        by_tiles = 0  # by each tile but the first
        if tile := e.layout.mlp_tile_tokens:
            by_tiles = (e.layout.full_micro_tokens - 1) // tile * e.model.num_layers * mlp_elements(e)
        here = e.num_in_linears - e.block_in_experts * e.model.num_layers * (1 - 1 / e.layout.expert_degree)
        return passes * (here + by_tiles) * (0.5 + e.compute_bytes) / s.rates.memory
    if e.model.stored_mxfp4:
        size = sum(e.model.block_linear_shapes[name].size for name in e.model.stored_mxfp4) * e.model.num_layers
        return passes * size / e.layout.expert_degree * (0.5 + e.compute_bytes) / s.rates.memory
    in_stacks = e.model.sum_linears(lambda shape: shape.size if shape.groups > 1 else 0)
    if e.fp8_blocks and (e.trains_everything or e.num_shards > 1):  # weights are quantized again in each pass
        return passes * (e.num_in_linears - in_stacks) * (e.compute_bytes + 1) / s.rates.memory
    moved = 2 * (not e.layout.keeps_transposed) if e.fp8_groups else passes * (e.compute_bytes + 1)
    return in_stacks * moved * e.fp8_weights / s.rates.memory


def modes(e: EstimateInput) -> tuple[Checkpointing, ...]:
    return e.layout.checkpointing_by_layer(e.model.num_layers)


def recomputation(s: TimeInput, micro: MicroBatchGroup) -> float:
    """What blocks compute again in the backward pass: all of the forward pass, all but attention, or all but attention
    and the linear layers. Once more for each input that is not kept.
    """
    found, repeated = modes(s.estimate), s.estimate.layout.repeated_inputs
    whole = sum(mode in ("full", "except_attention") for mode in found) + repeated
    with_attention = (sum(mode == "full" for mode in found) + repeated) / s.estimate.model.num_layers
    again = whole * block_matmuls(s, micro.tokens, backward=False)
    again += with_attention * all_attention(s, micro, backward=False)
    fused = FUSED_AGAIN if s.estimate.layout.compile else 1.0
    blocks = whole + fused * sum(mode == "selective" for mode in found)
    return again + blocks * block_elementwise(s, micro.tokens, backward=False)


def optimizer(s: TimeInput) -> float:
    """Bytes that clipping and update move, of this rank's share; AdamW's 28 in float32 are 30 where they are fused with
    the copy that computes and its gradients in bfloat16.
    """
    e, spec = s.estimate, OPTIMIZERS[s.estimate.optimizer_name]
    trained = e.trained_here
    narrow = e.master_bytes / 4
    moved = spec.moved_bytes * narrow + (2 if e.fuse_optimizer and e.keeps_copy else SYNC_UPDATE_BYTES * narrow)
    by_kernel = spec.kernel_s if e.layout.device == "cuda" else 0.0
    seconds = trained * (moved / s.rates.memory + by_kernel)
    if spec.matrix_flops is not None:
        flops = sum(spec.matrix_flops(s.out, s.into) for s in e.model.block_linear_shapes.values()) * e.model.num_layers
        seconds += flops / s.rates.matmul / max(1, e.num_shards)
    if e.streams_update:  # gradients for their norm, then all that is on the host, in and out at the same time
        on_host = (1 if overlaps(s) else 2) * e.gradient_bytes + 6 if e.layout.offload == "all" else 4
        rate = min(s.rates.pcie, HOST_COPIES_BYTES_S / (2 * s.num_local))
        seconds += 0.0 if overlaps(s) and e.updates_in_backward else trained * on_host / rate
    elif e.layout.offload != "none":  # states travel to the device and back, or are updated on the host
        seconds += trained * 2 * (spec.moved_bytes - 4) / s.rates.pcie
    return seconds


def overlaps(s: TimeInput) -> bool:
    """Whether gradients can be used on one rank before they leave for host memory, as a step has one micro-batch."""
    layout = s.estimate.layout
    return layout.prefetches_blocks and layout.world_size == s.work.num_micro == 1


def offload(s: TimeInput, compute: float) -> float:
    """What moves to host memory and back, as far as compute does not hide it: activations once each way, weights by
    each gather and gradients back, as often as all ranks have reduced them; or weights and states, both ways at once,
    in place of gradients. Weights of a single shard that nothing hides: ``fetched_alone``.
    """
    e, micro = s.estimate, s.work.num_micro
    reductions = micro if e.layout.reduce_every and e.layout.mesh.replicate == 1 else 1.0
    alone, fetched = fetched_alone(e, micro, gathers(s), whole_bytes(e))
    leaving = e.num_trained * e.sum_bytes / e.num_shards if e.layout.offload == "all" else 0.0
    leaving = e.num_trained * 3 * e.master_bytes if overlaps(s) and e.updates_in_backward else leaving
    seconds = (micro * 2 * moved_bytes(e) + reductions * leaving + fetched) / s.rates.pcie
    return alone / s.rates.pcie + max(0.0, seconds - compute) + 0.03 * min(seconds, compute)


def towers_s(s: TimeInput) -> float:
    """Seconds of tower and projector in a mean step of a rank: ``2 N`` operations for each weight of the blocks'
    matrices, ``4 N n h`` of attention over images (or squares) of n patches, forward once; of a trained tower backward
    twice more, and once more where its blocks are computed again. Values of a trained tower, which is not compiled, are
    read and written in passes of their own.
    """
    e, images = s.estimate, s.estimate.images
    if images is None:
        return 0.0
    tower, ranks = images.tower, e.layout.data_parallel_degree
    units = s.work.num_samples / ranks * images.mean_units
    patches = units * tower.patches_per_unit
    weights = sum(shape.size for shape in tower.block_linear_shapes.values())
    padded = -(-tower.hidden_size // tower.num_heads // HEAD_WIDTH) * HEAD_WIDTH * tower.num_heads
    inner, _ = mlp_of(tower)
    layers = tower.num_layers
    forward = layers * patches * 2.0 * weights / s.rates.matmul
    forward += layers * patches * 4.0 * images.mean_patches * padded / s.rates.attention
    moved = e.compute_bytes * layers * patches * (8 * tower.hidden_size + 2 * inner)
    mode, trained = e.layout.activation_checkpointing, images.vision == "trained"
    forward += (COMPILED_PASSES if e.layout.compile and not trained else EAGER_PASSES) * moved / s.rates.memory
    times = 1.0 + (2.0 if trained else 0.0) + (1.0 if trained and mode in ("full", "except_attention") else 0.0)
    projector = 2.0 * units * tower.tokens_per_unit * tower.num_projector_parameters / s.rates.matmul
    if images.kept_bytes:  # by the first pass alone
        times /= images.passes
        projector *= 1.0 if images.projector == "trained" else 1.0 / images.passes
    return times * forward + projector * (3.0 if trained or images.projector == "trained" else 1.0)


def reading_s(s: TimeInput) -> float:
    """Seconds in which the disk gives a rank the kept features of a mean step's images, those of other ranks of the
    machine beside them; the first pass reads none.
    """
    images = s.estimate.images
    if images is None or not images.kept_bytes:
        return 0.0
    units = s.work.num_samples / s.estimate.layout.data_parallel_degree * images.mean_units
    return (1 - 1 / images.passes) * units * images.kept_bytes * s.num_local / READ_BYTES_S


def host(s: TimeInput) -> float:
    """What the host takes to launch a step: each block of each micro-batch, and once loss, norm and update."""
    e = s.estimate
    layer = s.fitted.host_layer_s * ((DYNAMIC if e.layout.dynamic else 1.0) if e.layout.compile else EAGER)
    if e.layout.cuda_graphs:
        layer *= GRAPH
    again = sum(mode in ("full", "except_attention") for mode in modes(e)) / e.model.num_layers
    layer *= 1 + 0.5 * (again + e.num_more_passes)
    if e.num_adapter_parameters:
        layer *= 1.2 if e.fuses_modules else 1.6  # the first with ``host_layer_s`` from two small shapes
    if e.layout.wrapper == "fully_shard":
        layer += SHARD_LAYER_S
    if e.layout.zero_stage == 3:
        layer *= STAGE_3_HOOKS
    return s.rates.launch * s.work.num_micro * e.model.num_layers * layer + host_once(s)


def host_once(s: TimeInput) -> float:
    """The part of a step that no block has."""
    model = s.estimate.model
    chunks = CHUNK_S * model.num_layers * len(model.block_linear_shapes)
    return s.rates.launch * (s.fitted.host_step_s + chunks)


def waiting(s: TimeInput, update: float) -> float:
    """Seconds in which the GPU has nothing to do: at a step's begin and end and in each micro-batch. ``update``: of its
    kernels.

    DeepSpeed waits for the GPU at the end of the backward pass (``independent_gradient_partition_epilogue``), so that
    norm and update are launched beside nothing but themselves.
    """
    idle = s.fitted.idle_step_s + s.work.num_micro * s.fitted.idle_micro_s
    return idle + (max(0.0, host_once(s) - update) if s.estimate.layout.zero_stage else 0.0)


def collation(s: TimeInput) -> float:
    """Seconds in which this rank's thread or processes collate a step's tokens."""
    ranks = s.estimate.layout.data_parallel_degree
    return s.work.num_tokens / ranks / s.collate_tokens_s
