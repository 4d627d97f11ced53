"""Every row exactly once an epoch, the same rows in a step for every layout, the same work for every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.order import RowOrder, permute
from manyhands.data.pack import lay_out_packed, lay_out_rows
from manyhands.errors import UserError

lengths_lists = st.lists(st.integers(2, 200), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(lengths_lists, st.integers(0, 2**70), st.integers(0, 5), st.integers(1, 50), st.booleans())
def test_every_row_once_an_epoch(lengths: list[int], seed: int, epoch: int, batch: int, by_tokens: bool) -> None:
    targets = np.array(lengths) - 1
    order = RowOrder(len(lengths), seed, **({"batch_tokens": 10 * batch, "num_targets": targets} if by_tokens else {"batch_rows": batch}))
    steps = [order.rows(epoch, index) for index in range(order.steps_per_epoch(epoch))]
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    for rows in steps[:-1]:
        if by_tokens:  # reached with the last row, not before it
            assert targets[rows].sum() >= 10 * batch > targets[rows[:-1]].sum()
        else:
            assert len(rows) == batch
    with pytest.raises(IndexError):
        order.rows(epoch, len(steps))


def test_locate_counts_steps_over_epochs_of_different_length() -> None:
    targets = np.random.default_rng(0).integers(1, 100, 57)
    order = RowOrder(57, 3, batch_tokens=100, num_targets=targets)
    places = [(epoch, index) for epoch in range(6) for index in range(order.steps_per_epoch(epoch))]
    assert len({order.steps_per_epoch(epoch) for epoch in range(6)}) > 1
    fresh = RowOrder(57, 3, batch_tokens=100, num_targets=targets)
    assert [fresh.locate(step) for step in reversed(range(len(places)))] == places[::-1]
    assert RowOrder(10, 0, batch_rows=4).locate(7) == (2, 1)


def test_order_is_keyed_by_seed_and_epoch_and_stays_the_same() -> None:
    assert permute(8, 0, 0).tolist() == permute(8, 2**64, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permute(50, 0, 0).tolist() != permute(50, 0, 1).tolist() != permute(50, 1, 0).tolist()


@settings(max_examples=200, deadline=None)
@given(lengths_lists, st.integers(1, 9), st.integers(200, 700), st.integers(0, 100))
def test_packs(lengths_list: list[int], num_ranks: int, capacity: int, seed: int) -> None:
    lengths = np.array(lengths_list + [1000] * 3)  # rows of the set that are not in this step
    rows = permute(len(lengths_list), seed, 0)
    layout = lay_out_packed(rows, lengths, num_ranks, capacity)
    placed = [part for micro in layout.micro_batches for part in micro]
    assert sorted(np.concatenate(placed).tolist()) == sorted(rows.tolist())
    assert all(len(micro) == num_ranks for micro in layout.micro_batches)
    assert all(lengths[part].sum() <= capacity for part in placed)
    assert all(any(len(part) for part in micro) for micro in layout.micro_batches)
    again = lay_out_packed(rows, lengths, num_ranks, capacity)
    assert all(np.array_equal(a, b) for a, b in zip(placed, [part for micro in again.micro_batches for part in micro], strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 5), st.integers(1, 8))
def test_dealt_rows(num_rows: int, num_ranks: int, micro_rows: int, accumulation: int) -> None:
    rows = permute(num_rows, 1, 0)
    if num_rows > num_ranks * micro_rows * accumulation:
        with pytest.raises(ValueError, match="do not fit"):
            lay_out_rows(rows, num_ranks, micro_rows, accumulation)
        return
    layout = lay_out_rows(rows, num_ranks, micro_rows, accumulation)
    assert np.concatenate([part for micro in layout.micro_batches for part in micro]).tolist() == rows.tolist()
    assert layout.num_micro_batches == -(-num_rows // (num_ranks * micro_rows)) <= accumulation
    assert all(len(micro) == num_ranks and all(len(part) <= micro_rows for part in micro) for micro in layout.micro_batches)
    full = len(rows) // micro_rows  # slots are filled in order; only the last may be partly filled
    assert [len(part) for micro in layout.micro_batches for part in micro][:full] == [micro_rows] * full


def test_a_row_that_fits_nowhere_is_named() -> None:
    with pytest.raises(UserError, match=r"row 2 has 50 tokens and does not fit into a micro-batch of 40"):
        lay_out_packed(np.array([1, 2]), np.array([1, 2, 50]), 2, 40)


def test_packs_of_a_long_tail_are_full_and_balanced() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.5, 1.0, 4096)), 16, 4096).astype(np.int64)
    layout = lay_out_packed(np.arange(4096), lengths, 8, 8192)
    assert lengths.sum() / (layout.num_micro_batches * 8 * 8192) >= 0.94
    for weights in (lengths, lengths**2):
        per_rank = np.array([weights[layout.rows_of_rank(rank)].sum() for rank in range(8)])
        assert per_rank.max() / per_rank.mean() <= (1.02 if weights is lengths else 1.25)


def test_a_million_rows_are_planned_in_seconds() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.5, 1.0, 1_000_000)), 16, 4096).astype(np.int32)
    start = time.perf_counter()
    order = RowOrder(len(lengths), 0, batch_rows=512)
    tokens = slots = 0
    for index in range(order.steps_per_epoch(0)):
        rows = order.rows(0, index)
        layout = lay_out_packed(rows, lengths, 8, 8192)
        tokens, slots = tokens + int(lengths[rows].sum()), slots + layout.num_micro_batches * 8 * 8192
    seconds = time.perf_counter() - start
    print(f"\n1,000,000 rows in {len(lengths) // 512} steps laid out in {seconds:.1f} s, {tokens / slots:.1%} full")
    by_tokens = RowOrder(len(lengths), 0, batch_tokens=100_000, num_targets=lengths - 1)
    assert by_tokens.steps_per_epoch(0) > 3000
    assert seconds < 40
