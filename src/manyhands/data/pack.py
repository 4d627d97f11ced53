"""How a step is carried out: its rows laid into ranks and micro-batches. Pure numpy; knows no tokens, files or model.

Never across steps: the layout changes where a row is computed, not which rows form the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from manyhands.core.errors import UserError
from manyhands.data.balance import fill_evenly, fill_fullest

TILE_TOKENS = 128  # matrix products work in tiles of so many tokens: packs are padded to whole ones
# A row of length n costs n + n^2 / ATTENTION_LENGTH: attention costs as much as all linear layers together at some
# 12 x hidden_size tokens (24 h^2 against 2 n h FLOPs a token and layer, causal), 16k to 49k for 1B to 8B models.
ATTENTION_LENGTH = 24576


@dataclass(frozen=True)
class Layout:
    """``micro_batches[micro][rank]`` are row ids, int64, possibly none. Every rank has the same number of
    micro-batches.
    """

    micro_batches: tuple[tuple[np.ndarray, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def of_rank(self, rank: int) -> tuple[np.ndarray, ...]:
        """The micro-batches of one rank, in order."""
        return tuple(micro[rank] for micro in self.micro_batches)

    def rows_of_rank(self, rank: int) -> np.ndarray:
        """All row ids of one rank in this step."""
        return np.concatenate(self.of_rank(rank))


def padded_tokens(num_tokens: int, tile: int = TILE_TOKENS) -> int:
    """Tokens of a pack once it is padded: whole tiles, at least one."""
    return max(1, -(-num_tokens // tile)) * tile


def packing_efficiency(
    layouts: Iterable[Layout], lengths: np.ndarray, tile: int = TILE_TOKENS, tokens: int | None = None
) -> float:
    """Useful tokens over ``ranks x the longest padded pack of any rank``, summed over all micro-batches; in (0, 1].

    Packs are padded to whole tiles, or to ``tokens``. What is missing to 1 is padding and ranks that wait for the
    longest pack.
    """
    useful = paid = 0
    for layout in layouts:
        for micro in layout.micro_batches:
            sizes = [int(lengths[part].sum()) for part in micro]
            useful += sum(sizes)
            paid += len(micro) * (tokens or padded_tokens(max(sizes), tile))
    return useful / paid


def lay_out_packed(rows: np.ndarray, lengths: np.ndarray, num_ranks: int, micro_tokens: int) -> Layout:
    """Lays rows into the fewest micro-batches of at most ``micro_tokens`` tokens that can be found, balanced over
    ranks.

    ``lengths`` holds the tokens of every row of the set, indexed by row id. Packs get equal sizes (data/balance.py);
    where that leaves a row without room, each row goes into the fullest pack that has some; where that fails too, there
    is one micro-batch more. Packs of like size and cost (``n + n^2 / ATTENTION_LENGTH`` over rows) share a micro-batch,
    because its ranks wait for the dearest, and the dearer of them goes to the rank that has done least.
    Raises UserError for a row longer than ``micro_tokens``.
    """
    rows = np.asarray(rows, dtype=np.int64)
    row_lengths = np.asarray(lengths)[rows].astype(np.int64)
    if len(rows) == 0:
        raise ValueError("a step needs at least one row")
    if row_lengths[longest := int(row_lengths.argmax())] > micro_tokens:
        raise UserError(
            f"row {rows[longest]} has {row_lengths[longest]:,} tokens and does not fit into a micro-batch of {micro_tokens:,}",
            where="batch.micro_tokens",
            fix="raise batch.micro_tokens, or lower data.max_length",
        )
    descending = np.argsort(-row_lengths, kind="stable")
    sizes = row_lengths[descending].tolist()
    num_micro = max(1, -(-int(row_lengths.sum()) // (micro_tokens * num_ranks)))
    while True:
        bins = fill_evenly(sizes, num_micro, num_ranks, micro_tokens, TILE_TOKENS)
        bins = fill_fullest(sizes, num_micro * num_ranks, micro_tokens) if bins is None else bins
        if bins is not None:
            bin_of_row = np.empty(len(rows), dtype=np.int64)
            bin_of_row[descending] = bins
            return _deal(rows, row_lengths, bin_of_row, num_micro, num_ranks)
        num_micro += 1


def _deal(rows: np.ndarray, row_lengths: np.ndarray, bin_of_row: np.ndarray, num_micro: int, num_ranks: int) -> Layout:
    num_bins = num_micro * num_ranks
    costs = np.bincount(
        bin_of_row, weights=row_lengths + row_lengths.astype(np.float64) ** 2 / ATTENTION_LENGTH, minlength=num_bins
    )
    tiles = -(-np.bincount(bin_of_row, weights=row_lengths, minlength=num_bins).astype(np.int64) // TILE_TOKENS)
    by_bin = np.argsort(bin_of_row, kind="stable")  # keeps the seeded order inside a pack
    bounds = np.searchsorted(bin_of_row[by_bin], np.arange(num_bins + 1))
    dearest_first = np.lexsort((-costs, -tiles)).reshape(num_micro, num_ranks)
    done = np.zeros(num_ranks)
    micro_batches = []
    for group in dearest_first:
        micro: list[np.ndarray] = [rows[:0]] * num_ranks
        for rank, number in zip(
            np.argsort(done, kind="stable"), group[np.argsort(-costs[group], kind="stable")], strict=True
        ):
            micro[rank] = rows[by_bin[bounds[number] : bounds[number + 1]]]
            done[rank] += costs[number]
        if any(len(part) for part in micro):
            micro_batches.append(tuple(micro))
    return Layout(tuple(micro_batches))


def lay_out_rows(rows: np.ndarray, num_ranks: int, micro_samples: int, accumulation: int | None = None) -> Layout:
    """Deals rows in their order into micro-batches of ``micro_samples`` a rank, rank by rank, then the next
    micro-batch.

    A short step leaves the last slots empty; micro-batches in which no rank has a row are left out.
    Without ``accumulation`` there are as many
    as it takes; with it, more rows than ``micro_samples x num_ranks x accumulation`` are a ValueError.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) == 0:
        raise ValueError("a step needs at least one row")
    if accumulation is not None and len(rows) > micro_samples * num_ranks * accumulation:
        raise ValueError(
            f"{len(rows)} rows do not fit into {micro_samples} rows x {num_ranks} ranks x {accumulation} micro-batches"
        )
    width = micro_samples * num_ranks
    return Layout(
        tuple(
            tuple(rows[start + rank * micro_samples : start + (rank + 1) * micro_samples] for rank in range(num_ranks))
            for start in range(0, len(rows), width)
        )
    )
