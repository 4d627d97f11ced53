"""The lengths of rows, as a histogram and in words. Pure numpy."""

from __future__ import annotations

import numpy as np

from manyhands.preview.types import Bin

MAX_BINS = 14
BINS_PER_DOUBLING = (4, 2, 1)  # the finest that gives few enough bins


def bin_lengths(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Rows by length, in bins whose borders grow by a constant factor: a doubling, or a half or quarter of one.

    ``lengths (rows)`` are tokens. Bins between the shortest and the longest row are there even where they are empty.
    """
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    for per_doubling in BINS_PER_DOUBLING:
        first = int(np.floor(np.log2(shortest) * per_doubling))
        last = int(np.floor(np.log2(longest) * per_doubling)) + 1
        if last - first <= MAX_BINS:
            break
    borders = np.unique(np.ceil(2.0 ** (np.arange(first, last + 1) / per_doubling)).astype(np.int64))
    place = np.searchsorted(borders, lengths, side="right") - 1
    num_bins = int(place.max()) + 1
    rows = np.bincount(place, minlength=num_bins)
    tokens = np.bincount(place, weights=lengths, minlength=num_bins)
    return tuple(
        Bin(int(borders[i]), int(borders[i + 1]) - 1, int(rows[i]), int(tokens[i]))
        for i in range(int(place.min()), num_bins)
    )


def describe_lengths(lengths: np.ndarray) -> str:
    """Shortest, median, longest and the length that 90 % of the rows do not pass."""
    if not len(lengths):
        return "no rows"
    low, median, high, top = (int(value) for value in np.quantile(lengths, (0.0, 0.5, 0.9, 1.0)))
    return f"shortest {low:,}, median {median:,}, nine in ten up to {high:,}, longest {top:,} tokens"
