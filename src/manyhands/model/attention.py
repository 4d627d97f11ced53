"""Attention over documents laid side by side, through transformers' attention interface.

``manyhands_varlen`` computes each document on its own from the cumulative lengths: by ``torch.nn.attention.varlen``, or
by the faster kernels that ``choose_attention_kernels`` found, one for packs and one for documents that all have one
length. ``manyhands_blockwise`` is plain torch, for soft-capped scores, which neither varlen nor transformers' ``sdpa``
can compute, and for sinks where varlen does not run; transformers' ``sdpa`` drops both without a word. No mask is ever
built for these two, so they fail closed: without lengths they raise. The lengths travel as keyword arguments of the
model's forward pass under transformers' own names (``cu_seq_lens_q``, ...). Knows nothing of data files, ranks or
losses.

Shapes: b rows, t positions, h query heads, g key-value heads (h a multiple of g), d dimensions a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from manyhands import families
from manyhands.core.limits import MAX_BLOCK_SCORES
from manyhands.data.batch.divide import EXCHANGES_HEADS, GATHERS_KEYS, KEY_BOUNDS, KEY_POSITIONS
from manyhands.kernels.attention.context import exchange_for_heads, exchange_for_tokens, gather_keys, rank_in_group
from manyhands.kernels.attention.dense import attend_dense, choose_dense
from manyhands.kernels.attention.flash4 import attend_flash4, choose_packed
from manyhands.kernels.attention.sinks import TAKES_GROUPS, attend_with_sinks
from manyhands.kernels.backend import Backend
from manyhands.kernels.matmul import sum_dtype

VARLEN, BLOCKWISE = "manyhands_varlen", "manyhands_blockwise"
IMPLEMENTATIONS = {
    "sdpa": "sdpa",
    "varlen": VARLEN,
    "blockwise": BLOCKWISE,
}  # Plan.attention -> transformers' attn_implementation
CAPS = ("attn_logit_softcapping",)  # config keys that change scores in a way that sdpa ignores


class AttentionRefused(RuntimeError):
    """An argument of attention would be ignored, or the documents' lengths did not arrive."""


@dataclass(frozen=True)
class AttentionKernels:
    """What computes documents of one length and packs of mixed ones, for the heads that the self-tests were made
    with.
    """

    rows: Backend  # its name is empty where packs' kernel computes rows too
    packs: Backend
    num_heads: int
    num_groups: int
    dim: int
    dtype: torch.dtype

    def describe(self) -> str:
        """Which path runs, and why not a faster one."""
        packs, rows = self.packs, self.rows
        parts = [f"packs by {packs.name}" + (f" ({packs.reason})" if packs.reason else "")]
        if rows.name or rows.reason:
            parts.append(
                f"samples of one length by {rows.name or packs.name}" + (f" ({rows.reason})" if rows.reason else "")
            )
        return ", ".join(parts)

    def tested_with(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Of (b, h, t, d) and (b, g, t, d): some families have layers with other heads, which no self-test has seen."""
        return (query.shape[1], key.shape[1], query.shape[3], query.dtype) == (
            self.num_heads,
            self.num_groups,
            self.dim,
            self.dtype,
        )


class ImageRows(NamedTuple):
    """Images among the b t positions of a batch, whose tokens see all of their own image and what is before it.

    Queries and keys of the images lie end to end; the keys of an image are its document's up to its own end.
    """

    ids: torch.Tensor  # (b t) int64: which image a position belongs to, -1 for text
    longest: int  # tokens of an image
    queries: torch.Tensor  # (image tokens) int64, positions
    keys: torch.Tensor  # (keys of all images) int64, positions; one may stand for several images
    cu_queries: torch.Tensor  # (images + 1) int32
    cu_keys: torch.Tensor  # (images + 1) int32

    def to(self, device: torch.device) -> ImageRows:
        tensors: dict[str, Any] = {
            name: part for name, part in self._asdict().items() if isinstance(part, torch.Tensor)
        }
        return self._replace(**{name: part.to(device, non_blocking=True) for name, part in tensors.items()})


# What ``choose_attention_kernels`` found, one for the process: compiled code reads it as a constant. None: varlen for
# all.
_kernels: AttentionKernels | None = None


def register_attention() -> None:
    """Make both functions known to transformers, and ``sdpa_mask`` as what builds the masks of its ``sdpa``.

    Both are deliberately not registered for masks: transformers then builds none, and also ignores padding masks, so
    generation on padded rows must switch to ``plain_attention`` first.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, attend_varlen)
    AttentionInterface.register(BLOCKWISE, attend_blockwise)
    AttentionMaskInterface.register("sdpa", sdpa_mask)


