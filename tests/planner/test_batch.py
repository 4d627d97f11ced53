"""The batch rule: exact products, errors that name the nearest batches, and automatic batches that no rank count
changes.
"""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.planner.batch import auto_samples, constant_pack_tokens, pack_sizes, possible_splits, useful_splits
from manyhands.planner.search import plan
from tests.planner.examples import data_facts, facts, model_facts, run_config
from tests.support.plans import explain_why

USEFUL = 32_768


def unpacked(world_size: int, longest: int = 1024, **batch: object):
    config = run_config(data__packing=False, **{f"batch__{key}": value for key, value in batch.items()})
    return possible_splits(config, data_facts(longest=longest), world_size, USEFUL)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_split_multiplies_to_the_batch(world_size):
    splits = unpacked(world_size, samples=32)
    assert splits
    for split in splits:
        assert split.micro_samples * world_size * split.accumulation == 32
        assert split.micro_samples * 1024 <= USEFUL
    assert [split.micro_samples for split in splits] == sorted((split.micro_samples for split in splits), reverse=True)


def test_explicit_parts_are_obeyed():
    (split,) = unpacked(2, samples=32, micro_samples=4)
    assert (split.micro_samples, split.accumulation) == (4, 4)
    (split,) = unpacked(2, samples=32, accumulation=2)
    assert (split.micro_samples, split.accumulation) == (8, 2)
    (split,) = unpacked(3, micro_samples=4, accumulation=2)
    assert split.batch_samples == 24


def test_auto_rows_is_the_nearest_multiple_of_the_ranks():
    assert unpacked(8)[0].batch_samples == 32
    assert unpacked(6)[0].batch_samples == 30
    assert unpacked(2, micro_samples=5)[0].batch_samples == 30


def test_one_long_row_at_a_time_is_always_possible():
    assert [split.micro_samples for split in unpacked(1, longest=100_000, samples=32)] == [1]


