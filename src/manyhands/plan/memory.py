"""Bytes a rank holds at its worst moment: one small function a term. Pure arithmetic; knows no torch and reads nothing.

Notation: P parameters, A trained parameters of adapters, B parameters of one block, R of the rest (embeddings, last norm,
head), L blocks, T tokens of a micro-batch, H hidden size, I inner size of the MLP, V vocabulary, c bytes of a compute
element, m of a master's, f of a frozen one, S ranks that share one copy of the state (1 unless fsdp or hybrid).

The worst moment is the start of the backward pass, when every block's activations are held, or its end, when the
gradients of the root unit (embeddings and head) are reduced. Measured beside peers in ``tests/plan/test_memory_peers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.facts.types import ModelFacts
from manyhands.plan.trained import TrainedWeights, count_state_bytes
from manyhands.plan.types import Offload, Recompute, Strategy

GIB = 2**30
CHUNK_LOGITS, MIN_CHUNK_TOKENS = 2**27, 256  # elements and tokens of one chunk of the loss, as in model/loss.py
BLOCK_SCORES = 2**25  # elements of one block of soft-capped attention, as in model/attention.py
BLOCKS_IN_FLIGHT = 2  # FSDP2 gathers the next block while one computes
CONTEXT_BYTES = {"cuda": int(0.6 * GIB), "cpu": int(0.6 * GIB)}  # CUDA context and library workspaces; on CPU the imports
COMMUNICATION_BYTES = {"cuda": 1 * GIB, "cpu": GIB // 16}  # NCCL's / gloo's buffers, with more than one rank
NF4_ROW_VALUES, NF4_ROW_BYTES = 16_384, 8_192 + 264  # of weights in NF4, as in model/nf4.py
MOVING_BYTES = 2**30  # of activations on their way to host memory and back, as in parallel/activations.py
FRAGMENTATION = 0.05  # share of what comes and goes that the allocator cannot use; expandable segments keep it small


@dataclass(frozen=True)
class Setup:
    """One way to run, as far as memory is concerned. ``micro_tokens``: tokens of one micro-batch, padding included."""

    model: ModelFacts
    num_adapter_parameters: int  # 0: everything is trained, or ``in_place``
    adapter_rank: int
    adapter_dropout: bool
    device: Literal["cuda", "cpu"]
    world_size: int
    strategy: Strategy
    reshard: bool
    recompute: Recompute
    compile: bool
    compute_bytes: int
    master_bytes: int
    frozen_bytes: int
    micro_tokens: int
    builds_mask: bool  # a dense attention mask over the micro-batch
    nf4_blocks: bool = False  # qlora: the blocks' linear layers are held in NF4
    in_place: TrainedWeights | None = None  # patterns: the model's own weights that are trained where others are frozen
    optimizer_name: str = "adamw"
    shard_ranks: int = 1  # hybrid: ranks that hold one copy together
    reduce_every: bool = True  # sharded gradients after every micro-batch
    offload: Offload = "none"
    offload_activations: bool = False

    @property
    def trains_everything(self) -> bool:
        return self.num_adapter_parameters == 0 and self.in_place is None

    @property
    def num_shards(self) -> int:
        return {"fsdp": self.world_size, "hybrid": self.shard_ranks}.get(self.strategy, 1)

    @property
    def num_trained(self) -> int:
        if self.in_place is not None:
            return self.in_place.total
        return self.num_adapter_parameters or self.model.num_parameters

    @property
    def is_mixed(self) -> bool:
        """Masters and compute differ in dtype: ``fully_shard`` casts, whatever the strategy (parallel/apply.py)."""
        return self.trains_everything and self.compute_bytes != self.master_bytes

    @property
    def keeps_copy(self) -> bool:
        """One process keeps the whole bfloat16 copy beside its masters, without ``fully_shard`` (parallel/masters.py)."""
        kept = self.strategy == "one" and not self.reshard and self.offload != "all"
        return kept and self.is_mixed and (self.master_bytes, self.compute_bytes) == (4, 2)

    @property
    def gathers_whole(self) -> bool:
        """Whether even whole weights are copied to where they compute: cast, or from host memory."""
        return self.is_mixed or self.offload == "all"

    @property
    def num_root_parameters(self) -> int:
        """R = P - L B: what is in no block."""
        return self.model.num_parameters - self.model.num_layers * self.model.num_block_parameters

    @property
    def frozen_block_bytes(self) -> int:
        """One block's frozen weights as they are kept: ``B f``, or its linear layers in NF4 and the rest in f.

        NF4 takes 1/2 byte a value, 1/64 for its block's scale and 8 / 16,384 for the scales' own (model/nf4.py), in whole rows.
        """
        if not self.nf4_blocks:
            return self.model.num_block_parameters * self.frozen_bytes
        sizes = [out * into for out, into in self.model.block_linear_shapes.values()]
        in_nf4 = sum(math.ceil(size / NF4_ROW_VALUES) for size in sizes) * NF4_ROW_BYTES
        return (self.model.num_block_parameters - sum(sizes)) * self.frozen_bytes + in_nf4

    @property
    def head_elements(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def estimate_terms(setup: Setup) -> dict[str, int]:
    """Every term in bytes, by name. Their sum is the estimated peak of one rank."""
    terms = {
        "weights": weights(setup),
        "gradients": gradients(setup),
        "unreduced": unreduced(setup),
        "optimizer": optimizer(setup),
        "gathered": gathered(setup) + fetched(setup),
        "dequantised": dequantised(setup),
        "activations": activations(setup),
        "logits": logits(setup),
    }
    terms["reduction"] = reduction(setup, passing=terms["activations"] + terms["logits"])
    passing = ("gathered", "dequantised", "activations", "logits", "reduction")
    terms["overhead"] = overhead(setup, moving=sum(terms[name] for name in passing))
    return terms


def weights(s: Setup) -> int:
    """Masters, or frozen weights and adapters: ``P m / S``, or ``P f / S + A m / S``; NF4 as in ``frozen_block_bytes``.

    By patterns each weight is one or the other: ``(P - trained) f / S + trained m / S``.
    """
    if s.in_place is not None:
        return ((s.model.num_parameters - s.num_trained) * s.frozen_bytes + s.num_trained * s.master_bytes) // s.num_shards
    if s.trains_everything:
        return s.model.num_parameters * s.master_bytes // s.num_shards
    frozen = s.num_root_parameters * s.frozen_bytes + s.model.num_layers * s.frozen_block_bytes
    return (frozen + s.num_adapter_parameters * s.master_bytes) // s.num_shards


def gradients(s: Setup) -> int:
    """One master-dtype gradient for each trained weight, reduced and kept over accumulation: ``trained m / S``."""
    return s.num_trained * s.master_bytes // s.num_shards


def unreduced(s: Setup) -> int:
    """Gradients that wait for the last micro-batch of a step, whole on every rank: ``trained m``; none if each one reduces."""
    return 0 if s.reduce_every or s.num_shards == 1 else s.num_trained * s.master_bytes


def optimizer(s: Setup) -> int:
    """States as ``count_state_bytes`` has them, over S: AdamW's two moments ``2 trained m / S``. Its fused kernel needs no copy."""
    model, linears = s.model, s.model.block_linear_shapes.values()
    num_root = s.num_root_parameters if s.trains_everything else s.in_place.num_in_root if s.in_place else 0
    matrices = 1 if model.tied_embeddings else 2
    sides = model.num_layers * sum(out + into for out, into in linears) + matrices * (model.vocab_size + model.hidden_size)
    if s.num_adapter_parameters:  # a factor of rank r has one side for each r elements, and r more
        sides = s.num_adapter_parameters // s.adapter_rank + 2 * s.adapter_rank * model.num_layers * len(linears)
    return (
        count_state_bytes(
            s.optimizer_name,
            s.num_trained,
            num_root=num_root,
            num_embedding=min(num_root, s.head_elements),
            num_sides=sides,
            master_bytes=s.master_bytes,
        )
        // s.num_shards
    )


