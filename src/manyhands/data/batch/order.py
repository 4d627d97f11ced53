"""Which samples form a step: a function of (seed, epoch, step) alone. Pure numpy; nothing is stored, no rank is
known."""

import heapq
import math
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd

import numpy as np

CHUNK = 1 << 16  # windows that are Python numbers at one time


def interleave(counts: Sequence[int]) -> np.ndarray:
    """Which source each of ``sum(counts)`` places belongs to, int16, so that every beginning holds each source's share.
    A million places take about two seconds.

    The j-th place of a source that has c of N places may begin at floor((j - 1) N / c) and must be over at
    ceil(j N / c): within these windows the source is ahead of its share, or behind it, by less than one place. Taking
    the window that closes first meets all of them (Baruah, Cohen, Plaxton, Varvel: Proportionate progress, 1996; one
    processor, load 1).
    """
    common = gcd(*counts) or 1
    small = [count // common for count in counts]  # the same pattern again and again keeps every share as well
    return np.tile(_fill_places(small), common)


def _fill_places(counts: Sequence[int]) -> np.ndarray:
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


# Streams of one seed that are not epochs.
HELD_OUT_STREAM = 2**64 - 1
EVALUATION_STREAM = 2**64 - 2
PASS_BITS = 40  # stream = source << 40 | pass: the passes over source 0 are the epochs of a run with one source


def permute(num_samples: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of ``range(num_samples)``, int64, keyed by (seed, stream).

    Sorts the raw output of Philox 4x64: numpy promises that the bit stream stays the same between its versions, which
    it does not promise for ``Generator.permutation``.
    """
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), stream], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


class SampleOrder:
    """The samples of every step of a run, steps never crossing epochs.

    Without ``sources`` each sample comes exactly once an epoch. With ``sources`` (of each sample, counted from 0) and
    ``weights`` (of each source), a source of n samples appears ``weight * n`` times an epoch, rounded so that the sum
    over epochs is right to half a sample. It goes through its samples in passes, each a permutation of its own, and an
    epoch begins where the one before left off: no sample comes twice more than another. Every beginning of an epoch
    holds each source's share within one sample. ``as_given``: every pass keeps the order of the samples, and
    sources come one after another.

    A step is ``batch_samples`` samples, or as many samples as it takes to reach ``batch_loss_tokens`` loss tokens (the
    sample that reaches it is the last; ``num_loss_tokens`` gives those of each sample), or the samples of
    ``batch_packs`` packs of at most ``pack_tokens`` tokens, laid from the epoch's order by ``lay_packs``; ``lengths``
    gives the tokens of each sample. The last step of an epoch may be short.

    Threads may share an order: batches are laid out ahead of the step that is trained.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        batch_samples: int | None = None,
        batch_loss_tokens: int | None = None,
        num_loss_tokens: np.ndarray | None = None,
        sources: np.ndarray | None = None,
        weights: Sequence[float] | None = None,
        *,
        batch_packs: int | None = None,
        pack_tokens: int | None = None,
        lengths: np.ndarray | None = None,
        as_given: bool = False,
    ) -> None:
        if num_samples < 1:
            raise ValueError("an order needs at least one sample")
        sizes = [size for size in (batch_samples, batch_loss_tokens, batch_packs) if size is not None]
        if len(sizes) != 1:
            raise ValueError("give one of batch_samples, batch_loss_tokens and batch_packs")
        if sizes[0] < 1:
            raise ValueError("a step needs at least one sample, token or pack")
        if batch_loss_tokens is not None and (num_loss_tokens is None or len(num_loss_tokens) != num_samples):
            raise ValueError("batch_loss_tokens needs num_loss_tokens, one for each sample")
        if batch_packs is not None and (pack_tokens is None or lengths is None or len(lengths) != num_samples):
            raise ValueError("batch_packs needs pack_tokens, and lengths, one for each sample")
        self.num_samples, self.seed = num_samples, seed
        self.batch_samples, self.batch_loss_tokens = batch_samples, batch_loss_tokens
        self.batch_packs, self.pack_tokens, self.as_given = batch_packs, pack_tokens, as_given
        self._num_loss_tokens, self._lengths = num_loss_tokens, lengths
        self._samples_of_source, self._shares = _divide(num_samples, sources, weights)
        self._pattern: tuple[tuple[int, ...], np.ndarray] = (
            (),
            np.empty(0),
        )  # counts, and which source each place belongs to
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the two epochs used last
        self._first_steps = [0]  # of every epoch whose length is known, over the whole run
        self._lock = threading.RLock()

    def samples_in_epoch(self, epoch: int) -> int:
        """Samples of one epoch, repeats counted; epochs differ where weight times samples is no whole number."""
        return sum(end - start for start, end in self._stretches(epoch))

    def steps_per_epoch(self, epoch: int) -> int:
        """Steps of one epoch; may vary by a few with ``batch_loss_tokens``, ``batch_packs`` or fractional weights."""
        if self.batch_samples is not None:
            return -(-self.samples_in_epoch(epoch) // self.batch_samples)
        return len(self._lay_out(epoch)[1]) - 1

    def samples_of_epoch(self, epoch: int) -> np.ndarray:
        """Sample ids of a whole epoch, int64, in seeded order."""
        return self._order_epoch(epoch) if self.batch_packs is not None else self._lay_out(epoch)[0]

    def samples(self, epoch: int, index: int) -> np.ndarray:
        """Sample ids of step ``index`` of an epoch, int64, in seeded order; with ``batch_packs`` pack by pack."""
        permutation, bounds = self._lay_out(epoch)
        if not 0 <= index < len(bounds) - 1:
            raise IndexError(f"epoch {epoch} has {len(bounds) - 1} steps, not {index + 1}")
        return permutation[bounds[index] : bounds[index + 1]]

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, index in it) of a step counted from 0 over the whole run."""
        if step < 0:
            raise IndexError("steps count from 0")
        if self.batch_samples is not None and all(share.denominator == 1 for share in self._shares):
            return divmod(step, self.steps_per_epoch(0))
        with self._lock:
            while self._first_steps[-1] <= step:
                self._first_steps.append(self._first_steps[-1] + self.steps_per_epoch(len(self._first_steps) - 1))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def ends_part(self, step: int, num_parts: int) -> bool:
        """Whether a step, from 0, ends one of ``num_parts`` equal parts of its epoch (each step, if it has fewer)."""
        epoch, index = self.locate(step)
        if epoch + 1 < len(self._first_steps):  # as ``locate`` has counted them
            num_steps = self._first_steps[epoch + 1] - self._first_steps[epoch]
        else:
            num_steps = self.steps_per_epoch(epoch)
        return (index + 1) * num_parts // num_steps > index * num_parts // num_steps

    def _stretches(self, epoch: int) -> list[tuple[int, int]]:
        """(start, end) of an epoch in the endless passes over each source."""
        return [stretch_of(share, epoch) for share in self._shares]

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, bounds): step i holds ``order[bounds[i]:bounds[i + 1]]``."""
        with self._lock:
            if epoch not in self._epochs:
                order = self._order_epoch(epoch)
                if self.batch_samples is not None:
                    bounds = np.append(np.arange(0, len(order), self.batch_samples), len(order))
                elif self.batch_packs is not None:
                    assert self.pack_tokens is not None and self._lengths is not None
                    taken, packs = lay_packs(
                        self._lengths[order], self.pack_tokens, 1 if self.as_given else MAX_OPEN_PACKS
                    )
                    order, bounds = order[taken], bound_by_packs(packs, self.batch_packs)
                else:
                    assert self.batch_loss_tokens is not None and self._num_loss_tokens is not None
                    bounds = bound_by_tokens(self._num_loss_tokens[order], self.batch_loss_tokens)
                while len(self._epochs) >= 2:
                    self._epochs.pop(next(iter(self._epochs)))
                self._epochs[epoch] = (order, bounds)
            return self._epochs[epoch]

    def _order_epoch(self, epoch: int) -> np.ndarray:
        drawn = [self._draw(source, *stretch) for source, stretch in enumerate(self._stretches(epoch))]
        if self.as_given:
            return np.concatenate(drawn)
        if len(present := [samples for samples in drawn if len(samples)]) == 1:
            return present[0]
        counts = tuple(map(len, drawn))
        if self._pattern[0] != counts:
            self._pattern = (counts, interleave(counts))
        order = np.empty(sum(counts), dtype=np.int64)
        for source, samples in enumerate(drawn):
            order[self._pattern[1] == source] = samples
        return order

    def _draw(self, source: int, start: int, end: int) -> np.ndarray:
        """Places ``start`` to ``end`` in the endless passes over a source, as sample ids."""
        samples = self._samples_of_source[source]
        if start == end:
            return samples[:0]
        first = start // len(samples)
        passes = [
            np.arange(len(samples)) if self.as_given else permute(len(samples), self.seed, source << PASS_BITS | number)
            for number in range(first, -(-end // len(samples)))
        ]
        return samples[np.concatenate(passes)[start - first * len(samples) : end - first * len(samples)]]


def share_of(weight: float, num_samples: int) -> Fraction:
    """Samples of a source an epoch, exactly. A weight counts as the decimal that it is written as: 0.1 is a tenth."""
    return Fraction(repr(float(weight))) * num_samples


def stretch_of(share: Fraction, epoch: int) -> tuple[int, int]:
    """(start, end) of an epoch in the endless passes over a source, ``share`` samples of it an epoch."""
    return _round(epoch * share), _round((epoch + 1) * share)


def sum_steps(epochs: float, steps_of: Callable[[int], int], period: int | None, max_steps: int | None = None) -> int:
    """Steps of ``epochs`` epochs: those of each, and of a part of one its share of that epoch's, rounded up; at least
    one.

    ``steps_of(epoch)`` repeats after ``period`` epochs, if that is given. Counting ends once ``max_steps`` are passed.
    """
    whole, part = divmod(Fraction(repr(float(epochs))), 1)  # the decimal as written: 0.07 of 100 steps are 7
    total = 0
    for epoch in range(whole if period is None else min(whole, period)):
        if max_steps is not None and total > max_steps:
            return total
        total += steps_of(epoch)
    if period is not None and whole > period:
        passes, whole = divmod(whole, period)
        total = passes * total + sum(map(steps_of, range(whole)))
    if part and (max_steps is None or total <= max_steps):
        total += math.ceil(part * steps_of(whole))
    return max(1, total)


def bound_by_tokens(num_loss_tokens: np.ndarray, batch_loss_tokens: int) -> np.ndarray:
    """Where steps of at least ``batch_loss_tokens`` begin, and the end, int64; ``num_loss_tokens`` in sample order."""
    sums = np.cumsum(num_loss_tokens, dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(sums):
        before = int(sums[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(min(int(np.searchsorted(sums, before + batch_loss_tokens)) + 1, len(sums)))
    return np.array(bounds, dtype=np.int64)


MAX_OPEN_PACKS = 128


def lay_packs(lengths: np.ndarray, pack_tokens: int, max_open: int = MAX_OPEN_PACKS) -> tuple[np.ndarray, np.ndarray]:
    """(order, bounds), both int64: pack i holds ``order[bounds[i]:bounds[i + 1]]``, positions in ``lengths``, which are
    tokens of samples in their order, none above ``pack_tokens``. A million samples take about a second.

    Best fit with few open packs: each sample in turn goes into the fullest open pack that has room for it, else it
    opens one; where there are ``max_open`` already, the fullest closes. With ``max_open`` 1 samples keep their order.
    A pack's place is that of its first sample, so that short and long samples come as mixed as in the order itself,
    which sorting by length would undo.
    """
    rooms: list[tuple[int, int]] = []  # (tokens free, pack) of open packs, ascending
    packs = np.empty(len(lengths), dtype=np.int64)
    num_packs = 0
    for sample, length in enumerate(lengths.tolist()):
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        elif length > pack_tokens:
            raise ValueError(f"a sample of {length} tokens does not fit into a pack of {pack_tokens}")
        else:
            if len(rooms) == max_open:
                rooms.pop(0)
            room, pack = pack_tokens, num_packs
            num_packs += 1
        packs[sample] = pack
        if room > length:
            insort(rooms, (room - length, pack))
    order = np.argsort(packs, kind="stable")
    return order, np.searchsorted(packs[order], np.arange(num_packs + 1)).astype(np.int64)


def bound_by_packs(packs: np.ndarray, batch_packs: int) -> np.ndarray:
    """Where steps of ``batch_packs`` packs begin, and the end, int64; ``packs`` are the bounds of ``lay_packs``."""
    bounds = packs[:-1:batch_packs]
    return np.append(bounds, packs[-1])


def _divide(
    num_samples: int, sources: np.ndarray | None, weights: Sequence[float] | None
) -> tuple[list[np.ndarray], list[Fraction]]:
    """(sample ids, samples an epoch) of each source."""
    if sources is None:
        sources, weights = np.zeros(num_samples, dtype=np.int16), (1.0,)
    if weights is None:
        weights = (1.0,) * (int(sources.max()) + 1)
    if len(sources) != num_samples or int(sources.max()) >= len(weights):
        raise ValueError("an order needs a source for each sample and a weight for each source")
    samples = [np.flatnonzero(sources == source) for source in range(len(weights))]
    shares = [share_of(weight, len(ids)) for weight, ids in zip(weights, samples, strict=True)]
    if sum(_round(share) for share in shares) < 1:
        raise ValueError("the weights leave no sample in the first epoch")
    return samples, shares


def _round(share: Fraction) -> int:
    """The nearest whole number; a half goes up."""
    return (2 * share.numerator + share.denominator) // (2 * share.denominator)
