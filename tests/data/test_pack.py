"""Packing: every row once, capacity held, the same work for every rank, little padding, and a million rows in
seconds.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.data.batch.order import SampleOrder, permute
from manyhands.data.batch.pack import (
    TILE_TOKENS,
    StepLayout,
    lay_out_packed,
    lay_out_unpacked,
    least_load,
    packing_efficiency,
    padded_tokens,
)

lengths_lists = st.lists(st.integers(2, 200), min_size=1, max_size=120)


def parts(layout: StepLayout) -> list[np.ndarray]:
    return [part for micro in layout.micro_batches for part in micro]


@settings(max_examples=300, deadline=None)
@given(lengths_lists, st.integers(1, 9), st.integers(200, 2000), st.integers(0, 100))
def test_packs(lengths_list: list[int], num_ranks: int, capacity: int, seed: int) -> None:
    lengths = np.array(lengths_list + [5000] * 3)  # rows of the set that are not in this step
    rows = permute(len(lengths_list), seed, 0)
    layout = lay_out_packed(rows, lengths, num_ranks, capacity)
    placed = parts(layout)
    assert sorted(np.concatenate(placed).tolist()) == sorted(rows.tolist())
    assert all(len(micro) == num_ranks for micro in layout.micro_batches)
    assert all(lengths[part].sum() <= capacity for part in placed)
    assert all(any(len(part) for part in micro) for micro in layout.micro_batches)
    again = lay_out_packed(rows, lengths, num_ranks, capacity)
    assert all(np.array_equal(a, b) for a, b in zip(placed, parts(again), strict=True))


@settings(max_examples=100, deadline=None)
@given(lengths_lists, st.integers(1, 8), st.integers(0, 100))
def test_rows_that_fit_into_one_micro_batch_take_one(lengths_list: list[int], num_ranks: int, seed: int) -> None:
    lengths = np.array(lengths_list)
    assert lay_out_packed(permute(len(lengths), seed, 0), lengths, num_ranks, int(lengths.sum())).num_micro_batches == 1


def test_a_row_that_fits_nowhere_is_named() -> None:
    with pytest.raises(UserError, match=r"sample 2 has 50 tokens and does not fit into a micro-batch of 40"):
        lay_out_packed(np.array([1, 2]), np.array([1, 2, 50]), 2, 40)


def test_nearly_full_packs_are_not_given_up_for_balance() -> None:
    lengths = np.array([6, 6, 4, 4, 4, 4, 4])  # evenly filled, the last 4 finds no room in two packs of 16
    assert lay_out_packed(np.arange(7), lengths, 1, 16).num_micro_batches == 2


def test_efficiency_by_hand() -> None:
    lengths = np.array([100, 128, 300])
    layout = StepLayout(((np.array([0]), np.array([1])), (np.array([2]), np.array([], dtype=np.int64))))
    assert [padded_tokens(n) for n in (0, 1, 128, 129)] == [128, 128, 128, 256]
    assert packing_efficiency([layout], lengths) == 528 / (2 * 128 + 2 * 384)


def short_rows(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Like GSM8K in the tokens of SmolLM2: 97 to 570, on average 217."""
    return np.clip(np.exp(rng.normal(5.33, 0.32, num_samples)), 97, 570).astype(np.int64)