def gathered(s: Setup) -> int:
    """Whole weights in compute dtype that FSDP2, or parallel/masters.py, makes from shards or masters.

    ``R c`` for the root, which stays gathered, plus ``min(2, L) B c`` if blocks are resharded after the forward pass, else
    ``L B c``. Frozen weights are gathered as they are kept. Nothing where the weights are whole and in compute dtype already.
    Weights trained by patterns are gathered as masters, and cast where they are used: see ``_gathered_in_place``.
    """
    if s.in_place is not None:
        return _gathered_in_place(s, s.in_place)
    if s.num_shards == 1 and not s.gathers_whole:
        return 0
    num_blocks = min(BLOCKS_IN_FLIGHT, s.model.num_layers) if s.reshard else s.model.num_layers
    if s.trains_everything:
        return (s.num_root_parameters + num_blocks * s.model.num_block_parameters) * s.compute_bytes
    return s.num_root_parameters * s.frozen_bytes + num_blocks * s.frozen_block_bytes


def fetched(s: Setup) -> int:
    """Shards of two blocks that come from host memory, before they are gathered: ``2 B m / S``, or as frozen ones are kept."""
    if s.offload != "all":
        return 0
    block = s.model.num_block_parameters * s.master_bytes if s.trains_everything else s.frozen_block_bytes
    return min(BLOCKS_IN_FLIGHT, s.model.num_layers) * block // s.num_shards


