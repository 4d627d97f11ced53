"""Attention over documents laid side by side, through transformers' attention interface.

``manyhands_varlen`` hands queries, keys and values to ``torch.nn.attention.varlen``, which computes each document on its
own from the cumulative lengths; where all of them have one length, to the faster kernel that ``choose_row_kernel`` found. ``manyhands_blockwise`` is plain torch, for soft-capped scores (Gemma 2), which neither
varlen nor transformers' ``sdpa`` can compute; transformers' ``sdpa`` drops the cap without a word. No mask is ever built for
these two, so they fail closed: without lengths they raise. The lengths travel as keyword arguments of the model's forward
pass under transformers' own names (``cu_seq_lens_q``, ...). Knows nothing of data files, ranks or losses.

Shapes: b rows, t positions, h query heads, g key-value heads (h a multiple of g), d dimensions a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from manyhands.kernels.dense_attention import DenseAttention, attend_dense, choose_dense

VARLEN, BLOCKWISE = "manyhands_varlen", "manyhands_blockwise"
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later; asked once: compiled code cannot
IMPLEMENTATIONS = {"sdpa": "sdpa", "varlen": VARLEN, "blockwise": BLOCKWISE}  # Plan.attention -> transformers' attn_implementation
MAX_BLOCK_SCORES = 2**25  # elements: 128 MiB in float32
# What ``choose_row_kernel`` found, one for the process: compiled code reads it as a constant. Empty: varlen for all.
_row_kernel = DenseAttention("")
CAPS = ("attn_logit_softcapping",)  # config keys that change scores in a way that sdpa ignores


def register_attention() -> None:
    """Make both functions known to transformers.

    They are deliberately not registered for masks: transformers then builds none, and also ignores padding masks, so
    generation on padded rows must switch to ``plain_attention`` first.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, attend_varlen)
    AttentionInterface.register(BLOCKWISE, attend_blockwise)


def choose_row_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> DenseAttention:
    """Choose the kernel for documents of one length, by a self-test on ``device``; it holds for this process."""
    global _row_kernel
    text = config.get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    _row_kernel = choose_dense(device, dtype, heads, groups, dim)
    return _row_kernel


def plain_attention(config: Any) -> Literal["sdpa", "eager"]:
    """transformers' own implementation for whoever has no documents to keep apart: ``sdpa``, unless it would drop a soft-cap."""
    text = config.get_text_config()
    return "eager" if any(getattr(text, key, None) for key in CAPS) else "sdpa"


