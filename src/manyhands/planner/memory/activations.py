"""Bytes of activations: what a block's graph keeps a token, what all keep, what one needs at work. Pure arithmetic;
knows no torch.

The notation is that of ``terms.py``.
"""

from __future__ import annotations

from manyhands.core.limits import (
    MAX_BLOCK_SCORES,
    MAX_PASSING_BYTES,
    MAX_STRIDED_VALUES,
    MIN_TILED_TOKENS,
    PASSING_TENSORS,
    attention_workspace,
    count_head_parts,
)
from manyhands.planner.layout import Checkpointing, Layout
from manyhands.planner.memory.input import EstimateInput


def kept_activations(s: EstimateInput, passing_bytes: int) -> int:
    """What the blocks' graphs keep from forward to backward: ``T`` times ``kept_bytes_per_token`` of each.

    Of what moves to host memory one block's are on the device, and on their way out or back ``passing_bytes``, or
    ``PASSING_TENSORS`` of the largest kind up to ``MAX_PASSING_BYTES``, or one such tensor: ``T c`` times the hidden
    size, the width of all queries where results of attention move, and the inner size of the MLP where its values do.
    Where the last blocks' stay, nothing is on its way while they are there: the more of both counts. An input that is
    not kept is there beside the one that it is made from.
    """
    m, moved = s.model, moved_bytes(s)
    widths = {"full": m.hidden_size, "except_attention": max(m.hidden_size, m.num_heads * m.head_dim)}
    widest = widths.get(s.layout.activation_checkpointing, max(m.hidden_size, m.intermediate_size))
    largest = s.layout.full_micro_tokens * s.compute_bytes * widest
    passing = max(passing_bytes, largest, min(PASSING_TENSORS * largest, MAX_PASSING_BYTES))
    num_moved, repeated = count_moved(s.layout, m.num_layers), s.layout.repeated_inputs
    token = kept_bytes_per_token(s, s.layout.activation_checkpointing)
    on_device = min(moved, passing + moved // num_moved) + s.layout.full_micro_tokens * token * (repeated > 0)
    lighter = s.layout.lighter_layers
    kept = (m.num_layers - lighter) * token + lighter * kept_bytes_per_token(s, s.layout.last_checkpointing)
    held = s.layout.full_micro_tokens * (kept - repeated * token) - moved
    left = s.layout.full_micro_tokens * (kept - (repeated + num_moved) * token) * (moved > 0)
    last = s.layout.full_micro_tokens * token * (2 * repeated == m.num_layers)
    return max(held + last, held - left + on_device) + _kept_factors(s)


def count_moved(layout: Layout, num_layers: int) -> int:
    """Blocks whose activations go to host memory where those of any do: of the first ones, less the second of each pair
    that does not keep its input.
    """
    first = num_layers - layout.layers_on_device
    return first - min(layout.repeated_inputs, first // 2)


def _kept_factors(s: EstimateInput) -> int:
    """The factors of experts' adapters in compute dtype, which compiled code keeps from forward to backward: ``c r``
    for each input and output of each expert.
    """
    if not (s.fuses_experts and s.layout.compile) or s.layout.activation_checkpointing == "full":
        return 0
    sides = s.model.sum_linears(lambda shape: shape.adapter_size if shape.groups > 1 else 0)
    return s.compute_bytes * s.adapter_rank * sides


def block_at_work(s: EstimateInput, mode: Checkpointing) -> int:
    """What one block under ``mode`` needs in its backward pass beyond what all keep.

    What is computed again of it: ``T (k - c H)`` if all but its input, which is kept (k of ``block_bytes_per_token``),
    ``T (k - l)`` if selective, and ``T (k - c H - a)`` if all but input and attention. The gradients of its result and
    of the residual stream, ``2 T c H``. And of the MLP, the widest part, gradients of the product, gate and up in turn:
    ``3 T c I``, of which compiled code puts one where the product was; of stacks also those of a token's rows, ``2 c
    H`` each. Beside adapters in fp8 also fp8 values of gate's and up's gradients, of the result's and of the input,
    ``T (2 I + 2 H)``: measured, 4.6 GiB of 131,072 tokens of an 8B model.
    """
    m, c = s.model, s.compute_bytes
    widest = block_bytes_per_token(s, widest=True)
    again = {
        "none": 0,
        "selective": max(0, widest - linear_bytes_per_token(s)),
        "except_attention": widest - c * m.hidden_size - attention_bytes_per_token(s),
        "full": widest - c * m.hidden_size,
    }
    inner = (2 if s.layout.compile else 3) * c * m.intermediate_size + 2 * c * m.rows_per_token * m.hidden_size
    in_fp8 = 2 * (m.intermediate_size + m.hidden_size) if s.fp8_blocks and s.num_adapter_parameters else 0
    if s.layout.mlp_tile_tokens:
        return _block_by_tiles(s, again[mode] + 2 * c * m.hidden_size + gathering(s), inner)
    return s.layout.full_micro_tokens * (again[mode] + 2 * c * m.hidden_size + inner + in_fp8 + gathering(s))


def gathering(s: EstimateInput) -> int:
    """Bytes a token of a rank that a block's attention needs for a moment where W ranks divide packs: the gradients of
    all keys or values, ``W k`` in float32, twice while they are put in the order of ranks; or what is sent and received
    of queries, ``2 c q``. Not measured.
    """
    k, context = s.model.num_kv_heads * s.model.head_dim, s.layout.mesh.context
    if s.layout.exchanges_heads:
        return 2 * s.compute_bytes * s.model.num_heads * s.model.head_dim
    return 0 if context == 1 else 2 * 4 * context * k


def _block_by_tiles(s: EstimateInput, others: int, inner: int) -> int:
    """The same where the MLP is computed by tiles of n tokens (``engine/tiles.py``), which ``others`` counts as a
    whole: what the MLP keeps and ``inner`` for n tokens, and sums of its trained weights' gradients, ``(4 + c)`` each.

    Or attention's gradients, if these are more: of its result, of q, k and v, ``T c (2 q + 2 k)``, and of keys and
    values for every query. On a GPU the kernel sums dq in float32, ``4 T q``, and cuDNN's has keys' and values'
    gradients for every query head, ``2 T c q``; the MLP's input is gone by then. Where heads are computed in parts
    these are one part's, and its gradients of q, k and v are there twice, ``T c (q + 2 k)`` of the part; of very long
    samples also what it takes, ``T c (3 q + 2 k)``. Measured on an H200, 131,072 tokens of an 8B model in one part:
    17.2 GiB, 17.2 estimated. On a CPU, in eager float32 by the tokens between 2,048 and 4,096: 10.6 hidden sizes a
    token, and 12.6 estimated.
    """
    m, c, mlp = s.model, s.compute_bytes, mlp_bytes_per_token(s)
    q, k = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    trained = 0 if s.num_adapter_parameters else mlp_elements(s)
    if s.partially_trained is not None:
        trained = min(trained, s.partially_trained.num_in_largest_block)
    tile = min(s.layout.mlp_tile_tokens, s.layout.full_micro_tokens) * (mlp + inner)
    repeated = s.keys_per_token * 2 * q or 2 * (q - k) * s.mixed_lengths
    kernel = 0
    if s.layout.device == "cuda":
        parts = head_parts(s)
        workspace = attention_workspace(m.num_heads, m.num_heads if repeated else m.num_kv_heads, m.head_dim, c)
        copied = c * (3 * q + 2 * k) * (s.layout.full_micro_tokens * q > MAX_STRIDED_VALUES)
        kernel = (workspace + (c * (q + 2 * k) + copied) * (parts > 1)) // parts - c * m.hidden_size
    attention = s.layout.full_micro_tokens * int(c * (2 * q + 2 * k + repeated) + kernel)
    return s.layout.full_micro_tokens * (others - mlp) + max(tile + (s.sum_bytes + c) * trained, attention)


def head_parts(s: EstimateInput) -> int:
    """In how many parts attention computes the heads of a sample (``kernels/attention/dense.py``): 1 where samples
    differ in length or ranks divide them, which other kernels compute.
    """
    others = s.mixed_lengths or s.builds_mask or s.attends_blockwise or s.layout.mesh.context > 1
    if others or s.row_length is None or s.layout.pack_tokens is None:
        return 1
    m = s.model
    return count_head_parts(s.row_length, m.num_heads, m.num_kv_heads, m.head_dim, s.compute_bytes)


MLP_MODULES = ("mlp.", "feed_forward.")  # of a block, in names of its weights


def mlp_elements(s: EstimateInput) -> int:
    """Elements of the linear layers of a block's MLP."""
    shapes = s.model.block_linear_shapes.items()
    return sum(shape.size for name, shape in shapes if name.startswith(MLP_MODULES))


def can_tile(s: EstimateInput) -> bool:
    """Whether ``engine/tiles.py`` can compute the MLPs of a long micro-batch, and their memory is known: dense ones in
    blocks with attention that are computed again as a whole. Dropout would be drawn again; scales of fp8 hang on all
    tokens.
    """
    layout, model = s.layout, s.model
    plain = not (s.adapter_dropout or s.fp8_blocks or s.freezes_text or layout.zero_stage or layout.lighter_layers)
    dense = mlp_elements(s) > 0 and not model.has_groups and not model.num_mixer_layers
    is_long = layout.full_micro_tokens >= MIN_TILED_TOKENS
    return plain and dense and is_long and layout.activation_checkpointing == "full"


def kept_bytes_per_token(s: EstimateInput, mode: Checkpointing) -> int:
    """Bytes a token that one block under ``mode`` keeps from its forward pass to its backward pass."""
    if mode == "full":
        return s.compute_bytes * s.model.hidden_size
    if mode == "except_attention":
        return s.compute_bytes * s.model.hidden_size + attention_bytes_per_token(s)
    return linear_bytes_per_token(s) if mode == "selective" else block_bytes_per_token(s)


def attention_bytes_per_token(s: EstimateInput) -> int:
    """The result of attention and its log-sum-exp, ``c q + 4 heads``; in a hybrid of a mean block."""
    m = s.model
    return int(m.attention_share * (s.compute_bytes * m.num_heads * m.head_dim + 4 * m.num_heads))


def linear_bytes_per_token(s: EstimateInput) -> int:
    """What selective recomputation keeps: a block's input, the results of its linear layers, those of attention.

    ``c H``, ``c`` times the sum of the layers' outputs (compiled all but a dense MLP's, which only the next block
    needs, unless a norm reads it first; beside fused adapters of experts all but that of their second stack), the
    router's logits, ``c q + 4 heads``, and adapters' inner results, which those of experts make again.
    """
    m, c, shapes = s.model, s.compute_bytes, s.model.block_linear_shapes.values()
    stacks = [shape for shape in shapes if shape.groups > 1]
    outputs = sum(shape.active_out for shape in shapes) + max((shape.groups for shape in stacks), default=0)
    if s.fuses_experts:
        outputs -= m.rows_per_token * m.hidden_size
    elif s.layout.compile and not m.norms_mlp_output and not stacks:
        outputs -= m.hidden_size
    num_adapted = len(shapes) - len(stacks) * s.fuses_experts
    inner = c * s.adapter_rank * num_adapted if s.num_adapter_parameters else 0
    return c * (m.hidden_size + outputs) + attention_bytes_per_token(s) + inner


def moved_bytes(s: EstimateInput) -> int:
    """Activations that go to host memory: ``T`` times what a block keeps, of ``count_moved`` blocks. Eager and
    selective or except_attention only its input, as the rest is in the checkpoint's own cache. None on a CPU. Blocks
    whose activations move have one mode.
    """
    if not s.layout.offload_activations or s.layout.device == "cpu":
        return 0
    in_cache = s.layout.activation_checkpointing in ("selective", "except_attention") and not s.layout.compile
    per_token = (
        s.compute_bytes * s.model.hidden_size
        if in_cache
        else kept_bytes_per_token(s, s.layout.activation_checkpointing)
    )
    return s.layout.full_micro_tokens * count_moved(s.layout, s.model.num_layers) * per_token


def block_bytes_per_token(s: EstimateInput, *, widest: bool = False) -> int:
    """Bytes a token that one block's autograd graph keeps, with FlashAttention (https://arxiv.org/abs/2205.14135): no
    T x T. With q = heads * head_dim and k = kv_heads * head_dim:

    ==============================  ===================================================================================
    tensor                          bytes a token
    ==============================  ===================================================================================
    inputs of the norms             c n compiled; n: 2 H for two norms. Eager 4 n, as transformers' norms keep a
                                    float32 copy, and c n more for the gradient of the norms' own weights where those
                                    are trained
    inputs of q, k, v and gate, up  2 c H
    q, k, v                         c (q + 2 k)
    attention output, log-sum-exp   c q + 4 heads; the output is also the input of the output projection
    keys, values for every query    2 c (q - k) more, at least c q, where packs of mixed lengths or windows need a
                                    kernel for documents, which before torch 2.12 has no groups of heads. Measured a
                                    token and block beside 2 c (q - k), in four models: 11.9 and 12.3 KB, 4.1 and 4.1,
                                    11.8 and 12.3, 5.2 and 5.1
    the same beside a dense mask    2 c (q - k) more: transformers repeats them, as sdpa takes a mask or groups of heads
    keys and values of all ranks    instead of these 2 c q for each that a rank gathers, W + 1/2 a token of its own
                                    where W ranks divide packs; or c q for the result of attention once more, as it is
                                    after heads were exchanged. Not measured
    result of attention, padded     c q more where rows of one length leave padding at a micro-batch's end: what the
                                    kernel gives is kept beside what the output projection takes. Measured: 3.3 GiB of
                                    36 blocks and 12,416 tokens
    q and k before they rotate      c (q + k) more where q, k and v are one matmul, whose result v keeps whole; it is
                                    also the input of norms of q and k, where there are such, and not counted twice
    gate, up, product               3 c I compiled; eager 4 c I, with the activation's result apart, but 2 c I where
                                    adapters are fused: their function makes the product again, and keeps keys and
                                    values once more as they were copied, 2 c k
    of a frozen model               neither inputs of linear layers nor the MLP's product: gradients pass through alone
    rows sorted by group of stacks  2 c H for each group of a token: its input and its result
    of experts with fused adapters  instead of these two 2 c I, and 2 c r + 16 for each group: gate and up, low-rank
                                    values, places of rows
    adapters' inner results         c r for each adapted layer; with dropout also the dropped input and its mask
    of experts that ranks divide    all that the MLP keeps LARGEST_LOAD times, and as often the rows that came, c H for
                                    each group of a token, and once those that came back
    mixers of a hybrid              c (P + W + 4 V) in place of all that attention keeps (``facts.model``), by the share
                                    of blocks that have each; of the ``widest`` block where that is meant
    ==============================  ===================================================================================
    """
    m, c = s.model, s.compute_bytes
    q, k = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    own_gradient = s.num_adapter_parameters == 0 and not s.freezes_text
    norms = m.block_norm_elements * (c if s.layout.compile else max(c, 4) + c * own_gradient)
    for_documents = max(c * q, 2 * c * (q - k)) if s.mixed_lengths else c * q * s.pads_rows
    if s.keys_per_token:
        for_documents = int(2 * c * q * s.keys_per_token)
    if s.builds_mask:
        for_documents += 2 * c * (q - k)
    for_documents += c * q * s.layout.exchanges_heads
    as_kernel_has_them = for_documents + 2 * c * k * _is_eager_fused(s)
    attention = c * (q + 2 * k) + c * q + 4 * m.num_heads + as_kernel_has_them
    if m.num_mixer_layers:
        kinds = m.attention_share * attention, m.mixer_share * c * m.mixer_values
        side_by_side = m.attention_share == m.mixer_share == 1
        attention = int(max(attention, c * m.mixer_values) if widest and not side_by_side else sum(kinds))
    mlp = mlp_bytes_per_token(s)
    if s.layout.expert_degree > 1:
        mlp = s.expert_load * mlp + c * int((1 + s.expert_load) * m.rows_per_token) * m.hidden_size
    merged = c * max(0, q + k - m.head_norm_elements) if s.merges_queries else 0
    if s.freezes_text:
        return norms + attention + merged + mlp - c * m.intermediate_size
    return norms + 2 * c * m.hidden_size + attention + merged + mlp + adapter_bytes_per_token(s) - _kept_in_fp8(s)


def mlp_bytes_per_token(s: EstimateInput) -> int:
    """Of these the MLP's."""
    m, c = s.model, s.compute_bytes
    if s.fuses_experts:
        return 2 * c * m.intermediate_size + m.rows_per_token * (2 * c * s.adapter_rank + 16)
    mlp = c * m.intermediate_size * (2 if _is_eager_fused(s) else 3 if s.layout.compile else 4)
    return mlp + 2 * c * m.rows_per_token * m.hidden_size


def _is_eager_fused(s: EstimateInput) -> bool:
    return s.fuses_modules and s.num_adapter_parameters > 0 and not s.layout.compile


def _kept_in_fp8(s: EstimateInput) -> int:
    """Bytes a token that fused modules in fp8 spare: the MLP's product is made again from gate and up; inputs of
    trained layers are kept as fp8 values of a byte, ``c - 1`` less for each of 2 H, I and, beside the result that
    attention keeps, q more.
    """
    if not (s.fp8_blocks and s.fuses_modules):
        return 0
    m, c = s.model, s.compute_bytes
    if s.num_adapter_parameters:
        return 0 if s.fuses_experts else c * m.intermediate_size
    return (c - 1) * (2 * m.hidden_size + m.intermediate_size) - m.num_heads * m.head_dim


def adapter_bytes_per_token(s: EstimateInput) -> int:
    """``c r`` for each adapted layer of i inputs and o outputs; dropout adds its input once more, and a mask of a byte:
    ``(c + 1) i``.

    DoRA keeps what it scales, ``c o``, for the gradient of the scale; with dropout two parts of it.
    """
    if not s.num_adapter_parameters:
        return 0
    shapes, c = s.model.block_linear_shapes.values(), s.compute_bytes
    dropped = sum(shape.into for shape in shapes) * (c + 1) if s.adapter_dropout else 0
    scaled = sum(shape.active_out for shape in shapes) * c * (1 + s.adapter_dropout) if s.adapter_dora else 0
    return c * s.adapter_rank * len(shapes) + dropped + scaled


def attention_mask(s: EstimateInput) -> int:
    """A dense mask as transformers builds it for packed samples without varlen: ``T^2`` booleans, and once more in
    compute dtype, which all layers share (``model/attention.py``).
    """
    return s.layout.full_micro_tokens**2 * (1 + s.compute_bytes) if s.builds_mask else 0


def block_scores(s: EstimateInput) -> int:
    """Scores that are soft-capped, or have sinks without varlen, computed a block at a time (model/attention.py): at
    most 2**25, each some 4 times in c bytes and 4 times in 4.
    """
    if not s.attends_blockwise:
        return 0
    scores = s.model.num_heads * s.layout.full_micro_tokens**2 * s.layout.mesh.context
    return min(scores, MAX_BLOCK_SCORES) * (4 * s.compute_bytes + 16)