def _gathered_in_place(s: Setup, t: TrainedWeights) -> int:
    """The same for patterns, and ``c`` for each trained weight: autograd keeps the cast copy until the backward pass is there.

    Of copies in recomputed blocks one block's are held.
    """
    casts = 0 if s.compute_bytes == s.master_bytes else s.compute_bytes
    held = t.num_in_root + (t.num_in_blocks if s.recompute == "none" else t.num_in_largest_block)
    if s.num_shards == 1 and not s.gathers_whole:
        return held * casts
    num_blocks = min(BLOCKS_IN_FLIGHT, s.model.num_layers) if s.reshard else s.model.num_layers
    trained = t.num_in_root + min(num_blocks * t.num_in_largest_block, t.num_in_blocks)
    plain = s.num_root_parameters + num_blocks * s.model.num_block_parameters
    return plain * s.frozen_bytes + trained * (s.master_bytes - s.frozen_bytes) + held * casts


def dequantised(s: Setup) -> int:
    """The largest weight in NF4 while it is multiplied: ``n c``, and ``5 n / 64`` for the scales of its blocks."""
    if not s.nf4_blocks:
        return 0
    largest = max(out * into for out, into in s.model.block_linear_shapes.values())
    return largest * s.compute_bytes + 5 * largest // 64


