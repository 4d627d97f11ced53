"""Bytes a rank holds at its worst moment: one small function a term. Pure arithmetic; knows no torch and reads nothing.

Notation: P parameters, A trained parameters of adapters, B parameters of one block, R of the rest (embeddings, last norm,
head), L blocks, T tokens of a micro-batch, H hidden size, I inner size of the MLP, V vocabulary, c bytes of a compute
element, m of a master's, f of a frozen one, S ranks that share one copy of the state (1 unless fsdp).

The worst moment is the start of the backward pass, when every block's activations are held, or its end, when the
gradients of the root unit (embeddings and head) are reduced. Measured beside peers in ``tests/plan/test_memory_peers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.facts.types import ModelFacts

GIB = 2**30
CHUNK_LOGITS, MIN_CHUNK_TOKENS = 2**27, 256  # elements and tokens of one chunk of the loss, as in model/loss.py
BLOCKS_IN_FLIGHT = 2  # FSDP2 gathers the next block while one computes
CONTEXT_BYTES = {"cuda": int(0.6 * GIB), "cpu": int(0.6 * GIB)}  # CUDA context and library workspaces; on CPU the imports
COMMUNICATION_BYTES = {"cuda": 1 * GIB, "cpu": GIB // 16}  # NCCL's / gloo's buffers, with more than one rank
FRAGMENTATION = 0.05  # share of what comes and goes that the allocator cannot use; expandable segments keep it small


@dataclass(frozen=True)
class Setup:
    """One way to run, as far as memory is concerned. ``micro_tokens``: tokens of one micro-batch, padding included."""

    model: ModelFacts
    num_adapter_parameters: int  # 0: everything is trained
    adapter_rank: int
    adapter_dropout: bool
    device: Literal["cuda", "cpu"]
    world_size: int
    strategy: Literal["one", "ddp", "fsdp"]
    reshard: bool
    recompute: Literal["none", "block"]
    compile: bool
    compute_bytes: int
    master_bytes: int
    frozen_bytes: int
    micro_tokens: int
    builds_mask: bool  # a dense attention mask over the micro-batch

    @property
    def trains_everything(self) -> bool:
        return self.num_adapter_parameters == 0

    @property
    def num_shards(self) -> int:
        return self.world_size if self.strategy == "fsdp" else 1

    @property
    def num_trained(self) -> int:
        return self.num_adapter_parameters or self.model.num_parameters

    @property
    def is_mixed(self) -> bool:
        """Masters and compute differ in dtype: ``fully_shard`` casts, whatever the strategy (parallel/apply.py)."""
        return self.trains_everything and self.compute_bytes != self.master_bytes

    @property
    def num_root_parameters(self) -> int:
        """R = P - L B: what is in no block."""
        return self.model.num_parameters - self.model.num_layers * self.model.num_block_parameters

    @property
    def head_elements(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def estimate_terms(setup: Setup) -> dict[str, int]:
    """Every term in bytes, by name. Their sum is the estimated peak of one rank."""
    terms = {
        "weights": weights(setup),
        "gradients": gradients(setup),
        "optimizer": optimizer(setup),
        "gathered": gathered(setup),
        "activations": activations(setup),
        "logits": logits(setup),
    }
    terms["reduction"] = reduction(setup, passing=terms["activations"] + terms["logits"])
    terms["overhead"] = overhead(setup, moving=terms["gathered"] + terms["activations"] + terms["logits"] + terms["reduction"])
    return terms


def weights(s: Setup) -> int:
    """Masters, or frozen weights and adapters: ``P m / S``, or ``P f / S + A m / S``."""
    if s.trains_everything:
        return s.model.num_parameters * s.master_bytes // s.num_shards
    return (s.model.num_parameters * s.frozen_bytes + s.num_adapter_parameters * s.master_bytes) // s.num_shards


def gradients(s: Setup) -> int:
    """One master-dtype gradient for each trained weight, reduced and kept over accumulation: ``trained m / S``."""
    return s.num_trained * s.master_bytes // s.num_shards


def optimizer(s: Setup) -> int:
    """AdamW's two moments in the masters' dtype: ``2 trained m / S``. The fused kernel needs no copy of its own."""
    return 2 * s.num_trained * s.master_bytes // s.num_shards


def gathered(s: Setup) -> int:
    """Whole weights in compute dtype that FSDP2 makes from shards or masters.

    ``R c`` for the root, which stays gathered, plus ``min(2, L) B c`` if blocks are resharded after the forward pass, else
    ``L B c``. With frozen weights c is f. Nothing where the weights are whole and in compute dtype already.
    """
    if s.num_shards == 1 and not s.is_mixed:
        return 0
    element = s.compute_bytes if s.trains_everything else s.frozen_bytes
    num_blocks = min(BLOCKS_IN_FLIGHT, s.model.num_layers) if s.reshard else s.model.num_layers
    return (s.num_root_parameters + num_blocks * s.model.num_block_parameters) * element


def activations(s: Setup) -> int:
    """What autograd keeps for the backward pass, at its start.

    Kept: ``L T k`` with k of ``block_bytes_per_token``. Recomputed: each block's input ``L T c H``, and one block at work,
    ``T k``. Both: the last hidden states before and after the norm, ``2 T c H``, and the attention mask where one is built.
    """
    per_token = block_bytes_per_token(s)
    hidden = s.compute_bytes * s.model.hidden_size
    if s.recompute == "block":
        blocks = s.micro_tokens * (s.model.num_layers * hidden + per_token)
    else:
        blocks = s.micro_tokens * s.model.num_layers * per_token
    return blocks + 2 * s.micro_tokens * hidden + attention_mask(s)


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
    norms = m.block_norm_elements * (c if s.compile else max(c, 4) + c * s.trains_everything)
    attention = c * (q + 2 * k) + c * q + 4 * m.num_heads
    mlp = c * m.intermediate_size * (3 if s.compile else 4)
    return norms + 2 * c * m.hidden_size + attention + mlp + adapter_bytes_per_token(s)


def adapter_bytes_per_token(s: Setup) -> int:
    """``c r`` for each adapted layer; dropout adds its input once more, and a mask of a byte an element."""
    if s.trains_everything:
        return 0
    inner = s.compute_bytes * s.adapter_rank * len(s.model.block_linear_shapes)
    dropped = sum(into for _, into in s.model.block_linear_shapes.values()) * (s.compute_bytes + 1)
    return inner + (dropped if s.adapter_dropout else 0)


def attention_mask(s: Setup) -> int:
    """A dense mask as transformers builds it for packed rows without varlen: ``T^2`` booleans, and once more in compute dtype."""
    return s.micro_tokens**2 * (1 + s.compute_bytes) if s.builds_mask else 0


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
    root: ``R (c + m)``, when activations and logits (``passing``) are gone. Adapters' gradients are too small to count.
    """
    if not s.trains_everything:
        return 0
    if not s.is_mixed and s.num_shards == 1:
        return 2 * s.head_elements * s.compute_bytes  # plain gradients are the ones kept; only the chunks' sums come on top
    during = BLOCKS_IN_FLIGHT * s.model.num_block_parameters * (s.compute_bytes + s.master_bytes) + 2 * s.head_elements * s.compute_bytes
    end = s.num_root_parameters * (s.compute_bytes + s.master_bytes)
    return max(during, end - passing)


def overhead(s: Setup, moving: int) -> int:
    """Context, communication buffers (more than one rank) and 5 % of what is allocated and freed in each step."""
    communication = COMMUNICATION_BYTES[s.device] if s.world_size > 1 else 0
    return CONTEXT_BYTES[s.device] + communication + math.ceil(FRAGMENTATION * moving)
