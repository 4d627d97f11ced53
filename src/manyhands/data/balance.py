"""Items of some sizes into bins of equal capacity, as evenly as can be. Pure: knows neither rows, ranks nor steps.

Longest first into the bin with most room, towards a target that is a whole number of tiles; then moves and swaps mend
the bins that stand over theirs, since a bin is padded to whole tiles and a token too many costs a tile.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

MAX_REPAIRS = 4  # swaps tried for each bin, at most
MAX_TRIES = 4  # numbers of tiles tried


def fill_evenly(sizes: Sequence[int], num_groups: int, group: int, capacity: int, tile: int) -> np.ndarray | None:
    """Bin of each item, int64; None where an item finds no room. ``sizes`` descend; ``num_groups`` groups of ``group``
    bins.

    The tiles that all items need are dealt evenly to the groups, and every bin of a group has the same target. Where
    the targets cannot be held, one tile more is dealt, until no more tiles are paid for than were dealt.
    """
    fewest = max(-(-sum(sizes) // (group * tile)), -(-least_load(sizes, group) // tile))
    best, best_tiles = None, 0
    for num_tiles in range(fewest, fewest + MAX_TRIES):
        group_tiles = [num_tiles // num_groups + (number < num_tiles % num_groups) for number in range(num_groups)]
        bins = _fill(sizes, [min(capacity, tile * tiles) for tiles in group_tiles for _ in range(group)], capacity)
        if bins is None:
            continue
        loads = np.bincount(bins, weights=sizes, minlength=num_groups * group).astype(np.int64)
        paid = int(np.sort(-(-loads // tile))[group - 1 :: group].sum())
        if best is None or paid < best_tiles:
            best, best_tiles = bins, paid
        if best_tiles <= num_tiles + 1:
            break
    return best


def least_load(sizes: Sequence[int], num_bins: int) -> int:
    """A load that one of ``num_bins`` bins has to carry: of the ``k num_bins + 1`` longest items k + 1 share a bin."""
    return max(sum(sizes[k * num_bins - k : k * num_bins + 1]) for k in range(-(-len(sizes) // num_bins)))


def _fill(sizes: Sequence[int], targets: list[int], capacity: int) -> np.ndarray | None:
    """Each item into the bin that is farthest below its target; then repairs."""
    heap = [(-target, number) for number, target in enumerate(targets)]
    heapq.heapify(heap)
    limits = [target - capacity for target in targets]  # room below which the capacity is passed
    placed = []
    for size in sizes:
        room, number = heap[0]
        if -room - size < limits[number]:
            return None
        heapq.heapreplace(heap, (room + size, number))
        placed.append(number)
    bins = np.array(placed, dtype=np.int64)
    if any(room > 0 for room, _ in heap):
        _repair(np.asarray(sizes, dtype=np.int64), bins, np.array(targets))
    return bins


def fill_fullest(sizes: Sequence[int], num_bins: int, capacity: int) -> np.ndarray | None:
    """Bin of each item (longest first), always the fullest with room (best fit decreasing); None where one finds
    none.
    """
    rooms = [(capacity, number) for number in range(num_bins)]
    placed = []
    for size in sizes:
        index = bisect_left(rooms, (size, -1))
        if index == num_bins:
            return None
        room, number = rooms.pop(index)
        insort(rooms, (room - size, number))
        placed.append(number)
    return np.array(placed, dtype=np.int64)


def _repair(sizes: np.ndarray, bins: np.ndarray, targets: np.ndarray) -> None:
    """Moves items out of bins over their target, or swaps them for shorter ones, in place; no other bin comes over its
    own.
    """
    rooms = targets - np.bincount(bins, weights=sizes, minlength=len(targets)).astype(np.int64)
    for _ in range(MAX_REPAIRS * len(targets)):
        over = int(rooms.argmin())
        if rooms[over] >= 0:
            return
        change = _find_change(sizes, bins, rooms, over)
        if change is None:
            return
        item, other, to = change
        shift = int(sizes[item]) - (int(sizes[other]) if other is not None else 0)
        bins[item] = to
        if other is not None:
            bins[other] = over
        rooms[over] += shift
        rooms[to] -= shift


def _find_change(
    sizes: np.ndarray, bins: np.ndarray, rooms: np.ndarray, over: int
) -> tuple[int, int | None, int] | None:
    """(item of ``over``, item to take for it or None, bin of that), which takes most of the excess; None where nothing
    does.
    """
    excess = -int(rooms[over])
    mine = np.flatnonzero(bins == over)
    others = np.flatnonzero(rooms[bins] > 0)
    best: tuple[int, int, int | None, int] | None = None
    if len(others):
        shifts = sizes[mine][:, None] - sizes[others][None, :]  # tokens that a swap would carry over
        useful = np.where((shifts > 0) & (shifts <= rooms[bins[others]]), np.minimum(shifts, excess), 0)
        index = int(useful.argmax())
        row, column = divmod(index, len(others))
        if useful[row, column] > 0:
            best = int(useful[row, column]), int(mine[row]), int(others[column]), int(bins[others[column]])
    roomiest = int(rooms.argmax())
    movable = mine[sizes[mine] <= rooms[roomiest]]
    if len(movable):
        item = int(movable[sizes[movable].argmax()])
        gain = min(int(sizes[item]), excess)
        if best is None or gain > best[0]:
            best = gain, item, None, roomiest
    return best[1:] if best else None
