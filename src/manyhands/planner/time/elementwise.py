"""Values that the elementwise kernels of a block read and write for each token: norms, residual sums, rotary
embeddings, the gated activation. Pure arithmetic; knows no torch.

Compiled, a kernel reads what goes into it once and writes its result once. Not compiled, every operation of
transformers' modules is a kernel of its own. Values are those of the dtype that computes; the notation is that of
``memory/terms.py``.
"""

from __future__ import annotations

from manyhands.planner.memory.input import EstimateInput

# Fitted to one row, a mixture of 30B (A3B) by 2 x 4,096 tokens on an H200: 70 ms in all for 193 GB
EXPERTS_RATE = 0.6
LONGEST_SUM = 2048  # that of kernels/experts/triton.py


def moved_values(e: EstimateInput, *, backward: bool) -> float:
    """Read and written for a token in one block's forward or backward pass."""
    moved = _compiled(e, backward=backward) if e.layout.compile else _one_by_one(e, backward=backward)
    if e.fp8_blocks:  # fp8 values of each layer's input, or of its result's gradient
        dense = [shape for shape in e.model.block_linear_shapes.values() if shape.groups == 1]
        moved += 1.5 * sum(shape.out if backward else shape.into for shape in dense)
        if backward and e.trains_everything:  # both sides of dW are transposed: a byte read, one written
            moved += 2 / e.compute_bytes * sum(shape.out + shape.into for shape in dense)
    return moved + _around_experts(e, backward=backward)


def _around_experts(e: EstimateInput, *, backward: bool) -> float:
    """What kernels around the grouped products move beside the gate: for k rows a token, sorted and summed, 3 k H. With
    fused adapters also the results that low-rank products are added to, 2 k H where no grouped product does it, and
    backward what their gradients are made from, 2 k H more; these kernels and the gate's reach ``EXPERTS_RATE`` of the
    memory's rate.

    Where ranks divide experts, all this is of the rows that come to the one with the most, and 3 k H more of its own.

    What stacks multiply in fp8 is written in half as many bytes by these kernels, but for the gradients of gate and up,
    2 I, which a kernel of its own quantizes, as it does all rows where adapters are not fused.
    """
    rows = e.model.rows_per_token * e.model.hidden_size
    gate = (5 if backward else 3) * e.model.intermediate_size
    more = 0.0 if e.layout.expert_degree == 1 else 3 * rows + (e.expert_load - 1) * gate
    if not e.fuses_experts:
        quantized = rows + (2 if backward else 1) * e.model.intermediate_size
        return e.expert_load * 3 * rows + 1.5 * quantized * e.fp8_groups + more
    own = (5 if backward else 3) * rows
    narrow = min(shape.into for shape in e.model.block_linear_shapes.values() if shape.groups > 1)
    is_short = (2 * narrow if backward else narrow) <= LONGEST_SUM  # backward gate and up are summed
    if not (e.sums_in_products and (is_short or (backward and not e.fp8_groups))):
        own += 2 * rows
    in_fp8 = (3 if backward else -0.5) * e.model.intermediate_size - 0.5 * rows
    return e.expert_load * ((own + gate + in_fp8 * e.fp8_groups) / EXPERTS_RATE - gate) + more


def num_kernels(e: EstimateInput, *, backward: bool) -> float:
    """Kernels of one block's forward or backward pass: compiled 77 where everything is trained (1.2e9 parameters) and
    116 beside adapters (8e9), else 113 and 190. A third of them is the forward pass's.
    """
    if e.layout.device != "cuda":
        return 0.0
    both = (116 if e.layout.compile else 190) if e.num_adapter_parameters else (77 if e.layout.compile else 113)
    return both * (2 if backward else 1) / 3


def _compiled(e: EstimateInput, *, backward: bool) -> float:
    """Of kernels that the compiler has fused:

    ========================================  ========================  =======================
    norms of n elements                       2 n                       3 n
    two residual sums                         4 H                       4 H
    rotary embeddings                         2 (q + k)                 2 (q + k)
    activation, gate and up                   3 I                       5 I
    norms' own weights, where they are        0                         2 n
    trained: input and gradient once more
    gradients of layers on one input, all     0                         2 H for each
    but the first, which the norm before
    them sums, and once more for its weight
    ========================================  ========================  =======================
    """
    m = e.model
    moved: float = (3 if backward else 2) * m.block_norm_elements + 4 * m.hidden_size + 2 * _rotated(e)
    moved += (5 if backward else 3) * m.intermediate_size
    if backward and e.trains_everything:
        moved += 2 * m.block_norm_elements + 2 * _apart(e) * m.hidden_size
    return moved


def _one_by_one(e: EstimateInput, *, backward: bool) -> float:
    """Of transformers' operations one by one, as its modules have them and as torch's formulas of their gradients
    do. Norms compute in float32, whose values are w times as wide: forward to float32, squared, averaged, scaled, back
    and times the weight; backward the same in reverse, where the square's gradient alone is three kernels.

    ========================================  ========================  =======================
    norms of n elements                       (2 + 5 w) n               (2 + 17 w) n
    their conversions (w is not 1)            (2 + 2 w) n               (2 + 2 w) n
    two residual sums                         6 H                       6 H
    rotary embeddings                         10 (q + k)                15 (q + k)
    activation, gate and up                   5 I                       9 I
    the same again, beside fused adapters     0                         5 I
    norms' own weights, where they are        0                         4 n
    trained
    gradients of layers on one input, all     0                         3 H for each
    but the first
    ========================================  ========================  =======================
    """
    m = e.model
    wide = max(1.0, 4 / e.compute_bytes)
    converted = 2 + 2 * wide if wide > 1 else 0
    moved = (2 + (17 if backward else 5) * wide + converted) * m.block_norm_elements + 6 * m.hidden_size
    moved += (15 if backward else 10) * _rotated(e) + (9 if backward else 5) * m.intermediate_size
    if backward and e.fuses_modules and e.num_adapter_parameters:
        moved += 5 * m.intermediate_size
    if backward and e.trains_everything:
        moved += 4 * m.block_norm_elements
    return moved + 3 * _apart(e) * m.hidden_size * backward


def _rotated(e: EstimateInput) -> int:
    """Queries and keys of a token, ``q + k``."""
    return int(e.model.attention_share * (e.model.num_heads + e.model.num_kv_heads) * e.model.head_dim)


def _apart(e: EstimateInput) -> int:
    """Linear layers of a block that share an input with another, beyond the first of each input: of q, k, v, gate and
    up three; none where their gradients are summed by the matmuls themselves, or where they are one layer.
    """
    return 0 if e.fuses_modules else max(0, len(e.model.block_linear_shapes) - 4)
