"""How a step is carried out: its samples laid into ranks and micro-batches. Pure numpy; knows no files and no model.

Never across steps: the layout changes where a sample is computed, not which samples form the step. Packs are filled as
evenly as can be: longest first into the one with most room, towards a target that is a whole number of tiles; then
moves and swaps bring down the ones above theirs, since a pack is padded to whole tiles and a token too many costs one.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.core.errors import UserError

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


def fill_by_cost(sizes: Sequence[int], costs: Sequence[float], num_bins: int, capacity: int) -> np.ndarray | None:
    """Bin of each item, int64: the dearest item first, always into the cheapest bin with room; None where one finds
    none. For items whose cost is not their size alone: images of few tokens may take long.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    heap = [(0.0, number) for number in range(num_bins)]
    rooms = [capacity] * num_bins
    for item in np.argsort(-np.asarray(costs), kind="stable").tolist():
        full = []
        while heap and rooms[heap[0][1]] < sizes[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number = heap[0]
        heapq.heapreplace(heap, (cost + costs[item], number))
        rooms[number] -= sizes[item]
        bins[item] = number
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


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
    """Bin of each item (longest first), the fullest with room (best fit decreasing); None where an item finds none."""
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


def fill_in_order(sizes: Sequence[int], num_bins: int, capacity: int) -> np.ndarray | None:
    """Bin of each item, int64, each bin a stretch of the items; None where these are too many. No cut into stretches of
    at most ``capacity`` takes fewer bins: the packs of ``batch.packs``, which come one after the other, always fit.
    """
    placed, number, load = [], 0, 0
    for size in sizes:
        if load + size > capacity:
            number, load = number + 1, 0
        load += size
        placed.append(number)
    return np.array(placed, dtype=np.int64) if number < num_bins else None


def _repair(sizes: np.ndarray, bins: np.ndarray, targets: np.ndarray) -> None:
    """Moves or swaps items out of bins over their target, in place; no other bin exceeds its own."""
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
    """(item of ``over``, item to swap for it or None, bin of that) that removes most excess, or None."""
    excess = -int(rooms[over])
    mine = np.flatnonzero(bins == over)
    others = np.flatnonzero(rooms[bins] > 0)
    best: tuple[int, int, int | None, int] | None = None
    if len(others):
        shifts = sizes[mine][:, None] - sizes[others][None, :]  # tokens that a swap would carry over
        useful = np.where((shifts > 0) & (shifts <= rooms[bins[others]]), np.minimum(shifts, excess), 0)
        index = int(useful.argmax())
        taken, given = divmod(index, len(others))
        if useful[taken, given] > 0:
            best = int(useful[taken, given]), int(mine[taken]), int(others[given]), int(bins[others[given]])
    roomiest = int(rooms.argmax())
    movable = mine[sizes[mine] <= rooms[roomiest]]
    if len(movable):
        item = int(movable[sizes[movable].argmax()])
        gain = min(int(sizes[item]), excess)
        if best is None or gain > best[0]:
            best = gain, item, None, roomiest
    return best[1:] if best else None


TILE_TOKENS = 128  # matrix products work in tiles of so many tokens: packs are padded to whole ones
# A sample of length n costs n + n^2 / ATTENTION_LENGTH: attention costs as much as all linear layers together at some
# 12 x hidden_size tokens (24 h^2 against 2 n h FLOPs a token and layer, causal), 16k to 49k for 1B to 8B models.
ATTENTION_LENGTH = 24576


@dataclass(frozen=True)
class StepLayout:
    """``micro_batches[micro][rank]`` are sample ids, int64, possibly none. Every rank has the same number of
    micro-batches.

    ``has_images``: whether one of the samples has an image; None in a run without images.
    """

    micro_batches: tuple[tuple[np.ndarray, ...], ...]
    has_images: bool | None = None

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def of_rank(self, rank: int) -> tuple[np.ndarray, ...]:
        """The micro-batches of one rank, in order."""
        return tuple(micro[rank] for micro in self.micro_batches)

    def samples_of_rank(self, rank: int) -> np.ndarray:
        """All sample ids of one rank in this step."""
        return np.concatenate(self.of_rank(rank))


def padded_tokens(num_tokens: int, tile: int = TILE_TOKENS) -> int:
    """Tokens of a pack once it is padded: whole tiles, at least one."""
    return max(1, -(-num_tokens // tile)) * tile


def packing_efficiency(
    layouts: Iterable[StepLayout], lengths: np.ndarray, tile: int = TILE_TOKENS, tokens: int | None = None
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


def lay_out_packed(
    samples: np.ndarray, lengths: np.ndarray, num_ranks: int, micro_tokens: int, more: np.ndarray | None = None
) -> StepLayout:
    """Lays samples into the fewest micro-batches of at most ``micro_tokens`` tokens that can be found, balanced over
    ranks.

    ``lengths`` holds the tokens of every sample of the set, indexed by sample id. Packs get equal sizes
    (``fill_evenly``); where that leaves a sample without room, each sample goes into the fullest pack that has some
    (``fill_fullest``), or they are cut in their own order (``fill_in_order``); where all fail, there is one micro-batch
    more. Packs of like size and cost
    (``n + n^2 / ATTENTION_LENGTH`` over samples) share a micro-batch, because its ranks wait for the dearest, and the
    dearer of them goes to the rank that has done least. Raises UserError for a sample longer than ``micro_tokens``.

    ``more``: what a sample costs beside its tokens, in tokens, by sample id: its images. Where some of the samples have
    any, packs of equal cost are tried first (``fill_by_cost``); None, or none of them: as above.
    """
    samples = np.asarray(samples, dtype=np.int64)
    sample_lengths = np.asarray(lengths)[samples].astype(np.int64)
    if len(samples) == 0:
        raise ValueError("a step needs at least one sample")
    if sample_lengths[longest := int(sample_lengths.argmax())] > micro_tokens:
        raise UserError(
            f"sample {samples[longest]} has {sample_lengths[longest]:,} tokens and does not fit into a "
            f"micro-batch of {micro_tokens:,}",
            where="batch.micro_tokens",
            fix="raise batch.micro_tokens, or lower data.max_length",
        )
    extra = None if more is None else np.asarray(more, dtype=np.float64)[samples]
    extra = None if extra is None or not extra.any() else extra
    costs = sample_lengths + sample_lengths.astype(np.float64) ** 2 / ATTENTION_LENGTH
    costs = costs if extra is None else costs + extra
    descending = np.argsort(-sample_lengths, kind="stable")
    sizes = sample_lengths[descending].tolist()
    num_micro = max(1, -(-int(sample_lengths.sum()) // (micro_tokens * num_ranks)))
    while True:
        if extra is not None:
            even = fill_by_cost(sample_lengths.tolist(), costs.tolist(), num_micro * num_ranks, micro_tokens)
            if even is not None:
                return _deal(samples, sample_lengths, costs, even, num_micro, num_ranks)
        bins = fill_evenly(sizes, num_micro, num_ranks, micro_tokens, TILE_TOKENS)
        bins = fill_fullest(sizes, num_micro * num_ranks, micro_tokens) if bins is None else bins
        bin_of_sample = np.empty(len(samples), dtype=np.int64)
        if bins is not None:
            bin_of_sample[descending] = bins
        elif (found := fill_in_order(sample_lengths.tolist(), num_micro * num_ranks, micro_tokens)) is not None:
            bin_of_sample = found
        if bins is not None or found is not None:
            return _deal(samples, sample_lengths, costs, bin_of_sample, num_micro, num_ranks)
        num_micro += 1


def _deal(
    samples: np.ndarray,
    sample_lengths: np.ndarray,
    sample_costs: np.ndarray,
    bin_of_sample: np.ndarray,
    num_micro: int,
    num_ranks: int,
) -> StepLayout:
    num_bins = num_micro * num_ranks
    costs = np.bincount(bin_of_sample, weights=sample_costs, minlength=num_bins)
    tiles = -(-np.bincount(bin_of_sample, weights=sample_lengths, minlength=num_bins).astype(np.int64) // TILE_TOKENS)
    by_bin = np.argsort(bin_of_sample, kind="stable")  # keeps the seeded order inside a pack
    bounds = np.searchsorted(bin_of_sample[by_bin], np.arange(num_bins + 1))
    dearest_first = np.lexsort((-costs, -tiles)).reshape(num_micro, num_ranks)
    done = np.zeros(num_ranks)
    micro_batches = []
    for group in dearest_first:
        micro: list[np.ndarray] = [samples[:0]] * num_ranks
        for rank, number in zip(
            np.argsort(done, kind="stable"), group[np.argsort(-costs[group], kind="stable")], strict=True
        ):
            micro[rank] = samples[by_bin[bounds[number] : bounds[number + 1]]]
            done[rank] += costs[number]
        if any(len(part) for part in micro):
            micro_batches.append(tuple(micro))
    return StepLayout(tuple(micro_batches))


def lay_out_unpacked(
    samples: np.ndarray, num_ranks: int, micro_samples: int, accumulation: int | None = None
) -> StepLayout:
    """Deals samples in their order into micro-batches of ``micro_samples`` a rank, rank by rank, then the next
    micro-batch.

    A short step leaves the last slots empty; micro-batches in which no rank has a sample are left out. Without
    ``accumulation`` there are as many as it takes; with it, more samples than
    ``micro_samples x num_ranks x accumulation`` are a ValueError.
    """
    samples = np.asarray(samples, dtype=np.int64)
    if len(samples) == 0:
        raise ValueError("a step needs at least one sample")
    if accumulation is not None and len(samples) > micro_samples * num_ranks * accumulation:
        raise ValueError(
            f"{len(samples)} samples do not fit into {micro_samples} samples x {num_ranks} ranks x "
            f"{accumulation} micro-batches"
        )
    width = micro_samples * num_ranks
    return StepLayout(
        tuple(
            tuple(
                samples[start + rank * micro_samples : start + (rank + 1) * micro_samples] for rank in range(num_ranks)
            )
            for start in range(0, len(samples), width)
        )
    )
