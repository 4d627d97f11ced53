"""Sizes that the plan counts and the runtime keeps to, each defined once. Plain arithmetic; imports nothing."""

from __future__ import annotations

GIB = 2**30

# The loss, a chunk of tokens at a time.
MAX_CHUNK_LOGITS = 2**27  # elements: 0.5 GiB in float32
MIN_CHUNK_TOKENS = 256  # fewer would starve the head's matmul
# The same fused with the head, in compute dtype.
MAX_LOGITS_FROZEN = 2**28  # elements: 0.5 GiB in bfloat16
MAX_LOGITS_TRAINED = 2**29  # each chunk reads and writes the float32 sum of the weight's gradient: few chunks

# Attention with soft-capped scores, a block of queries at a time.
MAX_BLOCK_SCORES = 2**25  # elements: 128 MiB in float32

# Attention over long samples, heads in parts one after the other.
MAX_ATTENTION_WORKSPACE = 2**32  # bytes of the backward kernel's own, of one sample

MAX_STRIDED_VALUES = (
    2**31
)  # cuDNN 9.19 computes wrong gradients from views of larger tensors: parts of their heads are copied


def attention_workspace(num_heads: int, num_groups: int, dim: int, value_bytes: int) -> int:
    """Bytes a token that the kernel of attention's backward pass takes for itself: the gradient of queries in float32
    and, where query heads share key-value heads, gradients of keys and values for every query head.
    """
    return num_heads * dim * (4 + 2 * value_bytes * (num_groups < num_heads))


def count_head_parts(length: int, num_heads: int, num_groups: int, dim: int, value_bytes: int) -> int:
    """In how many parts, one after the other, the heads of samples of ``length`` tokens are computed: the fewest that
    divide the ``num_groups`` key-value heads and keep a sample's workspace within ``MAX_ATTENTION_WORKSPACE``; one
    key-value head with its query heads where no number does.
    """
    size = length * attention_workspace(num_heads, num_groups, dim, value_bytes)
    fitting = (n for n in range(1, num_groups) if num_groups % n == 0 and size <= n * MAX_ATTENTION_WORKSPACE)
    return next(fitting, num_groups)


MAX_EXPERT_RANK = 64  # of the kernels around experts: above, the factors of a group fill a tile's registers

# Activations in host memory.
MAX_LEAVING_BYTES = 2**28  # being copied out during the forward pass
MAX_AHEAD_BYTES = 2**28  # fetched before the backward pass asks for them: 5 ms of copying, a block takes longer
# So many tensors may pass in either direction, up to so many bytes, whatever the limits above: two for each of two
# blocks. With one alone the compute stream waited for copies of 1 GiB in 8B blocks that keep results of attention: 6 %
# of a step of 131,072 tokens. In longer samples computing a block outlasts its copies by more. One may always pass.
PASSING_TENSORS, MAX_PASSING_BYTES = 4, 2**32
PINNED_PIECE = 2**26  # bytes that are pinned at once: torch rounds each block of pinned memory up to a power of 2

# A block's MLP by tiles of one long sequence.
MIN_TILED_TOKENS = 2**16  # of a micro-batch: with fewer the MLP is not what a block is short of memory for
MLP_TILE_TOKENS = 2**13  # 3 TFLOP of an 8B model's, for which its weights are read once: 5 ms beside 0.1

# Optimizer states in host memory.
ZERO_BUCKET = 2 * 10**8  # elements that DeepSpeed reduces or gathers at once
ZERO_PREFETCH, ZERO_LIVE = 5 * 10**7, 10**9  # zero3: elements gathered ahead, and at most
STATE_CHUNK_BYTES = 2**28  # of parameters whose states are on the device; AdamW's states are twice that
STATE_CHUNKS_ON_DEVICE = 2  # one is fetched while one steps and is stored
UPDATE_SLICE = 2**24  # elements of a bfloat16 weight that are updated at once where it or its states are there
UPDATE_SLICES_ON_DEVICE = 3  # one is fetched, one is updated and one is stored
UPDATE_HELD_BYTES = 2**29  # of gradients that are used for updates in the backward pass; a larger one is held alone
BLOCK_VALUES_8BIT = 256  # values in 8 bits that share a float32 scale, fixed by the kernels of bitsandbytes

# Weights in NF4, in rows that shard evenly.
NF4_BLOCK_VALUES, NF4_ROW_BLOCKS = 64, 256  # values that share a scale, and scales that are quantized together
NF4_ROW_VALUES = NF4_BLOCK_VALUES * NF4_ROW_BLOCKS
NF4_CODE_BYTES = NF4_ROW_VALUES // 2  # two values a byte
NF4_STATISTICS_BYTES = NF4_ROW_BLOCKS + 2 * 4  # a byte a scale; their own scale and mean in float32
NF4_FLOAT_STATISTICS_BYTES = NF4_ROW_BLOCKS * 4  # without double quantization: a float32 a scale

# Weights in MXFP4: values that share a scale, and what a row's scales are filled up to, in bytes.
MXFP4_BLOCK_VALUES, MXFP4_SCALES_MULTIPLE = 32, 8

FEATURES_FOLDER = "features"  # folder of data.cache
