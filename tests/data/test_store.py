"""A store: the same whatever the segments, damage seen, tokens shared between stores that only choose other rows."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.store.segment import SegmentWriter, finish_store, join_segments, link_tokens
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import make_sample, weights_of

# (ids, trained, weights, line, continued)
ROWS: list[tuple[list[int], list[int], list[float] | None, int, bool]] = [
    ([1, 2, 3], [0, 1, 1], None, 1, False),
    ([4, 5], [1, 1], None, 2, False),
    ([6, 7, 8, 9], [0, 0, 1, 1], [0, 0, 0.5, 2.0], 4, False),
    ([9, 10], [1, 1], None, 4, True),
]


def write_store(folder: Path, cuts: list[int], rows: list = ROWS, sources: list[int] | None = None) -> Path:
    bounds = [0, *cuts, len(rows)]
    segments = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        writer = SegmentWriter(folder / "segments" / str(number))
        for ids, trained, weights, line, continued in rows[start:end]:
            given = None if weights is None else np.array(weights, np.float32)
            writer.append(make_sample(np.array(ids, np.int32), np.array(trained, bool), given), line, continued)
        writer.finish()
        segments.append(writer.folder)
    join_segments(folder, segments, sources or [0] * len(segments))
    meta = {"digest": "d", "seed": 0, "sources": [{"weight": 1.0}, {"weight": 2.0}]}
    finish_store(folder, np.arange(1, len(rows)), np.array([0]), meta)
    (folder / "segments").rmdir()
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], [ROWS[0], *ROWS[2:]]])
def test_the_division_into_segments_cannot_be_seen(rows: list, tmp_path: Path) -> None:
    whole = read_files(write_store(tmp_path / "whole", [], rows))
    for cut in range(len(rows) + 1):
        assert read_files(write_store(tmp_path / str(cut), [cut], rows)) == whole
    assert ("weights.bin" in whole) == (rows != ROWS[:2])


def test_rows_weights_and_sources_come_back(tmp_path: Path) -> None:
    store = TokenStore.open(write_store(tmp_path / "s", [2], sources=[0, 1]))
    train = store.train
    assert train.has_weights and train.num_samples == 3 and store.validation.num_samples == 1
    assert [train.sample(index)["tokens"].tolist() for index in range(3)] == [[4, 5], [6, 7, 8, 9], [9, 10]]
    assert [weights_of(train.sample(index)).tolist() for index in range(3)] == [[1, 1], [0, 0, 0.5, 2.0], [1, 1]]
    assert weights_of(train.sample(0)).dtype == np.float32
    assert train.num_loss_tokens.tolist() == [1, 2, 1] and train.loss_weights.tolist() == [1.0, 2.5, 1.0]
    assert train.sources.tolist() == [0, 1, 1] and store.source_weights == (1.0, 2.0)
    assert [store.line(index) for index in range(3)] == [2, 4, 4]
    order = store.order_samples(0, batch_samples=5)
    assert order.samples_in_epoch(0) == 5 and sorted(order.samples(0, 0).tolist()) == [0, 1, 1, 2, 2]


def test_without_weights_targets_count_one_each(tmp_path: Path) -> None:
    train = TokenStore.open(write_store(tmp_path / "s", [1], ROWS[:2])).train
    assert not train.has_weights and train.loss_weights.tolist() == [1.0]
    assert train.loss_weights.dtype == np.float64 and weights_of(train.sample(0)).tolist() == [1, 1]


FILES = ["tokens.bin", "mask.bin", "weights.bin", "meta.json"]
TABLES = [
    "tokens_offsets",
    "sources",
    "num_loss_tokens",
    "loss_weights",
    "tokens_checksums",
    "mask_checksums",
    "weights_checksums",
    "train",
    "validation",
    "lines",
    "continued",
]
UNREAD = ("lines.npy", "continued.npy")  # by a process that trains


def flip(path: Path, place: int) -> None:
    """One bit of one byte; the file's time stays, as it does when a disk does it."""
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    if path.suffix == ".npy":
        np.save(path, np.load(path)[:0])
    else:
        path.write_bytes(b"")


DAMAGES = {
    "cut": cut,
    "gone": Path.unlink,
    "empty": empty,
    "begin": lambda path: flip(path, 0),
    "end": lambda path: flip(path, -1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*FILES, *(f"{name}.npy" for name in TABLES)])
def test_damage_is_seen(name: str, damage: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s", [])
    assert TokenStore.open(folder, check_tokens=True).train.num_samples == 3
    DAMAGES[damage](folder / name)
    with pytest.raises(UserError, match="token cache is damaged") as caught:
        TokenStore.open(folder, check_tokens=True)
    assert name in caught.value.why or name == "meta.json"
    if name in UNREAD:
        assert TokenStore.open(folder).train.num_samples == 3


@pytest.mark.ci
def test_any_flipped_bit_of_the_description_is_seen(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s", [])
    for place in range((folder / "meta.json").stat().st_size):
        flip(folder / "meta.json", place)
        with pytest.raises(UserError, match="token cache is damaged"):
            TokenStore.open(folder)
        flip(folder / "meta.json", place)
    assert TokenStore.open(folder).content == TokenStore.open(write_store(tmp_path / "t", [2])).content


@pytest.mark.parametrize(("name", "place"), [("tokens.bin", 13), ("mask.bin", 7), ("weights.bin", 40)])
def test_a_process_that_trains_sees_damage_when_it_reads_the_row(name: str, place: int, tmp_path: Path) -> None:
    """Another machine has its own copy; and a disk can go wrong after the store was checked."""
    folder = write_store(tmp_path / "s", [2])
    train = TokenStore.open(folder, check_tokens=True).train

    def read() -> list[object]:
        return [train.sample(index) for index in range(3)]

    assert len(read()) == 3
    flip(folder / name, place)
    with pytest.raises(UserError, match="token cache is damaged") as caught:
        read()
    assert str(folder) in caught.value.where and "not what was written" in caught.value.why


def test_a_file_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s", [])
    train = TokenStore.open(folder).train
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(UserError, match="token cache is damaged"):
        train.sample(2)


def test_linked_tokens_are_the_same_and_outlive_the_first_store(tmp_path: Path) -> None:
    first, second = write_store(tmp_path / "a", []), tmp_path / "b"
    second.mkdir()
    assert link_tokens(first, second)
    finish_store(second, np.array([0, 3]), np.array([1]), {"digest": "e", "seed": 0, "sources": [{"weight": 1.0}]})
    assert (first / "tokens.bin").stat().st_ino == (second / "tokens.bin").stat().st_ino
    for path in first.iterdir():
        path.unlink()
    assert [TokenStore.open(second).train.sample(index)["tokens"].tolist() for index in range(2)] == [
        [1, 2, 3],
        [9, 10],
    ]
    assert not link_tokens(tmp_path / "missing", second)
    assert TokenStore.open(second).train.num_samples == 2
