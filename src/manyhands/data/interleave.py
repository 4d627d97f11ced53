"""Mixes several sources into one sequence so that every beginning of it holds each source's share. Knows numbers only.

The j-th place of a source that has c of N places may begin at floor((j - 1) N / c) and must be over at ceil(j N / c):
within these windows the source is ahead of its share, or behind it, by less than one place. Taking the window that
closes first meets all of them (Baruah, Cohen, Plaxton, Varvel: Proportionate progress, 1996; one processor, load 1).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import gcd

import numpy as np

CHUNK = 1 << 16  # windows that are Python numbers at one time


def interleave(counts: Sequence[int]) -> np.ndarray:
    """Which source each of ``sum(counts)`` places belongs to, int16. A million places take about two seconds."""
    common = gcd(*counts) or 1
    small = [count // common for count in counts]  # the same pattern again and again keeps every share as well
    return np.tile(_fill(small), common)


def _fill(counts: Sequence[int]) -> np.ndarray:
    total, num_sources = sum(counts), len(counts)
    places = np.empty(total, dtype=np.int16)
    opens = np.concatenate([np.arange(count, dtype=np.int64) * total // max(count, 1) for count in counts])
    closes = np.concatenate([-(-np.arange(1, count + 1, dtype=np.int64) * total // max(count, 1)) for count in counts])
    windows = closes * num_sources + np.repeat(np.arange(num_sources), counts)  # ordered by their end, then by source
    by_opening = np.argsort(opens, kind="stable")
    heap: list[int] = []
    place = 0
    for start in range(0, total, CHUNK):
        chunk = by_opening[start : start + CHUNK]
        for opening, window in zip(opens[chunk].tolist(), windows[chunk].tolist(), strict=True):
            while place < opening:  # every window that is open by now is in the heap
                places[place] = heapq.heappop(heap) % num_sources
                place += 1
            heapq.heappush(heap, window)
    while heap:
        places[place] = heapq.heappop(heap) % num_sources
        place += 1
    return places