def long_tail(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Three of four rows short, the fourth log-normal from 64 to 4096."""
    tail = np.clip(np.exp(rng.normal(6.5, 1.0, num_samples // 4)), 64, 4096).astype(np.int64)
    return np.concatenate([short_rows(rng, num_samples - len(tail)), tail])


def best_efficiency(lengths: np.ndarray, num_ranks: int) -> float:
    """No layout can be better: some rank carries ``least_load``, and everything is paid in whole tiles."""
    descending = sorted(lengths.tolist(), reverse=True)
    tiles = padded_tokens(max(-(-sum(descending) // num_ranks), least_load(descending, num_ranks)))
    return sum(descending) / (num_ranks * tiles)


@pytest.mark.parametrize("draw", [short_rows, long_tail])
@pytest.mark.parametrize("batch_samples", [16, 64, 512])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_97_percent_of_what_is_paid_for_are_tokens(draw, batch_samples: int, num_ranks: int) -> None:
    """Of all that is possible where a step is too small to be dealt evenly: 16 rows, 8 ranks, 1 long row in 64."""
    lengths = draw(np.random.default_rng(0), 40 * batch_samples)
    order = SampleOrder(len(lengths), 0, batch_samples=batch_samples)
    steps = [order.samples(0, index) for index in range(20)]
    best = np.array([best_efficiency(lengths[rows], num_ranks) for rows in steps])
    tokens = np.array([lengths[rows].sum() for rows in steps])
    possible = tokens.sum() / (tokens / best).sum()
    for capacity in (8192, 16_384):
        reached = packing_efficiency([lay_out_packed(rows, lengths, num_ranks, capacity) for rows in steps], lengths)
        rows_to_deal = batch_samples // num_ranks
        assert reached >= (0.97 if rows_to_deal >= 64 else 0.97 * possible if rows_to_deal > 2 else 0.94 * possible)


def exact_tiles(sizes: list[int], num_bins: int) -> int:
    """Fewest tiles of the fullest of ``num_bins`` bins, by trying everything (sizes descend)."""

    def fits(index: int, rooms: tuple[int, ...]) -> bool:
        return index == len(sizes) or any(
            fits(index + 1, tuple(sorted((*rooms[:number], room - sizes[index], *rooms[number + 1 :]))))
            for number, room in enumerate(rooms)
            if room >= sizes[index] and room not in rooms[:number]
        )

    tiles = -(-max(sizes) // TILE_TOKENS)
    while not fits(0, (tiles * TILE_TOKENS,) * num_bins):
        tiles += 1
    return tiles


def test_steps_of_two_rows_a_rank_are_dealt_as_well_as_any_layout_can() -> None:
    rng = np.random.default_rng(1)
    paid = best = 0
    for _ in range(40):
        lengths = short_rows(rng, 16)
        (micro,) = lay_out_packed(np.arange(16), lengths, 8, 8192).micro_batches
        paid += padded_tokens(max(int(lengths[part].sum()) for part in micro))
        best += TILE_TOKENS * exact_tiles(sorted(lengths.tolist(), reverse=True), 8)
    assert best / paid >= 0.97


def test_ranks_do_like_amounts_of_attention() -> None:
    lengths = long_tail(np.random.default_rng(0), 4096)
    layout = lay_out_packed(np.arange(4096), lengths, 8, 8192)
    for weights, bound in ((lengths, 1.01), (lengths**2, 1.05)):
        per_rank = np.array([weights[layout.samples_of_rank(rank)].sum() for rank in range(8)])
        assert per_rank.max() / per_rank.mean() <= bound


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 5), st.integers(1, 8))
def test_dealt_rows(num_samples: int, num_ranks: int, micro_samples: int, accumulation: int) -> None:
    rows = permute(num_samples, 1, 0)
    if num_samples > num_ranks * micro_samples * accumulation:
        with pytest.raises(ValueError, match="do not fit"):
            lay_out_unpacked(rows, num_ranks, micro_samples, accumulation)
        return
    layout = lay_out_unpacked(rows, num_ranks, micro_samples, accumulation)
    assert np.concatenate(parts(layout)).tolist() == rows.tolist()
    assert layout.num_micro_batches == -(-num_samples // (num_ranks * micro_samples)) <= accumulation
    assert all(
        len(micro) == num_ranks and all(len(part) <= micro_samples for part in micro) for micro in layout.micro_batches
    )
    full = len(rows) // micro_samples  # slots are filled in order; only the last may be partly filled
    assert [len(part) for part in parts(layout)][:full] == [micro_samples] * full


@pytest.mark.ci
def test_a_million_rows_are_planned_in_seconds() -> None:
    """All steps of an epoch, on one core; tens of seconds would be seen at every start."""
    lengths = long_tail(np.random.default_rng(0), 1_000_000).astype(np.int32)
    begin = time.process_time()
    order = SampleOrder(len(lengths), 0, batch_samples=512)
    layouts = [lay_out_packed(order.samples(0, index), lengths, 8, 16_384) for index in range(order.steps_per_epoch(0))]
    seconds = time.process_time() - begin
    assert packing_efficiency(layouts, lengths) >= 0.99
    assert seconds < 10


def test_packs_are_balanced_by_tokens_and_images() -> None:
    """Half of the samples have an image that costs as much as ten of them: no rank gets them all."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(80, 120, 64).astype(np.int32)
    more = np.where(np.arange(64) % 2, 0.0, 1000.0)
    samples = rng.permutation(64)

    def spread(layout: StepLayout) -> float:
        costs = [sum((lengths[part] + more[part]).sum() for part in layout.of_rank(rank)) for rank in range(4)]
        return max(costs) / min(costs)

    by_tokens, by_both = (lay_out_packed(samples, lengths, 4, 2048, each) for each in (None, more))
    assert spread(by_both) < 1.02 and spread(by_tokens) > 1.05
    for layout in (by_tokens, by_both):
        packs = [part for micro in layout.micro_batches for part in micro]
        assert sorted(np.concatenate(packs).tolist()) == list(range(64))
        assert max(int(lengths[part].sum()) for part in packs) <= 2048
    assert by_both.num_micro_batches == by_tokens.num_micro_batches


def test_images_that_nothing_costs_change_no_layout() -> None:
    lengths = np.random.default_rng(1).integers(10, 500, 100).astype(np.int32)
    one, other = (lay_out_packed(np.arange(100), lengths, 4, 1024, more) for more in (None, np.zeros(100)))
    assert all(
        np.array_equal(a, b)
        for first, second in zip(one.micro_batches, other.micro_batches, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def test_packs_full_of_tokens_hold_whatever_their_images_cost() -> None:
    """Equal cost would ask for more packs than tokens do: then tokens decide."""
    lengths = np.array([900, 100, 100, 900, 500, 500], dtype=np.int32)
    more = np.array([0.0, 5000, 5000, 0, 0, 0])
    layout = lay_out_packed(np.arange(6), lengths, 1, 1000, more)
    assert all(int(lengths[part].sum()) <= 1000 for (part,) in layout.micro_batches)
    assert sorted(np.concatenate([part for (part,) in layout.micro_batches]).tolist()) == list(range(6))