def attention_kwargs(batch: Mapping[str, Any], implementation: str) -> dict[str, Any]:
    """What the model's forward pass needs, besides ``input_ids``, so that no row sees another.

    Packed batches (with ``cu_seq_lens``) pass ``position_ids``, from which transformers' ``sdpa`` finds the documents, and
    for our own functions the cumulative lengths. Rows padded on the right need nothing with ``sdpa``: causal attention
    never looks at what follows, and positions count from 0. With our own functions each padded row is one document.
    """
    packed = "cu_seq_lens" in batch
    kwargs: dict[str, Any] = {"position_ids": batch["position_ids"]} if packed else {}
    if implementation not in (VARLEN, BLOCKWISE):
        return kwargs
    ids = batch["input_ids"]
    if packed:
        lengths, longest = batch["cu_seq_lens"], int(batch["max_length"])
    else:
        num_rows, longest = ids.shape
        lengths = torch.arange(0, num_rows * longest + 1, longest, dtype=torch.int32, device=ids.device)
    bound = 1 << max(longest - 1, 1).bit_length()  # a power of 2: compiled graphs guard on this int, and a bound is all it is
    if "row_length" in batch:
        kwargs["row_length"] = int(batch["row_length"])
    return kwargs | {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": bound, "max_length_k": bound}


def attend_varlen(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    row_length: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document. ``query`` (b, h, t, d), ``key`` and ``value`` (b, g, t, d) -> (b, t, h, d).

    ``row_length``: every document has this length, and they fill the batch. Raises ``RuntimeError`` where an argument would be ignored or the documents' lengths did not arrive.
    """
    _refuse_what_is_missed(VARLEN, module, attention_mask, dropout, max_length_q, cu_seq_lens_q, others)
    if softcap is not None:
        raise RuntimeError(f"{VARLEN} cannot cap attention scores (softcap={softcap}); use attention blockwise")
    assert cu_seq_lens_q is not None and cu_seq_lens_k is not None and max_length_q is not None and max_length_k is not None
    num_rows, num_heads, length, _dim = query.shape
    if row_length is not None and _row_kernel.name and (sliding_window is None or sliding_window >= row_length):
        query, key, value = (_split_rows(x, row_length) for x in (query, key, value))
        dense = attend_dense(query, key, value, scaling, _row_kernel.name)  # (b t / l, h, l, d)
        return dense.transpose(1, 2).reshape(num_rows, length, num_heads, -1), None
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (b t, heads, d)
    window = (sliding_window - 1 if sliding_window else -1, 0)  # positions seen to the left and right of a query
    extra: dict[str, Any] = {}
    if flat_key.shape[1] != num_heads:
        if TAKES_GROUPS:
            extra["enable_gqa"] = True
        else:  # torch 2.11: every query head brings its own key and value
            groups = num_heads // flat_key.shape[1]
            flat_key, flat_value = (x.repeat_interleave(groups, dim=1) for x in (flat_key, flat_value))
    out: Any = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        window_size=window,
        **extra,
    )
    return out.view(num_rows, length, num_heads, -1), None


def _split_rows(x: torch.Tensor, row_length: int) -> torch.Tensor:
    """(b, heads, t, d) -> (b t / l, heads, l, d)"""
    num_rows, num_heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(num_rows * length // row_length, row_length, num_heads, dim).transpose(1, 2)


@torch.compiler.disable  # a loop over blocks of which there are many: unrolled, it would be one graph for each length
def attend_blockwise(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The same in plain torch, with scores squashed to ``softcap tanh(score / softcap)`` where that is asked.

    Works on a block of queries at a time against the keys that the longest document lets them reach, and computes the scores
    again in the backward pass: at most ``MAX_BLOCK_SCORES`` of them are held. Softmax in float32 (float64 for float64).
    Raises ``RuntimeError`` as ``attend_varlen`` does.
    """
    _refuse_what_is_missed(BLOCKWISE, module, attention_mask, dropout, max_length_q, cu_seq_lens_q, others)
    assert cu_seq_lens_q is not None and max_length_q is not None
    num_rows, num_heads, length, dim = query.shape
    total, num_groups = num_rows * length, key.shape[1]
    query = query.transpose(1, 2).reshape(total, num_groups, num_heads // num_groups, dim)
    key, value = (x.transpose(1, 2).reshape(total, num_groups, -1) for x in (key, value))
    positions = torch.arange(total, device=query.device)
    documents = torch.bucketize(positions, cu_seq_lens_q[1:].long(), right=True)  # (b t): which one each position is in
    reach = min(max_length_q, total, sliding_window or total)  # keys that a query may see, its own among them
    scaling = dim**-0.5 if scaling is None else scaling
    size = max(16, min(MAX_BLOCK_SCORES // (num_heads * 2 * reach), max(reach, 256)))  # queries of one block
    outs = []
    for start in range(0, total, size):
        seen = slice(max(0, start - reach + 1), min(start + size, total))  # up to reach + size keys
        rows = slice(start, seen.stop)
        distance = positions[rows, None] - positions[None, seen]
        hidden = (distance < 0) | (distance >= reach) | (documents[rows, None] != documents[None, seen])
        arguments = (query[rows], key[seen], value[seen], hidden, scaling, softcap)
        if torch.is_grad_enabled():
            outs.append(checkpoint(_attend_block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_attend_block(*arguments))
    return torch.cat(outs).view(num_rows, length, num_heads, -1), None


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """(q, g, h / g, d), (k, g, d), (k, g, d) and (q, k) -> (q, g, h / g, d)"""
    scores = torch.einsum("qgrd,kgd->grqk", query, key) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32).masked_fill(hidden, -torch.inf)
    return torch.einsum("grqk,kgd->qgrd", scores.softmax(-1).to(value.dtype), value)


def _refuse_what_is_missed(
    name: str,
    module: nn.Module,
    mask: torch.Tensor | None,
    dropout: float,
    max_length: int | None,
    lengths: torch.Tensor | None,
    others: Mapping[str, Any],
) -> None:
    if lengths is None or max_length is None:
        raise RuntimeError(f"{name} got no cumulative lengths: {type(module).__name__} does not pass keyword arguments on")
    if dropout or mask is not None:
        raise RuntimeError(f"{name} has neither attention dropout nor masks (dropout={dropout})")
    if others.get("s_aux") is not None:
        raise RuntimeError(f"{name} has no attention sinks, which {type(module).__name__} asks for")