def sdpa_mask(*arguments: Any, dtype: torch.dtype = torch.float32, **others: Any) -> torch.Tensor | None:
    """The mask that transformers builds for ``sdpa``, (b, 1, t, keys), on a CPU as ``additive_mask``."""
    from transformers.masking_utils import sdpa_mask as build

    mask = build(*arguments, dtype=dtype, **others)
    return mask if mask is None or mask.device.type != "cpu" else additive_mask(mask, dtype)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where ``mask`` (bool) is True, -inf elsewhere; ``dtype``: the queries', or float32 for narrower ones.

    torch converts a boolean mask in every layer, and each keeps its copy for the backward pass: t^2 values a layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def choose_attention_kernels(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    one_length: bool,
    num_ranks: int = 1,
) -> AttentionKernels:
    """Choose kernels by self-tests on ``device``; they hold for this process.

    ``num_ranks`` divide the heads. ``one_length``: all rows of the run have one, so that a kernel for such rows is
    worth its test. FlashAttention 4 comes first there too (H200, forward and backward: 4 x 4,096 tokens with 64
    dimensions 2.13 ms, cuDNN 2.55; with 128 dimensions 2 x 4,096 tokens 1.91 ms, cuDNN 2.01, and 131,072 tokens 776 ms,
    cuDNN 912), then cuDNN, then FlashAttention 2.
    """
    global _kernels
    text = config.get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads, groups = heads // num_ranks, groups // num_ranks
    packs = choose_packed(device, dtype, heads, groups, dim, getattr(text, "sliding_window", None))
    tries_rows = one_length and packs.name != "flash4"
    rows = choose_dense(device, dtype, heads, groups, dim) if tries_rows else Backend("")
    _kernels = AttentionKernels(rows, packs, heads, groups, dim, dtype)
    return _kernels


def plain_attention(config: Any) -> Literal["sdpa", "eager"]:
    """transformers' own implementation for whoever has no documents to keep apart: ``sdpa``, unless it would drop a
    soft-cap or sinks.
    """
    text = config.get_text_config()
    drops = any(getattr(text, key, None) for key in CAPS) or families.find(text.model_type).sinks
    return "eager" if drops else "sdpa"


def count_positions(config: Any) -> int:
    """Position ids of one token: 1, or 4 where a model of images and text rotates by time, height and width.

    These three are equal in text; the first of the four is the token's place in its document, by which transformers
    tells packed documents apart (``position_ids[0]`` in the text models whose ``rope_parameters`` have sections).
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return 4 if "mrope_section" in rope else 1


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """(1, t) positions of a pack -> (1, 1, t, t), True where a query sees a key: of its document, and not after it."""
    documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)[0]
    order = torch.arange(len(documents), device=documents.device)
    return ((documents[:, None] == documents) & (order[:, None] >= order))[None, None]


def mask_of_keys(batch: Mapping[str, Any]) -> torch.Tensor:
    """(1, 1, t, t) of a pack that lists its documents' keys, True where a query sees a key."""
    positions, bounds = batch[KEY_POSITIONS], batch[KEY_BOUNDS]
    order = torch.arange(batch["input_ids"].shape[1], device=positions.device)
    keys = torch.arange(len(positions), device=positions.device)
    seen = torch.zeros(len(bounds) - 1, len(order), dtype=torch.bool, device=positions.device)
    seen[torch.bucketize(keys, bounds[1:].long(), right=True), positions] = True
    documents = torch.bucketize(order, batch["cu_seq_lens"][1:].long(), right=True)
    return (seen[documents] & (order[:, None] >= order))[None, None]


