"""Batches by hand, and a thread that reads ahead, ends, fails loudly and keeps layouts apart."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.batch.batches import THREAD_NAME, collate, collate_here, iterate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.batch.pack import StepLayout, lay_out_unpacked
from manyhands.data.store.store import SampleSet
from manyhands.data.store.streams import prompt_of
from tests.data.fake_samples import SMALL, WEIGHTED

CPU = torch.device("cpu")
PACKED, PADDED = BatchShape(packed=True), BatchShape(packed=False)


def values(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def run(layouts: Any, rank: int = 0, shape: BatchShape = PACKED, device: torch.device = CPU) -> Any:
    return iterate(layouts, rank, device, collate_here(SMALL, shape))


def test_packed_by_hand() -> None:
    batch = collate(SMALL, np.array([2, 0, 1]), PACKED)
    assert values(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 0, 1]],
        "labels": [[2, -100, 4, -100, -100, 7, -100, 9, -100]],
        "label_positions": [0, 2, 5, 7],
        "cu_seq_lens": [0, 4, 7, 9],
        "max_length": 4,
    }
    assert batch["cu_seq_lens"].dtype == torch.int32
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "position_ids", "labels", "label_positions"))


def test_padded_by_hand() -> None:
    assert values(collate(SMALL, np.array([2, 0, 1]), PADDED)) == {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 0, 0]],
        "position_ids": [[0, 1, 2, 3]] * 3,
        "labels": [[2, -100, 4, -100], [-100, 7, -100, -100], [9, -100, -100, -100]],
        "label_positions": [0, 2, 5, 8],
    }


def test_weights_stand_where_the_targets_stand() -> None:
    packed = collate(WEIGHTED, np.array([2, 0, 1]), BatchShape(packed=True, tile=4))
    assert packed["loss_weights"].dtype == torch.float32
    assert packed["loss_weights"].tolist() == [[1.0, 0, 3.0, 0, 0, 0.5, 0, 2.0, 0, 0, 0, 0]]
    assert ((packed["labels"] != -100) == (packed["loss_weights"] > 0)).all()
    assert collate(WEIGHTED, np.array([1, 0]), PADDED)["loss_weights"].tolist() == [[2.0, 0, 0], [0, 0.5, 0]]
    assert collate(WEIGHTED, np.array([], dtype=np.int64), PACKED)["loss_weights"].tolist() == [[0, 0]]
    assert "loss_weights" not in collate(SMALL, np.array([0]), PACKED)


def test_packs_are_padded_to_whole_tiles_by_a_document_without_targets() -> None:
    batch = values(collate(SMALL, np.array([0, 1]), BatchShape(packed=True, tile=4)))
    assert batch == {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0]],
        "labels": [[-100, 7, -100, 9, -100, -100, -100, -100]],
        "label_positions": [1, 3],
        "cu_seq_lens": [0, 3, 5, 8],
        "max_length": 3,
    }
    assert collate(SMALL, np.array([2]), BatchShape(packed=True, tile=4))["cu_seq_lens"].tolist() == [
        0,
        4,
    ]  # full: nothing is added


def test_compiled_code_meets_few_shapes() -> None:
    shape = BatchShape(packed=True, tile=8, longest=10)
    batches = [collate(SMALL, np.array(rows, dtype=np.int64), shape) for rows in ([], [0], [0, 1], [0, 1, 2], [2, 1])]
    assert [batch["input_ids"].shape[1] for batch in batches] == [8, 8, 8, 16, 8]
    assert {len(batch["cu_seq_lens"]) for batch in batches} == {16} and {batch["max_length"] for batch in batches} == {
        10
    }
    assert batches[3]["cu_seq_lens"].tolist() == [0, 3, 5, 9] + [16] * 12
    many = collate(SMALL, np.array([1] * 20), shape)
    assert len(many["cu_seq_lens"]) == 32
    constant = BatchShape(packed=True, tokens=64, longest=4, documents=16)
    shapes = {
        (tuple(batch["input_ids"].shape), tuple(batch["cu_seq_lens"].shape), batch["max_length"])
        for batch in (collate(SMALL, np.array([2] * n), constant) for n in (0, 1, 15, 16))
    }
    assert shapes == {((1, 64), (32,), 64)}
    with pytest.raises(ValueError, match="do not fit"):
        collate(SMALL, np.array([0, 1, 2]), BatchShape(packed=True, tokens=8))


def test_no_rows() -> None:
    none = np.array([], dtype=np.int64)
    packed = values(collate(SMALL, none, PACKED))
    assert packed["input_ids"] == [[0, 0]] and packed["labels"] == [[-100, -100]] and packed["label_positions"] == []
    assert packed["cu_seq_lens"] == [0, 2] and packed["max_length"] == 2
    padded = values(collate(SMALL, none, PADDED))
    assert padded["input_ids"] == [[0, 0]] and padded["labels"] == [[-100, -100]]


def test_rows_of_a_set() -> None:
    sample_set = make_sample_set()
    assert prompt_of(SMALL.sample(0)).tolist() == [5, 6] and prompt_of(SMALL.sample(2)).tolist() == [1]
    assert sample_set.take_tokens(None).tolist() == [0, 1, 2]
    for limit in range(2, 12):
        taken = sample_set.take_tokens(limit)
        assert 0 < sample_set.lengths[taken].sum() <= limit and taken.tolist() == sorted(set(taken.tolist()))
    with pytest.raises(Exception, match=r"evaluate.max_tokens = 1"):
        sample_set.take_tokens(1)


def make_sample_set() -> SampleSet:
    """What choosing samples reads of a set; it has no files."""
    lengths = np.array([len(ids) for ids, _ in SMALL.parts], dtype=np.int32)
    counts = np.array([sum(mask[1:]) for _, mask in SMALL.parts], dtype=np.int32)
    return SampleSet(lengths, counts, counts.astype(np.float64), np.zeros(3, np.int16), np.arange(3), 0, ())


def num_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_iterate_gives_every_rank_its_batches_layout_by_layout() -> None:
    layouts = [lay_out_unpacked(np.array([2, 0, 1]), 2, 1), lay_out_unpacked(np.array([1]), 2, 1)]
    seen = []
    for layout, micro_batches in run(iter(layouts), rank=1):
        assert layout is layouts[len(seen)]
        seen.append([batch["input_ids"].tolist() for batch in micro_batches])
    assert seen == [[[[5, 6, 7]], [[0, 0]]], [[[0, 0]]]]
    assert num_threads() == 0


def test_what_is_left_of_a_layout_is_skipped() -> None:
    layouts = [lay_out_unpacked(np.array([2, 0, 1]), 1, 1), lay_out_unpacked(np.array([1]), 1, 1)]
    firsts = [next(micro_batches)["input_ids"].tolist() for _, micro_batches in run(layouts)]
    assert firsts == [[[1, 2, 3, 4]], [[8, 9]]]


def test_thread_works_ahead_but_not_far_and_ends_with_the_consumer() -> None:
    laid_out = []

    def layouts():
        for index in range(1000):
            laid_out.append(index)
            yield lay_out_unpacked(np.array([index % 3]), 1, 1)

    batches = run(layouts())
    next(batches)
    time.sleep(0.3)
    assert 3 <= len(laid_out) <= 4
    batches.close()
    assert num_threads() == 0


def test_an_error_in_the_thread_is_raised_in_the_consumer() -> None:
    broken = StepLayout(((np.array([99]),),))
    batches = run([lay_out_unpacked(np.array([0]), 1, 1), broken])
    next(batches)
    with pytest.raises(IndexError):
        next(batches)
    assert num_threads() == 0


def test_the_time_spent_waiting_is_counted_for_each_layout() -> None:
    def layouts():
        for index in range(3):
            time.sleep(0.2 if index == 1 else 0.0)
            yield lay_out_unpacked(np.array([0, 1]), 1, 1)

    waits = []
    for _, micro_batches in run(layouts()):
        for _ in micro_batches:
            pass
        waits.append(micro_batches.waited_s())
    assert waits[1] == pytest.approx(0.2, abs=0.1)
    assert waits[0] < 0.1 and waits[2] < 0.1


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_whole_while_it_computes() -> None:
    device = torch.device("cuda", 0)
    busy = torch.randn(4096, 4096, device=device)
    layouts = [lay_out_unpacked(np.array([2, 0, 1] * 20), 1, 3) for _ in range(3)]
    expected = [collate(SMALL, rows, PADDED) for layout in layouts for rows in layout.of_rank(0)]
    found = []
    for _, micro_batches in run(layouts, shape=PADDED, device=device):
        for batch in micro_batches:
            busy = busy @ busy / 64  # copies of later batches must not touch what earlier ones still use
            assert all(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))
            found.append({name: value * 1 for name, value in batch.items()})
    assert [values(batch) for batch in found] == [values(batch) for batch in expected]
