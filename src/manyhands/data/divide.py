"""Which rows of a store are trained and which are held out: seeded, in proportion to the sources. Pure numpy; knows no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.config.schema import DataSection, Source
from manyhands.data.order import HELD_OUT_STREAM, permute
from manyhands.errors import UserError

MIN_HELD_OUT = 20


@dataclass(frozen=True)
class Division:
    """``train`` and ``validation`` are sorted positions in the store, int64."""

    train: np.ndarray
    validation: np.ndarray
    notes: list[str]


def divide_rows(
    data: DataSection, seed: int, sources: np.ndarray, continued: np.ndarray, all_sources: Sequence[Source], num_train: int
) -> Division:
    """``sources`` int16 and ``continued`` bool describe the rows of the store; the first ``num_train`` sources are for training.

    Without validation sources the first rows of a seeded permutation are held out: ``validation_fraction`` of them, at
    least 20 and at most half, of each source its share. Rows of one divided document stay together. ``max_rows`` of a
    source, and then ``data.max_rows``, keep the next ones. Raises UserError where there is nothing to divide.
    """
    order = permute(int((sources < num_train).sum()), seed, HELD_OUT_STREAM)
    by_source = [order[sources[order] == source] for source in range(num_train)]
    notes: list[str] = []
    held_out = np.empty(0, dtype=np.int64)
    if data.validation is None and data.validation_fraction > 0:
        quotas = _share_out(data.validation_fraction, [len(rows) for rows in by_source], all_sources, notes)
        held_out = np.concatenate([_hold_out(rows, quota, continued) for rows, quota in zip(by_source, quotas, strict=True)])
    elif data.validation is not None:
        held_out = np.concatenate(
            [_first(np.flatnonzero(sources == source), all_sources[source].max_rows, seed) for source in range(num_train, len(all_sources))]
        )
    is_kept = np.ones(len(order), dtype=np.bool_)
    if data.validation is None:
        is_kept[held_out] = False
    for source, rows in zip(all_sources, by_source, strict=False):
        if source.max_rows is not None:
            is_kept[rows[is_kept[rows]][source.max_rows :]] = False
    train = order[is_kept[order]][: data.max_rows]
    return Division(np.sort(train), np.sort(held_out), notes)


def _first(rows: np.ndarray, max_rows: int | None, seed: int) -> np.ndarray:
    """At most ``max_rows`` of the rows, the first ones of their own seeded order."""
    return rows if max_rows is None else rows[permute(len(rows), seed, HELD_OUT_STREAM)[:max_rows]]


def _share_out(fraction: float, num_rows: Sequence[int], sources: Sequence[Source], notes: list[str]) -> list[int]:
    """Rows to hold out of each source: largest remainders of their exact shares, never all rows of a source."""
    total = sum(num_rows)
    if total < 2:
        raise UserError(
            "one row cannot be divided into training and validation",
            where=sources[0].path,
            fix="give more rows, or data.validation, or set data.validation_fraction: 0",
        )
    asked = max(round(fraction * total), MIN_HELD_OUT)
    wanted = min(asked, total // 2)
    if wanted < asked:
        notes.append(f"only {wanted:,} rows held out for validation instead of {asked:,}: half of the {total:,} rows there are")
    quotas = [wanted * count // total for count in num_rows]
    by_remainder = sorted(range(len(num_rows)), key=lambda source: (-(wanted * num_rows[source] % total), source))
    for source in by_remainder[: wanted - sum(quotas)]:
        quotas[source] += 1
    return [min(quota, max(0, count - 1)) for quota, count in zip(quotas, num_rows, strict=True)]


def _hold_out(rows: np.ndarray, quota: int, continued: np.ndarray) -> np.ndarray:
    """About ``quota`` of ``rows`` (in seeded order): whole documents until they are enough, none that would leave less than half.

    Where every document is larger than that, its rows are taken one by one.
    """
    if quota == 0 or not continued[rows].any():
        return rows[:quota]
    document = np.cumsum(~continued) - 1  # of each row of the store
    sizes = np.bincount(document[rows])
    room, taken, num_taken = len(rows) // 2, [], 0
    for number in dict.fromkeys(document[rows].tolist()):
        if num_taken >= quota:
            break
        if num_taken + sizes[number] <= room:
            taken.append(number)
            num_taken += int(sizes[number])
    return rows[np.isin(document[rows], taken)] if taken else rows[:quota]