def attention_kwargs(
    batch: Mapping[str, Any], implementation: str, num_positions: int = 1, mask_dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What the model's forward pass needs, besides ``input_ids``, so that no row sees another.

    Packed batches (with ``cu_seq_lens``) pass ``position_ids``, from which transformers' ``sdpa`` finds the documents,
    and for our own functions the cumulative lengths. Rows padded on the right need nothing with ``sdpa``: causal
    attention never looks at what follows, and positions count from 0. With our own functions each padded row is one
    document. Where a batch lists its documents' keys, ``sdpa`` gets a mask of them; not where these are other ranks',
    too.
    ``num_positions``: see ``count_positions``; more than one stand in front, (4, b, t).
    """
    packed = "cu_seq_lens" in batch
    kwargs: dict[str, Any] = {"position_ids": batch["position_ids"]} if packed else {}
    if packed and num_positions > 1:
        kwargs["position_ids"] = kwargs["position_ids"].expand(num_positions, -1, -1)
    gathers = GATHERS_KEYS in batch
    if (gathers or EXCHANGES_HEADS in batch) and implementation not in (VARLEN, BLOCKWISE):
        raise AttentionRefused(f"{implementation} cannot see the keys of other ranks")
    if KEY_POSITIONS in batch and not gathers and implementation not in (VARLEN, "sdpa"):
        raise AttentionRefused(f"{implementation} cannot share the prompt of several answers")
    if implementation not in (VARLEN, BLOCKWISE):
        if KEY_POSITIONS in batch:
            mask = mask_of_keys(batch)
            kwargs["attention_mask"] = additive_mask(mask, mask_dtype) if mask.device.type == "cpu" else mask
        return kwargs
    ids = batch["input_ids"]
    if packed:
        lengths, longest = batch["cu_seq_lens"], int(batch["max_length"])
    else:
        num_samples, longest = ids.shape
        lengths = torch.arange(0, num_samples * longest + 1, longest, dtype=torch.int32, device=ids.device)
    bound = (
        1 << max(longest - 1, 1).bit_length()
    )  # a power of 2: compiled graphs guard on this int, and a bound is all it is
    if "row_length" in batch:
        kwargs["row_length"] = int(batch["row_length"])
    if EXCHANGES_HEADS in batch:
        kwargs["exchanges_heads"] = int(batch[EXCHANGES_HEADS])
    if KEY_POSITIONS in batch:
        kwargs |= {"key_positions": batch[KEY_POSITIONS]} | ({"gathers_keys": True} if gathers else {})
    keys = batch.get(KEY_BOUNDS, lengths)
    return kwargs | {"cu_seq_lens_q": lengths, "cu_seq_lens_k": keys, "max_length_q": bound, "max_length_k": bound}


def _over_heads(attend: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """``attend`` for ranks that divide a pack too: ``exchanges_heads``, if not 0, is their number, and each computes
    the whole pack for its own heads. ``query`` and the result are then of this rank's tokens, the lengths of all. Keys
    of a layer with too few heads are repeated first. ``window_image_rows``: ``image_rows`` of layers with a window.
    """

    @functools.wraps(attend)
    def attend_part(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *others: Any,
        exchanges_heads: int = 0,
        s_aux: torch.Tensor | None = None,
        window_image_rows: ImageRows | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        degree = exchanges_heads
        if window_image_rows is not None and more.get("sliding_window"):
            more["image_rows"] = window_image_rows
        if not degree:
            return attend(module, query, key, value, *others, s_aux=s_aux, **more)
        num_heads, num_groups = query.shape[1], key.shape[1]
        repeat = degree // math.gcd(num_groups, degree)
        if num_heads % (num_groups * repeat):
            raise AttentionRefused(f"{num_heads} and {num_groups} heads cannot be divided by {degree} ranks")
        key, value = (x if repeat == 1 else x.repeat_interleave(repeat, dim=1) for x in (key, value))
        parts = (exchange_for_heads(x[0].transpose(0, 1), degree).transpose(0, 1)[None] for x in (query, key, value))
        sinks = None if s_aux is None else s_aux.unflatten(0, (degree, -1))[rank_in_group()]
        out, _ = attend(module, *parts, *others, s_aux=sinks, **more)
        return exchange_for_tokens(out[0], degree)[None], None

    return attend_part


@_over_heads
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
    image_rows: ImageRows | None = None,
    key_positions: torch.Tensor | None = None,
    gathers_keys: bool = False,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document. ``query`` (b, h, t, d), ``key`` and ``value`` (b, g, t, d) -> (b, t, h,
    d).

    ``row_length``: every document has this length, but for padding at the end of the batch, which gets zeros where it
    is too short for one more. ``image_rows``: queries of an image see all of it, which a window bounds on the left
    alone; their rows are computed again. ``key_positions``: whose keys the documents see, with the bounds
    ``cu_seq_lens_k``: a prompt's are copied in front of each answer to it, the last key being the last query's; by
    torch's varlen alone. ``gathers_keys``: the batch is a rank's part of a pack, and positions are those of the pack's
    keys. ``s_aux`` (h): sinks. Raises ``AttentionRefused`` where an argument would be ignored or the documents' lengths
    did not arrive.
    """
    _refuse_what_is_missed(VARLEN, module, attention_mask, dropout, max_length_q, cu_seq_lens_q)
    if softcap is not None:
        raise AttentionRefused(f"{VARLEN} cannot cap attention scores (softcap={softcap}); use attention blockwise")
    assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
    assert max_length_q is not None and max_length_k is not None
    num_samples, num_heads, length, dim = query.shape
    width = value.shape[3]
    if width < dim:  # as in latent attention; the kernels want one width
        value = F.pad(value, (0, dim - width))
    longest = max_length_q if row_length is None else row_length
    window = sliding_window - 1 if sliding_window and sliding_window < longest else -1  # positions seen to the left
    kernels = _kernels if _kernels is not None and _kernels.tested_with(query, key) else None
    plain_rows = row_length is not None and window < 0 and all(x is None for x in (key_positions, image_rows, s_aux))
    if kernels is not None and kernels.rows.name and row_length is not None and plain_rows:
        whole = length - length % row_length
        query, key, value = (_split_rows(x[:, :, :whole], row_length) for x in (query, key, value))
        dense = attend_dense(query, key, value, scaling, kernels.rows.name)  # (b t / l, h, l, d)
        out = dense.transpose(1, 2).reshape(num_samples, whole, num_heads, -1)[..., :width]
        return (out if whole == length else F.pad(out, (0, 0, 0, 0, 0, length - whole))), None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (b t, heads, d)
    packs_by_flash4 = kernels is not None and kernels.packs.name == "flash4" and key_positions is None
    if key_positions is not None:
        if image_rows is not None or s_aux is not None:
            raise AttentionRefused(f"{VARLEN} cannot share a prompt, or divide a pack, with images or sinks")
        key, value = _select_keys(key, value, key_positions, gathers_keys)
    if s_aux is not None:
        if image_rows is not None:
            raise AttentionRefused(f"{VARLEN} has no attention sinks for queries of images")
        kernel = "flash4" if packs_by_flash4 else "varlen"
        out = attend_with_sinks(query, key, value, s_aux, cu_seq_lens_q, max_length_q, scaling, window, kernel)
    elif packs_by_flash4:
        out = attend_flash4(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        out = _attend_torch_varlen(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scaling, (window, 0)
        )
    if image_rows is not None:
        seen = _attend_image_rows(query, key, value, image_rows, max_length_q, scaling, window)
        out = out.index_copy(0, image_rows.queries, seen.to(out.dtype))
    return out.view(num_samples, length, num_heads, -1)[..., :width], None


def _select_keys(
    key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, gathers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t, g, d) -> (s, g, d), of the pack that all ranks of a group have together where it is divided."""
    if gathers:
        return gather_keys(key, positions), gather_keys(value, positions)
    return key.index_select(0, positions), value.index_select(0, positions)


def _attend_image_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: ImageRows,
    longest: int,
    scaling: float | None,
    window: int,
) -> torch.Tensor:
    """(t, h, d), (t, g, d) -> (image tokens, h, d)"""
    key, value = key[rows.keys], value[rows.keys]  # by an index, whose gradient is summed in a fixed order
    bounds = (rows.cu_queries, rows.cu_keys, longest, longest)
    return _attend_torch_varlen(query[rows.queries], key, value, *bounds, scaling, (window, -1))


def _attend_torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """(t, h, d), (s, g, d) -> (t, h, d). ``window``: keys seen to the left and to the right of a query's own, which
    is the last key for the last query; -1: all.
    """
    extra: dict[str, Any] = {}
    if key.shape[1] != query.shape[1]:
        if TAKES_GROUPS:
            extra["enable_gqa"] = True
        else:  # torch 2.11: every query head brings its own key and value
            repeat = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    out: Any = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=window, **extra)
    return out  # type: ignore[no-any-return]


def _split_rows(x: torch.Tensor, row_length: int) -> torch.Tensor:
    """(b, heads, t, d) -> (b t / l, heads, l, d)"""
    num_samples, num_heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(num_samples * length // row_length, row_length, num_heads, dim).transpose(1, 2)


@_over_heads
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
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    image_rows: ImageRows | None = None,
    key_positions: torch.Tensor | None = None,
    gathers_keys: bool = False,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The same in plain torch, with scores squashed to ``softcap tanh(score / softcap)`` where that is asked, and with
    sinks.

    Works on a block of queries at a time against the keys that the longest document lets them reach, and computes the
    scores again in the backward pass: at most ``MAX_BLOCK_SCORES`` of them are held. Softmax in float32 (float64 for
    float64). Waits for the device where keys are not those of the queries. Raises ``AttentionRefused`` as
    ``attend_varlen`` does.
    """
    _refuse_what_is_missed(BLOCKWISE, module, attention_mask, dropout, max_length_q, cu_seq_lens_q)
    assert cu_seq_lens_q is not None and max_length_q is not None
    num_samples, num_heads, length, dim = query.shape
    total, num_groups = num_samples * length, key.shape[1]
    query = query.transpose(1, 2).reshape(total, num_groups, num_heads // num_groups, dim)
    key, value = (x.transpose(1, 2).reshape(total, num_groups, -1) for x in (key, value))
    positions = torch.arange(total, device=query.device)
    documents = torch.bucketize(positions, cu_seq_lens_q[1:].long(), right=True)  # (b t): which one each position is in
    num_keys, places, documents_of_keys = total, positions, documents  # (b t): the key that is a query's own
    if key_positions is not None:
        assert cu_seq_lens_k is not None and image_rows is None
        key, value = _select_keys(key, value, key_positions, gathers_keys)
        num_keys, order = len(key), torch.arange(len(key), device=key.device)
        places = positions + (cu_seq_lens_k - cu_seq_lens_q)[1:].long()[documents]
        documents_of_keys = torch.bucketize(order, cu_seq_lens_k[1:].long(), right=True)
    reach = min(max_length_q, num_keys, sliding_window or num_keys)  # keys that a query may see, its own among them
    scaling = dim**-0.5 if scaling is None else scaling
    ahead = 0 if image_rows is None else image_rows.longest - 1  # keys after a query that it may see
    size = max(16, min(MAX_BLOCK_SCORES // (num_heads * (2 * reach + ahead)), max(reach, 256)))  # queries of one block
    blocks = [(start, min(start + size, total)) for start in range(0, total, size)]
    own = blocks if key_positions is None else [(int(places[i]), int(places[j - 1]) + 1) for i, j in blocks]
    keys = torch.arange(num_keys, device=query.device)
    outs = []
    for (start, stop), (first, end) in zip(blocks, own, strict=True):
        rows = slice(start, stop)
        seen = slice(max(0, first - reach + 1), min(end + ahead, num_keys))  # up to reach + size + ahead keys
        distance = places[rows, None] - keys[None, seen]
        after = distance < 0
        if image_rows is not None:
            after &= (image_rows.ids[rows, None] != image_rows.ids[None, seen]) | (image_rows.ids[rows, None] < 0)
        hidden = after | (distance >= reach) | (documents[rows, None] != documents_of_keys[None, seen])
        arguments = (query[rows], key[seen], value[seen], hidden, scaling, softcap, s_aux)
        if torch.is_grad_enabled():
            outs.append(checkpoint(_attend_block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_attend_block(*arguments))
    return torch.cat(outs).view(num_samples, length, num_heads, -1), None


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(q, g, h / g, d), (k, g, d), (k, g, d), (q, k) and (h) -> (q, g, h / g, d)"""
    scores = torch.einsum("qgrd,kgd->grqk", query, key) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.to(sum_dtype(scores.dtype)).masked_fill(hidden, -torch.inf)
    if sinks is not None:  # one more key, without a value
        own = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., : len(key)].to(value.dtype)
    return torch.einsum("grqk,kgd->qgrd", weights, value)


def _refuse_what_is_missed(
    name: str,
    module: nn.Module,
    mask: torch.Tensor | None,
    dropout: float,
    max_length: int | None,
    lengths: torch.Tensor | None,
) -> None:
    if lengths is None or max_length is None:
        raise AttentionRefused(
            f"{name} got no cumulative lengths: {type(module).__name__} does not pass keyword arguments on"
        )
    if dropout or mask is not None:
        raise AttentionRefused(f"{name} has neither attention dropout nor masks (dropout={dropout})")
