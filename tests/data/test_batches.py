"""Batches by hand, and a prefetching thread that ends, fails loudly and keeps layouts apart."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from manyhands.data.batches import collate, iterate
from manyhands.data.pack import Layout, lay_out_rows
from manyhands.data.store import RowSet

CPU = torch.device("cpu")
ROWS = [([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1]), ([1, 2, 3, 4], [1, 1, 0, 1])]


def make_row_set(rows: list[tuple[list[int], list[int]]] = ROWS) -> RowSet:
    lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
    targets = np.array([sum(trained[1:]) for _, trained in rows], dtype=np.int32)
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int32)
    trained = np.concatenate([trained for _, trained in rows]).astype(bool)
    return RowSet(lengths, targets, 0, np.cumsum(lengths) - lengths, ids, trained)


def values(batch: dict) -> dict:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_packed_by_hand() -> None:
    batch = collate(make_row_set(), [2, 0, 1], packed=True)
    assert values(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 0, 1]],
        "targets": [[2, -100, 4, -100, -100, 7, -100, 9, -100]],
        "target_rows": [0, 2, 5, 7],
        "cu_seq_lens": [0, 4, 7, 9],
        "max_length": 4,
    }
    assert batch["cu_seq_lens"].dtype == torch.int32
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "position_ids", "targets"))


def test_padded_by_hand() -> None:
    assert values(collate(make_row_set(), [2, 0, 1], packed=False)) == {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 0, 0]],
        "position_ids": [[0, 1, 2, 3]] * 3,
        "targets": [[2, -100, 4, -100], [-100, 7, -100, -100], [9, -100, -100, -100]],
        "target_rows": [0, 2, 5, 8],
    }


def test_one_shape_for_compilation() -> None:
    packed = collate(make_row_set(), [0, 1], packed=True, pad_to=8, pad_documents=4)
    assert values(packed) == {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0]],
        "targets": [[-100, 7, -100, 9, -100, -100, -100, -100]],
        "target_rows": [1, 3],
        "cu_seq_lens": [0, 3, 5, 8, 8, 8],
        "max_length": 8,
    }
    shapes = {
        tuple(
            (name, tuple(value.shape))
            for name, value in collate(make_row_set(), rows, packed=True, pad_to=9).items()
            if name not in ("max_length", "target_rows")  # the loss is not compiled
        )
        for rows in ([], [0], [0, 1], [0, 1, 2])
    }
    assert len(shapes) == 1
    assert collate(make_row_set(), [1], packed=False, pad_to=5)["targets"].tolist() == [[9, -100, -100, -100, -100]]
    with pytest.raises(ValueError, match="do not fit"):
        collate(make_row_set(), [0, 1, 2], packed=True, pad_to=8)


def test_no_rows() -> None:
    packed = values(collate(make_row_set(), [], packed=True))
    assert packed["input_ids"] == [[0, 0]] and packed["targets"] == [[-100, -100]] and packed["target_rows"] == []
    assert packed["cu_seq_lens"] == [0, 2] and packed["max_length"] == 2
    padded = values(collate(make_row_set(), np.array([], dtype=np.int64), packed=False))
    assert padded["input_ids"] == [[0, 0]] and padded["targets"] == [[-100, -100]]


def test_targets_of_all_layouts_are_the_same_multiset() -> None:
    row_set = make_row_set()
    counted = []
    for packed in (True, False):
        targets = collate(row_set, [0, 1, 2], packed=packed)["targets"]
        counted.append(sorted(targets[targets != -100].tolist()))
        assert len(counted[-1]) == row_set.num_targets.sum()
    assert counted[0] == counted[1]


def test_rows_of_a_set() -> None:
    row_set = make_row_set()
    assert row_set.prompt(0).tolist() == [5, 6] and row_set.prompt(2).tolist() == [1]
    assert row_set.take_tokens(None).tolist() == [0, 1, 2]
    for limit in range(2, 12):
        taken = row_set.take_tokens(limit)
        assert 0 < row_set.lengths[taken].sum() <= limit and taken.tolist() == sorted(set(taken.tolist()))
    with pytest.raises(Exception, match=r"evaluate.max_tokens = 1"):
        row_set.take_tokens(1)


def num_threads() -> int:
    return sum(thread.name == "manyhands-batches" for thread in threading.enumerate())


def test_iterate_gives_every_rank_its_batches_layout_by_layout() -> None:
    layouts = [lay_out_rows(np.array([2, 0, 1]), 2, 1), lay_out_rows(np.array([1]), 2, 1)]
    seen = []
    for layout, micro_batches in iterate(make_row_set(), iter(layouts), 1, CPU, packed=True):
        assert layout is layouts[len(seen)]
        seen.append([batch["input_ids"].tolist() for batch in micro_batches])
    assert seen == [[[[5, 6, 7]], [[0, 0]]], [[[0, 0]]]]
    assert num_threads() == 0


def test_what_is_left_of_a_layout_is_skipped() -> None:
    layouts = [lay_out_rows(np.array([2, 0, 1]), 1, 1), lay_out_rows(np.array([1]), 1, 1)]
    firsts = [next(micro_batches)["input_ids"].tolist() for _, micro_batches in iterate(make_row_set(), layouts, 0, CPU, packed=True)]
    assert firsts == [[[1, 2, 3, 4]], [[8, 9]]]


def test_thread_works_ahead_but_not_far_and_ends_with_the_consumer() -> None:
    laid_out = []

    def layouts():
        for index in range(1000):
            laid_out.append(index)
            yield lay_out_rows(np.array([index % 3]), 1, 1)

    batches = iterate(make_row_set(), layouts(), 0, CPU, packed=True)
    next(batches)
    time.sleep(0.3)
    assert 3 <= len(laid_out) <= 4
    batches.close()
    assert num_threads() == 0


def test_an_error_in_the_thread_is_raised_in_the_consumer() -> None:
    broken = Layout(((np.array([99]),),))
    batches = iterate(make_row_set(), [lay_out_rows(np.array([0]), 1, 1), broken], 0, CPU, packed=True)
    next(batches)
    with pytest.raises(IndexError):
        next(batches)
    assert num_threads() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu() -> None:
    for _, micro_batches in iterate(make_row_set(), [lay_out_rows(np.array([2, 0]), 1, 1)], 0, torch.device("cuda", 0), packed=True):
        for batch in micro_batches:
            assert all(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))
            assert batch["input_ids"].tolist() in ([[1, 2, 3, 4]], [[5, 6, 7]])
