"""Every row exactly once an epoch, and the same rows in a step whatever carries it out."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.batch.order import MAX_OPEN_PACKS, SampleOrder, bound_by_packs, lay_packs, permute
from manyhands.data.batch.pack import lay_out_packed

lengths_lists = st.lists(st.integers(2, 200), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(lengths_lists, st.integers(0, 2**70), st.integers(0, 5), st.integers(1, 50), st.booleans())
def test_every_row_once_an_epoch(lengths: list[int], seed: int, epoch: int, batch: int, by_tokens: bool) -> None:
    labels = np.array(lengths) - 1
    order = SampleOrder(
        len(lengths),
        seed,
        **({"batch_loss_tokens": 10 * batch, "num_loss_tokens": labels} if by_tokens else {"batch_samples": batch}),
    )
    steps = [order.samples(epoch, index) for index in range(order.steps_per_epoch(epoch))]
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    for rows in steps[:-1]:
        if by_tokens:  # reached with the last row, not before it
            assert labels[rows].sum() >= 10 * batch > labels[rows[:-1]].sum()
        else:
            assert len(rows) == batch
    with pytest.raises(IndexError):
        order.samples(epoch, len(steps))


def test_locate_counts_steps_over_epochs_of_different_length() -> None:
    labels = np.random.default_rng(0).integers(1, 100, 57)
    order = SampleOrder(57, 3, batch_loss_tokens=100, num_loss_tokens=labels)
    places = [(epoch, index) for epoch in range(6) for index in range(order.steps_per_epoch(epoch))]
    assert len({order.steps_per_epoch(epoch) for epoch in range(6)}) > 1
    fresh = SampleOrder(57, 3, batch_loss_tokens=100, num_loss_tokens=labels)
    assert [fresh.locate(step) for step in reversed(range(len(places)))] == places[::-1]
    assert SampleOrder(10, 0, batch_samples=4).locate(7) == (2, 1)
    packed = [SampleOrder(57, 3, batch_packs=2, pack_tokens=120, lengths=labels) for _ in range(2)]
    places = [(epoch, index) for epoch in range(6) for index in range(packed[0].steps_per_epoch(epoch))]
    assert [packed[1].locate(step) for step in reversed(range(len(places)))] == places[::-1]


@settings(max_examples=150, deadline=None)
@given(lengths_lists, st.integers(0, 2**70), st.integers(0, 5), st.integers(1, 6), st.integers(1, 4))
def test_a_step_of_packs_fits_into_them_on_any_number_of_ranks(
    lengths: list[int], seed: int, epoch: int, num_packs: int, num_ranks: int
) -> None:
    tokens = np.array(lengths)
    order = SampleOrder(len(lengths), seed, batch_packs=num_packs, pack_tokens=200, lengths=tokens)
    steps = [order.samples(epoch, index) for index in range(order.steps_per_epoch(epoch))]
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    for samples in steps:
        layout = lay_out_packed(samples, tokens, num_ranks, 200)
        assert layout.num_micro_batches <= -(-num_packs // num_ranks)  # not one more than the packs need
    again = SampleOrder(len(lengths), seed, batch_packs=num_packs, pack_tokens=200, lengths=tokens)
    assert all(np.array_equal(again.samples(epoch, i), steps[i]) for i in reversed(range(len(steps))))


def test_packs_come_in_the_order_of_their_first_samples() -> None:
    order, bounds = lay_packs(np.array([60, 50, 40, 30, 50, 100, 20]), 100)
    packs = [order[start:end].tolist() for start, end in pairwise(bounds)]
    assert packs == [[0, 2], [1, 3, 6], [4], [5]]  # the fullest with room
    assert bound_by_packs(bounds, 3).tolist() == [0, 6, 7]
    with pytest.raises(ValueError, match="101 tokens"):
        lay_packs(np.array([101]), 100)


def test_as_given_keeps_the_order_and_puts_source_behind_source() -> None:
    sources = np.array([1, 0, 0, 1, 0])
    order = SampleOrder(5, 7, batch_samples=5, sources=sources, weights=(1, 1), as_given=True)
    assert order.samples(0, 0).tolist() == order.samples(3, 0).tolist() == [1, 2, 4, 0, 3]
    halves = SampleOrder(5, 7, batch_samples=5, sources=sources, weights=(1, 0.5), as_given=True)
    assert [halves.samples(epoch, 0).tolist() for epoch in (0, 1)] == [[1, 2, 4, 0], [1, 2, 4, 3]]
    lengths = np.array([60, 50, 40, 30, 50])
    packed = SampleOrder(5, 7, batch_packs=1, pack_tokens=100, lengths=lengths, as_given=True)
    assert [packed.samples(0, index).tolist() for index in range(3)] == [[0], [1, 2], [3, 4]]
    rare = SampleOrder(
        2, 7, batch_packs=1, pack_tokens=100, lengths=lengths[:2], sources=sources[1:3], weights=(0.3,), as_given=True
    )
    assert [rare.steps_per_epoch(epoch) for epoch in range(4)] == [1, 0, 1, 0], "an epoch may hold no sample"


def test_packs_are_filled_and_short_and_long_samples_come_mixed() -> None:
    draw = np.random.default_rng(0)
    for median, spread in ((110, 0.6), (900, 0.7), (900, 0.9)):
        lengths = draw.lognormal(np.log(median), spread, 20_000).astype(int).clip(8, 4096)
        order, bounds = lay_packs(lengths, 4096)
        assert lengths.sum() >= 0.95 * 4096 * (len(bounds) - 1)
        parts = np.array_split(lengths[order], 10)
        assert max(abs(part.mean() / lengths.mean() - 1) for part in parts) < 0.15
    assert lay_packs(np.full(2 * MAX_OPEN_PACKS, 60), 100)[1].tolist() == list(range(2 * MAX_OPEN_PACKS + 1))


def test_order_is_keyed_by_seed_and_epoch_and_stays_the_same() -> None:
    assert permute(8, 0, 0).tolist() == permute(8, 2**64, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permute(50, 0, 0).tolist() != permute(50, 0, 1).tolist() != permute(50, 1, 0).tolist()


weights_lists = st.lists(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0, 1.5, 2.0, 3.7]), min_size=1, max_size=5)


def make_sources(num_samples: int, weights: list[float], draw: int) -> np.ndarray:
    return np.random.default_rng(draw).integers(0, len(weights), num_samples).astype(np.int16)


def order_of_epoch(order: SampleOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.samples(epoch, index) for index in range(order.steps_per_epoch(epoch))])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 120), weights_lists, st.integers(0, 2**64), st.integers(1, 40))
def test_every_beginning_of_an_epoch_holds_each_sources_share_within_one_row(
    num_samples: int, weights: list[float], seed: int, batch: int
) -> None:
    sources = make_sources(num_samples, weights, seed % 1000)
    try:
        order = SampleOrder(num_samples, seed, batch_samples=batch, sources=sources, weights=weights)
    except ValueError as error:
        assert "leave no sample" in str(error)
        return
    sizes = np.bincount(sources, minlength=len(weights))
    taken = np.zeros(num_samples, dtype=np.int64)
    for epoch in range(4):
        rows = order_of_epoch(order, epoch) if order.samples_in_epoch(epoch) else np.empty(0, dtype=np.int64)
        assert len(rows) == order.samples_in_epoch(epoch)
        np.add.at(taken, rows, 1)
        for source, weight in enumerate(weights):
            so_far = np.cumsum(sources[rows] == source)
            count = int(so_far[-1]) if len(rows) else 0
            assert abs(count - weight * sizes[source]) <= 1
            assert (np.abs(so_far - np.arange(1, len(rows) + 1) * count / max(1, len(rows))) < 1).all()
            of_source = taken[sources == source]
            assert (
                abs(of_source.sum() - (epoch + 1) * weight * sizes[source]) <= 0.5 + 1e-6
            )  # fractions are carried over
            assert len(of_source) == 0 or of_source.max() - of_source.min() <= 1  # no row is favored


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(0, 2**32),
    st.integers(0, 300),
)
def test_every_row_once_for_any_world_and_any_kill(
    num_samples: int, num_sources: int, batch: int, world_size: int, seed: int, killed_after: int
) -> None:
    lengths = np.random.default_rng(seed).integers(2, 60, num_samples)
    sources = make_sources(num_samples, [1.0] * num_sources, seed % 1000)

    def make() -> SampleOrder:
        return SampleOrder(num_samples, seed, batch_samples=batch, sources=sources, weights=[1.0] * num_sources)

    order, seen = make(), []
    num_steps = 2 * order.steps_per_epoch(0)
    for step in range(num_steps):
        if step == killed_after % num_steps:
            order = make()  # another process, which has nothing but the number of the step
        rows = order.samples(*order.locate(step))
        layout = lay_out_packed(rows, lengths, world_size, 128)
        assert {len(micro) for micro in layout.micro_batches} == {world_size}  # every rank has a part in each
        of_ranks = np.concatenate([layout.samples_of_rank(rank) for rank in range(world_size)])
        assert sorted(of_ranks.tolist()) == sorted(rows.tolist())
        seen += of_ranks.tolist()
    assert sorted(seen) == sorted(list(range(num_samples)) * 2)


def test_one_source_is_ordered_as_without_sources() -> None:
    plain = SampleOrder(50, 3, batch_samples=7)
    one = SampleOrder(50, 3, batch_samples=7, sources=np.zeros(50, dtype=np.int16), weights=[1.0, 1.0])
    for epoch in range(3):
        assert (
            order_of_epoch(plain, epoch).tolist()
            == order_of_epoch(one, epoch).tolist()
            == permute(50, 3, epoch).tolist()
        )


def test_epochs_of_different_length_are_located() -> None:
    order = SampleOrder(9, 0, batch_samples=2, sources=np.zeros(9, dtype=np.int16), weights=[0.5])
    assert [order.samples_in_epoch(epoch) for epoch in range(4)] == [5, 4, 5, 4]
    assert [order.locate(step) for step in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    halves = [set(order_of_epoch(order, epoch).tolist()) for epoch in range(2)]
    assert not halves[0] & halves[1] and len(halves[0] | halves[1]) == 9


def test_a_part_of_a_source_is_drawn_each_epoch_and_no_row_again_before_all_were() -> None:
    """20 rows of weight 0.4 and 10 of weight 1: 8 and 10 an epoch; five epochs are two passes over the first."""
    sources = np.array([0] * 20 + [1] * 10, dtype=np.int16)
    order = SampleOrder(30, 1, batch_samples=4, sources=sources, weights=(0.4, 1.0))
    for passes in range(2):
        drawn = [order_of_epoch(order, 5 * passes + epoch) for epoch in range(5)]
        assert [np.bincount(sources[rows]).tolist() for rows in drawn] == [[8, 10]] * 5
        assert np.bincount(np.concatenate(drawn)).tolist() == [2] * 20 + [5] * 10


def test_one_source_of_whole_passes_does_not_make_the_others_epochs_alike() -> None:
    sources = np.array([0] * 10 + [1] * 10, dtype=np.int16)
    order = SampleOrder(20, 0, batch_samples=1, sources=sources, weights=(0.25, 1.0))  # 2.5 rows of the first an epoch
    places = [(epoch, index) for epoch in range(4) for index in range(order.steps_per_epoch(epoch))]
    assert sorted({order.steps_per_epoch(epoch) for epoch in range(4)}) == [12, 13]
    assert [order.locate(step) for step in range(len(places))] == places


def test_a_million_rows_take_seconds() -> None:
    sources = np.random.default_rng(0).choice(5, 1_000_000, p=[0.6, 0.3, 0.05, 0.04, 0.01]).astype(np.int16)
    start = time.process_time()
    order = SampleOrder(len(sources), 0, batch_samples=64, sources=sources, weights=[0.5, 1.0, 3.0, 2.5, 8.0])
    rows = order.samples(0, 0)
    assert time.process_time() - start < 20 and len(rows) == 64  # some 2 s on an idle core
