"""Attention over documents laid side by side, through transformers' attention interface.

``manyhands_varlen`` hands queries, keys and values to ``torch.nn.attention.varlen``, which computes each document on its
own from the cumulative lengths. No mask is ever built, so it fails closed: without lengths it raises. The lengths travel
as keyword arguments of the model's forward pass under transformers' own names (``cu_seq_lens_q``, ...).
Knows nothing of data files, ranks or losses.

Shapes: b rows, t positions, h query heads, g key-value heads (h a multiple of g), d dimensions a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

VARLEN = "manyhands_varlen"
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later; asked once: compiled code cannot
IMPLEMENTATIONS = {"sdpa": "sdpa", "varlen": VARLEN}  # Plan.attention -> transformers' attn_implementation


def register_varlen() -> None:
    """Make ``manyhands_varlen`` known to transformers.

    It is deliberately not registered for masks: transformers then builds none, and also ignores padding masks, so
    generation on padded rows must switch to ``sdpa`` first.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, attend_varlen)


def attention_kwargs(batch: Mapping[str, Any], implementation: str) -> dict[str, Any]:
    """What the model's forward pass needs, besides ``input_ids``, so that no row sees another.

    Packed batches (with ``cu_seq_lens``) pass ``position_ids``, from which transformers' ``sdpa`` finds the documents, and
    for ``manyhands_varlen`` the cumulative lengths. Rows padded on the right need nothing with ``sdpa``: causal attention
    never looks at what follows, and positions count from 0. With ``manyhands_varlen`` each padded row is one document.
    """
    packed = "cu_seq_lens" in batch
    kwargs: dict[str, Any] = {"position_ids": batch["position_ids"]} if packed else {}
    if implementation != VARLEN:
        return kwargs
    ids = batch["input_ids"]
    if packed:
        lengths, longest = batch["cu_seq_lens"], int(batch["max_length"])
    else:
        num_rows, longest = ids.shape
        lengths = torch.arange(0, num_rows * longest + 1, longest, dtype=torch.int32, device=ids.device)
    bound = 1 << max(longest - 1, 1).bit_length()  # a power of 2: compiled graphs guard on this int, and a bound is all it is
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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document. ``query`` (b, h, t, d), ``key`` and ``value`` (b, g, t, d) -> (b, t, h, d).

    Raises ``RuntimeError`` where an argument would be ignored or the documents' lengths did not arrive.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
        raise RuntimeError(f"{VARLEN} got no cumulative lengths: {type(module).__name__} does not pass keyword arguments on")
    if softcap is not None:
        raise RuntimeError(f"{VARLEN} cannot cap attention scores (softcap={softcap}); use attention sdpa or eager")
    if dropout or attention_mask is not None:
        raise RuntimeError(f"{VARLEN} has neither attention dropout nor masks (dropout={dropout})")
    num_rows, num_heads, length, _dim = query.shape
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