@pytest.mark.parametrize(
    ("world_size", "batch", "near"),
    [
        (3, {"samples": 32}, "30 and 33"),
        (4, {"samples": 30, "micro_samples": 4}, "16 and 32"),
        (8, {"samples": 6}, "works is 8"),
        (2, {"samples": 32, "micro_samples": 4, "accumulation": 3}, "works is 24"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_ones(world_size, batch, near):
    with pytest.raises(UserError) as caught:
        unpacked(world_size, **batch)
    assert near in caught.value.fix
    assert f"{world_size} processes" in caught.value.what
    assert caught.value.where == "batch.samples"


def test_a_pack_is_no_larger_than_the_longest_samples_of_a_step():
    """Two pairs of 2 x 2,048 tokens were planned in 10,368."""
    pairs = data_facts(mean=4096, longest=4096).model_copy(update={"num_documents": 2})
    for samples, ranks in ((2, 1), (4, 2)):
        assert possible_splits(run_config(batch__samples=samples), pairs, ranks, USEFUL)[0].micro_tokens == 8192


def test_packs_take_any_batch_on_any_number_of_ranks():
    for world_size in (1, 3, 7):
        splits = possible_splits(run_config(batch__samples=10), data_facts(longest=900), world_size, USEFUL)
        assert {split.batch_samples for split in splits} == {10}
        assert all(split.micro_tokens >= 900 for split in splits)


def test_pack_sizes_go_from_a_ranks_share_to_the_longest_row():
    assert pack_sizes(longest=900, rank_tokens=100_000, useful_tokens=16_384) == [
        16384,
        12288,
        8192,
        6144,
        4096,
        3072,
        2048,
        1536,
        1024,
    ]
    assert pack_sizes(longest=900, rank_tokens=2000, useful_tokens=16_384)[0] == 2560  # not larger than a step needs
    assert pack_sizes(longest=30_000, rank_tokens=2000, useful_tokens=16_384) == [30_080]


def test_a_pack_too_small_for_the_longest_row_is_refused():
    with pytest.raises(UserError, match="2000 tokens, does not fit into a pack of 1999"):
        possible_splits(
            run_config(batch__micro_tokens=1999, data__max_length=1500), data_facts(longest=2000), 1, USEFUL
        )


def test_automatic_rows_depend_on_the_data_alone():
    config = run_config()
    assert auto_samples(config, data_facts(mean=300)) == 32
    assert auto_samples(config, data_facts(mean=100)) == 64
    assert auto_samples(run_config(data__packing=False), data_facts(mean=100)) == 32
    assert auto_samples(config, data_facts(num_samples=45)) == 4
    assert auto_samples(config, data_facts(num_samples=1)) == 1


def test_a_batch_of_trained_tokens():
    (split, *_) = possible_splits(run_config(batch__loss_tokens=4000), data_facts(), 2, USEFUL)
    assert (split.batch_samples, split.batch_loss_tokens) == (None, 4000)
    assert split.micro_tokens == 5120  # half of the 8000 tokens that hold 4000 trained ones, and a quarter more


def packs(world_size: int, packs: int, length: int = 2048, **keys: object):
    config = run_config(batch__packs=packs, data__max_length=length, **keys)
    return possible_splits(config, data_facts(longest=length), world_size, USEFUL)


@pytest.mark.parametrize(("world_size", "share"), [(1, 16), (2, 8), (3, 6), (8, 2), (32, 1)])
def test_micro_batches_of_a_step_of_packs_hold_whole_packs_of_a_ranks_share(world_size, share):
    splits = packs(world_size, 16)
    assert all(
        (split.batch_packs, split.batch_samples, split.batch_loss_tokens) == (16, None, None) for split in splits
    )
    assert splits[0].micro_tokens == min(share, USEFUL // 2048) * 2048
    assert splits[0].accumulates == (share * 2048 > USEFUL)
    sizes = [split.micro_tokens for split in splits]
    assert sizes == sorted(set(sizes), reverse=True) and 2048 in sizes


def test_packs_hold_less_than_one_only_where_samples_are_shorter():
    config = run_config(batch__packs=2, data__max_length=8192)
    sizes = [split.micro_tokens for split in possible_splits(config, data_facts(longest=1000), 1, USEFUL)]
    assert sizes[:2] == [16384, 8192] and min(sizes) >= 1024


def test_a_step_of_packs_of_a_model_that_cannot_pack_is_carried_out_unpacked():
    cannot = model_facts(packs=False, packing_reason="samples see each other")
    data = data_facts(steps_of_epochs=(7, 8))
    made = plan(run_config(batch__packs=4, stop__epochs=2), facts(cannot, data=data))
    assert not made.packing and (made.batch_packs, made.batch_pack_tokens, made.num_steps) == (4, 2048, 15)
    assert made.layout.micro_samples >= 1 and made.layout.accumulation is None
    said = explain_why(made, "batch", "steps")
    assert said[0].startswith("batch: samples of 4 packs of 2,048 tokens over") and "of 4 packs" in said[1]


def test_packs_of_one_length_are_padded_only_where_matmuls_would_not_take_them():
    def packed(length: int) -> int | None:
        data = data_facts(mean=length, longest=length, num_validation_samples=0, num_validation_tokens=0)
        return constant_pack_tokens(16, 16384, data, 1)

    assert packed(1540) == 8 * 1540  # a multiple of 16, not of 128
    assert packed(1541) == 97 * 128 > 8 * 1541
    assert packed(2048) == 8 * 2048


@pytest.mark.parametrize("keys", [{}, {"data__packing": False, "batch__samples": 128}, {"batch__packs": 64}])
def test_larger_micro_batches_of_offloaded_weights_come_on_top_of_all_others(keys):
    """A 32B model with adapters on four GPUs has room for 6,144 tokens, and found 5,248: 3 % slower."""
    data = data_facts(num_samples=10_000, mean=1000, longest=2000)
    config = run_config(**({"batch__samples": 400} if not keys else {}) | keys)
    offloaded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": "all"})})
    few, more = (useful_splits(one, data, 2, "cuda") for one in (config, offloaded))
    assert [split for split in more if split.full_micro_tokens <= USEFUL] == few
    sizes = [split.full_micro_tokens for split in more]
    assert USEFUL < sizes[0] <= 2 * USEFUL and sizes == sorted(set(sizes), reverse=True)
