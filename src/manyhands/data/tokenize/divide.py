"""Which samples of a store are trained and which are held out: seeded, in proportion to the sources. Pure numpy;
knows no files.

Copies are told by the tokens of the first sample of a document: two divided documents that begin with the same block
are held out together, and copies that differ in their first block only are not seen as such.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.config.schema import DataSection
from manyhands.data.batch.order import HELD_OUT_STREAM, permute
from manyhands.data.read.sources import ResolvedSource

MIN_HELD_OUT = 20  # samples, where these are no more than one in ten
ONE_IN = 10


@dataclass(frozen=True)
class Division:
    """``train``, ``validation`` and the ``duplicates`` that were left out are sorted positions in the store, int64."""

    train: np.ndarray
    validation: np.ndarray
    duplicates: np.ndarray
    notes: list[str]


def divide_samples(
    data: DataSection,
    seed: int,
    sources: np.ndarray,
    continued: np.ndarray,
    all_sources: Sequence[ResolvedSource],
    hashes: np.ndarray,
) -> Division:
    """``sources`` int16, ``continued`` bool and ``hashes`` uint64 (of the tokens) describe the samples of the store.

    Where ``data.validation`` is not set the first samples of a seeded permutation are held out, as many as
    ``count_held_out`` says, of each source its share. Samples of one divided document stay together, and so do samples
    of the same tokens. ``max_samples`` of a source, and then ``data.max_samples``, keep the next ones; all samples of
    the other sources are validation samples, up to their ``max_samples``. ``data.deduplicate`` leaves the
    first sample of those with the same hash, among the training sources, the validation sources, and in each set.
    """
    uses = [source.use for source in all_sources]
    num_train, first_set = uses.count("train"), len(uses) - uses.count("set")
    is_own = sources < num_train
    is_twin = np.zeros(len(sources), dtype=np.bool_)
    if data.deduplicate:
        # a set is measured by itself, whatever another one holds
        of_sets = [sources == source for source in range(first_set, len(all_sources))]
        for group in map(np.flatnonzero, (is_own, ~is_own & (sources < first_set), *of_sets)):
            is_twin[group] = True
            is_twin[group[np.unique(hashes[group], return_index=True)[1]]] = False
    order = permute(int(is_own.sum()), seed, HELD_OUT_STREAM)
    order = order[~is_twin[order]]
    by_source = [order[sources[order] == source] for source in range(num_train)]
    notes: list[str] = []
    held_out = np.empty(0, dtype=np.int64)
    if data.validation is None and data.validation_fraction > 0:
        quotas = _share_out(data.validation_fraction, [len(samples) for samples in by_source])
        held_out = np.concatenate(
            [_hold_out(samples, quota, continued, hashes) for samples, quota in zip(by_source, quotas, strict=True)]
        )
        # Equally beginning documents of other sources too, unless that makes too many.
        first_of = np.flatnonzero(~continued)[np.cumsum(~continued) - 1]
        same = np.isin(hashes[first_of], hashes[first_of[held_out]]) & is_own & ~is_twin
        if len(held_out) < same.sum() <= max(sum(quotas), len(order) // ONE_IN):
            held_out = np.flatnonzero(same)
        notes += _describe_held_out(data.validation_fraction, len(order), len(held_out))
    is_kept = ~is_twin
    is_kept[held_out] = False
    given = [
        _first(np.flatnonzero((sources == source) & ~is_twin), all_sources[source].max_samples, seed)
        for source in range(num_train, len(all_sources))
    ]
    held_out = np.concatenate([held_out, *given])
    for source, samples in zip(all_sources, by_source, strict=False):
        if source.max_samples is not None:
            is_kept[samples[is_kept[samples]][source.max_samples :]] = False
    train = order[is_kept[order]][: data.max_samples]
    return Division(np.sort(train), np.sort(held_out), np.flatnonzero(is_twin), notes)


def _first(samples: np.ndarray, max_samples: int | None, seed: int) -> np.ndarray:
    """At most ``max_samples`` of the samples, the first ones of their own seeded order."""
    return samples if max_samples is None else samples[permute(len(samples), seed, HELD_OUT_STREAM)[:max_samples]]


def count_held_out(fraction: float, num_samples: int) -> int:
    """Samples to hold out of ``num_samples``: the fraction, at most half of them; where that is less than 20, 20 or a
    tenth of the samples.

    A fraction of 0 holds out none; one of 1 or more is their number, at most half of the samples.
    """
    if fraction == 0:
        return 0
    if fraction >= 1:
        return min(int(fraction), num_samples // 2)
    return max(min(round(fraction * num_samples), num_samples // 2), min(MIN_HELD_OUT, num_samples // ONE_IN))


def _describe_held_out(fraction: float, total: int, number: int) -> Iterator[str]:
    """Why ``number`` of ``total`` samples are held out, where that is not what the fraction says."""
    wanted, asked = count_held_out(fraction, total), round(fraction if fraction >= 1 else fraction * total)
    if not wanted:
        part = "half" if fraction >= 1 else "a tenth"
        yield (
            f"no sample is held out for validation: {part} of {_count(total)} is less than one (data.validation "
            f"takes a file)"
        )
    elif not number:
        yield "no sample is held out for validation: each has so many copies that they are over a tenth of all"
    elif number < wanted:
        yield (
            f"only {_count(number)} held out for validation instead of {wanted:,}: others have copies among the "
            f"{total:,}, or are the only one of their source"
        )
    elif wanted < asked:
        yield f"only {_count(number)} held out for validation instead of {asked:,}: half of the {total:,} there are"
    elif asked < wanted < MIN_HELD_OUT:
        yield (f"{_count(number)} held out for validation, a tenth of {total:,}; for more set data.validation_fraction")


def _share_out(fraction: float, num_samples: Sequence[int]) -> list[int]:
    """Samples to hold out of each source: largest remainders of their exact shares, never all samples of a source."""
    total = sum(num_samples)
    wanted = count_held_out(fraction, total)
    quotas = [wanted * count // total if total else 0 for count in num_samples]
    by_remainder = sorted(
        range(len(num_samples)), key=lambda source: (-(wanted * num_samples[source] % total) if total else 0, source)
    )
    for source in by_remainder[: wanted - sum(quotas)]:
        quotas[source] += 1
    return [min(quota, max(0, count - 1)) for quota, count in zip(quotas, num_samples, strict=True)]


def _count(num_samples: int) -> str:
    return f"{num_samples:,} sample{'s' if num_samples != 1 else ''}"


def _hold_out(samples: np.ndarray, quota: int, continued: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """About ``quota`` of ``samples`` (in seeded order): whole groups until they are enough, none that would make it
    more than a tenth of the samples and than the quota.

    A group is a document, or all of the same tokens. Where every group is larger than that, documents that differ are
    taken sample by sample; of copies none is taken, as others of it would be trained.
    """
    first_of = np.flatnonzero(~continued)[
        (np.cumsum(~continued) - 1)[samples]
    ]  # of each sample: the one its document begins with
    ordered = np.sort(hashes[first_of])
    if quota == 0 or not (ordered[1:] == ordered[:-1]).any():
        return samples[:quota]
    found, groups = np.unique(hashes[first_of], return_inverse=True)
    sizes = np.bincount(groups)
    room, taken, num_taken = max(quota, len(samples) // ONE_IN), [], 0
    for group in dict.fromkeys(groups.tolist()):
        if num_taken >= quota:
            break
        if num_taken + sizes[group] <= room:
            taken.append(group)
            num_taken += int(sizes[group])
    if taken:
        return samples[np.isin(groups, taken)]
    return samples[: quota if len(found) == len(np.unique(first_of)) else 0]


def find_repeated(hashes: np.ndarray, division: Division) -> tuple[np.ndarray, np.ndarray]:
    """Validation samples that repeat a training sample, and the first such one of each; positions in the store."""
    wanted, found = hashes[division.validation], hashes[division.train]
    known = np.unique(wanted)  # few beside those of training samples, which need not be sorted so
    if not len(known):
        return division.validation, division.validation
    twins = division.train[known[np.minimum(np.searchsorted(known, found), len(known) - 1)] == found]
    repeated = np.isin(wanted, hashes[twins])
    values, first = np.unique(hashes[twins], return_index=True)
    return division.validation[repeated], twins[first[np.searchsorted(values, wanted[repeated])]]
