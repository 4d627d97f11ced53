"""The part of a pack that one of several context-parallel ranks computes. Pure numpy.

A pack of T tokens is cut into ``2 W`` chunks of one length, of which rank r of W has chunks r and ``2 W - 1 - r``, end
to end: under causal attention every rank then has as many (query, key) pairs of a document as long as the pack.
Positions, labels and lengths were made for the whole pack before, so a document may be cut anywhere. In attention
(``kernels/attention/context.py``) ranks exchange heads for tokens, and each sees the whole pack; or queries are a
rank's own tokens and keys are gathered from all ranks: of a chunk they are one stretch of the pack, from the beginning
of the document that the chunk begins in to the chunk's end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

KEY_POSITIONS, KEY_BOUNDS = "key_positions", "cu_seq_lens_k"
# In a batch that is one rank's part: True, ``key_positions`` are those of the whole pack; or the number of ranks, which
# exchange heads, and bounds of documents are those of the whole pack.
GATHERS_KEYS, EXCHANGES_HEADS = "gathers_keys", "exchanges_heads"
# For short convolutions: HALO tokens in front of each of a rank's chunks; which of all chunks' last tokens these are,
# and the bounds of documents with them.
HALO, HALO_PLACES, HALO_BOUNDS = 4, "halo_places", "halo_bounds"


def chunks_of(total: int, rank: int, degree: int) -> tuple[slice, slice]:
    """The stretches of a pack of ``total`` tokens that a rank has. ValueError where chunks have no common length."""
    size, rest = divmod(total, 2 * degree)
    if rest:
        raise ValueError(f"a pack of {total} tokens is not divided by {2 * degree} chunks")
    return tuple(slice(size * number, size * (number + 1)) for number in (rank, 2 * degree - 1 - rank))  # type: ignore[return-value]


def add_halos(bounds: Sequence[int], rank: int, degree: int) -> dict[str, Any]:
    """The entries about halos of a rank's part of a pack whose documents have ``bounds``: ``halo_places`` (2 HALO)
    among the last HALO tokens of all chunks, and ``halo_bounds`` int32 in its two chunks, each behind its halo. What is
    before the pack is a document of its own.
    """
    places, ends = [], [0]
    for chunk in chunks_of(bounds[-1], rank, degree):
        begin, number = chunk.start - HALO, chunk.start // (chunk.stop - chunk.start)
        cuts = [*sorted({bound for bound in bounds if begin < bound < chunk.stop}), chunk.stop]
        ends += [ends[-1] + cut - begin for cut in cuts]
        places.append(np.arange(HALO, dtype=np.int64) + HALO * max(0, number - 1))
    return {HALO_PLACES: np.concatenate(places), HALO_BOUNDS: np.array(ends, dtype=np.int32)}


def divide_pack(batch: dict[str, Any], rank: int, degree: int, *, exchanges_heads: bool = False) -> dict[str, Any]:
    """``rank``'s part of a packed batch, of the same form: its tokens, with the bounds of the whole pack where ranks
    exchange heads; else those of its keys, ``key_positions`` (keys) in the whole pack, with ``cu_seq_lens_k`` (segments
    + 1), of which each of the segments of ``cu_seq_lens`` sees its last ones. A document that is cut has a segment in
    each part.
    """
    total, bounds = batch["input_ids"].shape[1], batch["cu_seq_lens"].tolist()
    chunks = chunks_of(total, rank, degree)
    parts = {
        name: np.concatenate([value[:, chunk] for chunk in chunks], axis=1)
        for name, value in batch.items()
        if isinstance(value, np.ndarray) and value.shape[:2] == (1, total)
    }
    if exchanges_heads:
        return {**batch, **parts, EXCHANGES_HEADS: degree}
    queries, keys, positions = [0], [0], []
    for chunk in chunks:
        cuts = [chunk.start, *sorted({bound for bound in bounds if chunk.start < bound < chunk.stop}), chunk.stop]
        first = max(bound for bound in bounds if bound <= chunk.start)  # where its first document begins
        queries += [queries[-1] + cut - chunk.start for cut in cuts[1:]]
        keys += [keys[-1] + cut - first for cut in cuts[1:]]
        positions.append(np.arange(first, chunk.stop, dtype=np.int64))
    repeats = max(0, len(bounds) - len(queries))  # as many as before, where compiled code counts on a number
    rest = {name: value for name, value in batch.items() if name not in parts and name != "row_length"}
    return {
        **rest,
        **parts,
        "cu_seq_lens": np.array(queries + queries[-1:] * repeats, dtype=np.int32),
        KEY_BOUNDS: np.array(keys + keys[-1:] * repeats, dtype=np.int32),
        KEY_POSITIONS: np.concatenate(positions),
        GATHERS_KEYS: True,
    }
