"""What a step computes: which samples form it, of steps spread over the first epoch, as far as the facts know it, and
its micro-batches as the rank has them that the others wait for. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyhands.data.batch.order import MAX_OPEN_PACKS, bound_by_packs, bound_by_tokens, lay_packs
from manyhands.data.batch.pack import TILE_TOKENS, padded_tokens
from manyhands.facts.types import DataFacts
from manyhands.planner.batch import ceil_div
from manyhands.planner.layout import Layout


@dataclass(frozen=True)
class MicroBatchGroup:
    """MicroBatchGroup-batches of about one size. ``count`` of them in a mean step."""

    count: float
    tokens: float  # that are computed, padding included
    pairs: float  # (query, key) pairs that causal attention has within samples
    window_pairs: float  # the same in a layer with a window


@dataclass(frozen=True)
class MeanStep:
    """A mean step of one rank, and what all ranks together train in it."""

    micros: tuple[MicroBatchGroup, ...]
    num_tokens: float  # of samples, all ranks
    num_samples: float  # all ranks

    @property
    def num_micro(self) -> float:
        return round(sum(micro.count for micro in self.micros), 9)  # one in each of 22 steps: 22 times 1/22


def count_pairs(lengths: np.ndarray, window: int | None = None) -> float:
    """``sum n (n + 1) / 2``; with a window of w keys ``sum w n - w (w - 1) / 2`` of samples longer than that."""
    n = lengths.astype(np.float64)
    pairs = n * (n + 1) / 2
    if window is not None:
        pairs = np.where(n > window, window * n - window * (window - 1) / 2, pairs)
    return float(pairs.sum())


def work_of_lengths(
    steps: Sequence[Iterable[Sequence[np.ndarray]]],
    layout: Layout,
    window: int | None,
    tile: int = TILE_TOKENS,
    documents: int = 1,
) -> MeanStep:
    """From sample lengths ``[step][micro-batch][rank]``; of each micro-batch the largest rank counts, once for its
    tokens and once for its pairs. A sample has so many ``documents``, which do not see each other. Ranks that divide
    packs have equal parts, of pairs as in a pack of one document.
    """
    parts_of = layout.mesh.context
    micros: list[MicroBatchGroup] = []
    tokens = samples = 0
    for step in steps:
        for parts in step:
            sizes = [_computed_tokens(part, layout, tile) for part in parts]
            pairs = max(_pairs(part, layout, None, documents) for part in parts)
            windows = pairs if window is None else max(_pairs(part, layout, window, documents) for part in parts)
            micros.append(MicroBatchGroup(1 / len(steps), max(sizes) / parts_of, pairs / parts_of, windows / parts_of))
            tokens += sum(int(part.sum()) for part in parts)
            samples += sum(len(part) for part in parts)
    return MeanStep(_merge(micros), tokens / len(steps), samples / len(steps))


def _computed_tokens(lengths: np.ndarray, layout: Layout, tile: int) -> int:
    if layout.micro_tokens is None:
        return len(lengths) * int(lengths.max(initial=0))
    return layout.pack_tokens or padded_tokens(int(lengths.sum()), tile)


def _pairs(lengths: np.ndarray, layout: Layout, window: int | None, documents: int) -> float:
    if layout.micro_tokens is None and len(lengths):  # padded to the longest
        lengths = np.full(len(lengths), lengths.max())
    return documents * count_pairs(lengths / documents, window)  # answers to one prompt are about equally long


def _merge(micros: list[MicroBatchGroup]) -> tuple[MicroBatchGroup, ...]:
    """Those of equal tokens together, with the mean of their pairs: in these seconds are linear."""
    sums: dict[float, np.ndarray] = {}
    for micro in micros:
        more = micro.count * np.array([1.0, micro.pairs, micro.window_pairs])
        sums[micro.tokens] = sums.get(micro.tokens, 0.0) + more
    return tuple(
        MicroBatchGroup(float(count), tokens, float(pairs / count), float(windows / count))
        for tokens, (count, pairs, windows) in sums.items()
    )


def join_sizes(work: MeanStep, most: int) -> MeanStep:
    """The same with micro-batches of at most ``most`` sizes: those of neighboring sizes have their mean tokens and
    pairs.
    """
    if len(work.micros) <= most:
        return work
    rows = np.array([(m.count, m.tokens, m.pairs, m.window_pairs) for m in sorted(work.micros, key=lambda m: m.tokens)])
    joined = []
    for part in np.array_split(rows, most):
        count = part[:, 0].sum()
        joined.append(MicroBatchGroup(float(count), *map(float, part[:, 0] @ part[:, 1:] / count)))
    return replace(work, micros=tuple(joined))


def mean_work(
    layout: Layout, data: DataFacts, *, samples: float | None, tokens: float | None, window: int | None
) -> MeanStep:
    """From the mean length alone, where the samples of a step are not known: ``samples`` of all ranks in a step, or
    ``tokens``.
    """
    mean, ranks = max(1.0, data.mean_length), layout.data_parallel_degree
    if samples is None:
        samples = (tokens or mean) / mean
    rank_samples = max(samples / ranks, min(1.0, samples))  # of the rank that the others wait for
    length, documents = np.array([min(mean, data.max_length)]), data.num_documents
    if layout.micro_tokens is None:
        size = layout.micro_samples or 1
        count, filled = float(layout.accumulation or max(1.0, rank_samples / size)), float(size)
        micro_tokens, length = size * data.max_length, np.array([data.max_length])
    else:
        capacity = layout.pack_tokens or layout.micro_tokens
        count = float(max(1, ceil_div(round(rank_samples * mean), capacity)))
        filled = rank_samples / count
        micro_tokens = layout.pack_tokens or padded_tokens(round(filled * mean))
    parts_of = layout.mesh.context
    pairs = (filled * documents * count_pairs(length / documents, each) / parts_of for each in (None, window))
    micro = MicroBatchGroup(count, micro_tokens / parts_of, *pairs)
    return MeanStep((micro,), samples * mean, samples)


def sample_steps(
    data: DataFacts,
    *,
    batch_samples: int | None,
    batch_loss_tokens: int | None,
    batch_packs: int | None,
    pack_tokens: int | None,
    max_steps: int,
    max_samples: int,
    num_steps: int | None = None,
) -> Iterator[np.ndarray]:
    """Samples, counted from 0 in the order of the first epoch, of at most ``max_steps`` steps with ``max_samples``
    together, one step in any case; of the first ``num_steps`` alone, where that is given.
    """
    num_samples = len(data.first_lengths)
    order = np.arange(num_samples)
    if batch_packs is not None:
        assert pack_tokens is not None
        max_open = 1 if data.as_given else MAX_OPEN_PACKS  # as data/batch/order.py has it
        order, packs = lay_packs(np.array(data.first_lengths, dtype=np.int64), pack_tokens, max_open)
        if num_samples < data.samples_per_epoch:
            packs = packs[: max(1, len(packs) - max_open)]  # others would still take samples
        bounds = bound_by_packs(packs, batch_packs)
    elif batch_loss_tokens is not None:
        bounds = bound_by_tokens(np.array(data.first_labels, dtype=np.int64), batch_loss_tokens)
    else:
        assert batch_samples is not None
        bounds = np.append(np.arange(0, num_samples, batch_samples), num_samples)
    if num_samples < data.samples_per_epoch:
        bounds = bounds[:-1]  # the last step continues beyond the known samples
    known = len(bounds) - 1 if num_steps is None else min(len(bounds) - 1, num_steps)
    if known < 1:
        return
    wanted = max(1, min(max_steps, max_samples * known // max(1, int(bounds[known]))))
    for step in np.unique(np.linspace(0, known - 1, wanted).astype(np.int64)).tolist():
        yield order[bounds[step] : bounds[step + 1]]