def activations(s: Setup) -> int:
    """What autograd keeps for the backward pass, at its start.

    Kept: ``L T k`` with k of ``block_bytes_per_token``. Recomputed: each block's input ``L T c H``, and one block at work,
    ``T k``. Selective: ``L T l`` with l of ``linear_bytes_per_token``, and what is repeated of one block, ``T (k - l)``. All:
    the last hidden states before and after the norm, ``2 T c H``, and the attention mask where one is built. Of what moves
    to host memory the first 2**29 bytes on their way out, as much on its way back, and one block's are on the device.
    """
    per_token, kept = block_bytes_per_token(s), kept_bytes_per_token(s)
    hidden = s.compute_bytes * s.model.hidden_size
    at_work = {"none": 0, "selective": max(0, per_token - kept), "block": per_token}[s.recompute]
    blocks = s.micro_tokens * (s.model.num_layers * kept + at_work)
    moved = moved_bytes(s)
    passing = min(moved, MOVING_BYTES + moved // s.model.num_layers)
    return blocks - moved + passing + 2 * s.micro_tokens * hidden + attention_mask(s) + block_scores(s)


def kept_bytes_per_token(s: Setup) -> int:
    """Bytes a token that one block keeps from its forward pass to its backward pass."""
    if s.recompute == "block":
        return s.compute_bytes * s.model.hidden_size
    return linear_bytes_per_token(s) if s.recompute == "selective" else block_bytes_per_token(s)


def linear_bytes_per_token(s: Setup) -> int:
    """What selective recomputation keeps: a block's input, the results of its linear layers, those of attention.

    ``c H``, ``c`` times the sum of the layers' outputs (compiled all but the last, which only the next block needs), ``c q + 4
    heads``, and adapters' inner results.
    """
    m, c = s.model, s.compute_bytes
    outputs = sum(out for out, _ in m.block_linear_shapes.values()) - (m.hidden_size if s.compile else 0)
    inner = c * s.adapter_rank * len(m.block_linear_shapes) if s.num_adapter_parameters else 0
    return c * (m.hidden_size + outputs + m.num_heads * m.head_dim) + 4 * m.num_heads + inner


def moved_bytes(s: Setup) -> int:
    """Activations that go to host memory: ``L T`` times what a block keeps; eager and selective only its input, as the rest is
    in the checkpoint's own cache. None on a CPU.
    """
    if not s.offload_activations or s.device == "cpu":
        return 0
    in_cache = s.recompute == "selective" and not s.compile
    per_token = s.compute_bytes * s.model.hidden_size if in_cache else kept_bytes_per_token(s)
    return s.micro_tokens * s.model.num_layers * per_token


def block_bytes_per_token(s: Setup) -> int:
    """Bytes a token that one block's autograd graph keeps, with FlashAttention (https://arxiv.org/abs/2205.14135): no T x T.

    ==============================  =====================================================================================
    tensor                          bytes a token (q = heads * head_dim, k = kv_heads * head_dim)
    ==============================  =====================================================================================
    inputs of the norms             c n compiled; n: 2 H for Llama. Eager 4 n, as transformers' norms keep a float32 copy,
                                    and c n more for the gradient of the norms' own weights where those are trained
    inputs of q, k, v and gate, up  2 c H
    q, k, v                         c (q + 2 k)
    attention output, log-sum-exp   c q + 4 heads; the output is also the input of the output projection
    gate, up, product               3 c I compiled; eager 4 c I, with the activation's result apart
    adapters' inner results         c r for each adapted layer; with dropout also the dropped input and its mask
    ==============================  =====================================================================================
    """
    m, c = s.model, s.compute_bytes
    q, k = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    norms = m.block_norm_elements * (c if s.compile else max(c, 4) + c * (s.num_adapter_parameters == 0))
    attention = c * (q + 2 * k) + c * q + 4 * m.num_heads
    mlp = c * m.intermediate_size * (3 if s.compile else 4)
    return norms + 2 * c * m.hidden_size + attention + mlp + adapter_bytes_per_token(s)


def adapter_bytes_per_token(s: Setup) -> int:
    """``c r`` for each adapted layer; dropout adds its input once more, and a mask of a byte an element."""
    if not s.num_adapter_parameters:
        return 0
    inner = s.compute_bytes * s.adapter_rank * len(s.model.block_linear_shapes)
    dropped = sum(into for _, into in s.model.block_linear_shapes.values()) * (s.compute_bytes + 1)
    return inner + (dropped if s.adapter_dropout else 0)


def attention_mask(s: Setup) -> int:
    """A dense mask as transformers builds it for packed rows without varlen: ``T^2`` booleans, and once more in compute dtype."""
    return s.micro_tokens**2 * (1 + s.compute_bytes) if s.builds_mask else 0


def block_scores(s: Setup) -> int:
    """Soft-capped scores, computed a block at a time (model/attention.py): at most 2**25, each some 4 times in c bytes and 4 times in 4."""
    if s.model.attention_softcap is None:
        return 0
    return min(s.model.num_heads * s.micro_tokens**2, BLOCK_SCORES) * (4 * s.compute_bytes + 16)


def logits(s: Setup) -> int:
    """One chunk of the loss: logits in compute dtype, in float32, and their gradient: ``chunk V (c + 4 + 4)``.

    ``chunk`` is at most T tokens, and 2**27 / V of them: 1046 for Llama 3's vocabulary of 128,256.
    """
    chunk = min(s.micro_tokens, max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // s.model.vocab_size))
    return chunk * s.model.vocab_size * (s.compute_bytes + 4 + 4)


def reduction(s: Setup, passing: int) -> int:
    """Gradients on their way into shards, where everything is trained by ``fully_shard``.

    During the backward pass: two blocks, unsharded in compute dtype and in master dtype for the reduction,
    ``2 B (c + m)``, and the head's gradient, which the loss makes first and a chunk at a time: ``2 V H c``. At its end the
    root: ``R (c + m)``, when activations and logits (``passing``) are gone. Adapters' gradients are too small to count. By
    patterns the same of what is trained, in master dtype where shards are gathered. A kept copy's gradients go into the
    masters' as they come: ``B c`` of a compiled block, and the head's as summed and as handed on, ``V H (m + c)``.
    """
    if s.in_place is not None:
        head = 2 * min(s.in_place.num_in_root, s.head_elements) * s.compute_bytes
        if s.num_shards == 1:
            return head + s.in_place.num_in_largest_block * s.compute_bytes
        during = BLOCKS_IN_FLIGHT * s.in_place.num_in_largest_block * (s.compute_bytes + s.master_bytes) + head
        return max(during, s.in_place.num_in_root * (s.compute_bytes + s.master_bytes) - passing)
    if not s.trains_everything:
        return 0
    if not s.is_mixed and s.num_shards == 1:
        return 2 * s.head_elements * s.compute_bytes  # plain gradients are the ones kept; only the chunks' sums come on top
    if s.keeps_copy:
        return s.model.num_block_parameters * s.compute_bytes + s.head_elements * (s.master_bytes + s.compute_bytes)
    during = BLOCKS_IN_FLIGHT * s.model.num_block_parameters * (s.compute_bytes + s.master_bytes) + 2 * s.head_elements * s.compute_bytes
    end = s.num_root_parameters * (s.compute_bytes + s.master_bytes)
    return max(during, end - passing)


def overhead(s: Setup, moving: int) -> int:
    """Context, communication buffers (more than one rank) and 5 % of what is allocated and freed in each step."""
    communication = COMMUNICATION_BYTES[s.device] if s.world_size > 1 else 0
    return CONTEXT_BYTES[s.device] + communication + math.ceil(FRAGMENTATION * moving)
