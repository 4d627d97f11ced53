"""Data sets of the hub and folders of ``save_to_disk``; where the library ``datasets`` is missing, a stand-in leaves
the same files.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from manyhands.config.schema import Source
from manyhands.config.sources import parse_split
from manyhands.core.errors import UserError
from manyhands.data.read import hub_sets, sources
from manyhands.data.read.sources import read_part, read_rows, resolve_source, split_source

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(9)]


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return path


def write_saved(folder: Path) -> None:
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[:5], ROWS[5:]), strict=True):
        write_arrow(folder / name, rows)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stands in for ``datasets``: one set, o/set, with the split train. Gives what was asked of it."""
    asked: list[tuple] = []

    def load_dataset(name: str, subset: str | None, *, split: str, revision: str | None, **rest: Any) -> Any:
        if rest.get("streaming"):
            raise NotImplementedError("this set cannot be streamed")
        assert rest.pop("keep_in_memory") is False
        asked.append((name, subset, split, revision, *rest.get("data_files", ())))
        if name != "o/set":
            raise type("DatasetNotFoundError", (FileNotFoundError,), {})(f"Dataset '{name}' doesn't exist on the Hub")
        if split != "train":
            raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")
        return types.SimpleNamespace(
            cache_files=[{"filename": str(write_arrow(tmp_path / "hub" / "set-train.arrow", ROWS))}]
        )

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(__version__="4.1.0", load_dataset=load_dataset))
    hub_sets._fetch.cache_clear()
    return asked


def test_a_hub_set_is_fetched_once_and_read_in_parts(library: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_PART_BYTES", 1)
    source = Source(path="hub:o/set", subset="main", revision="v1")
    assert [row.fields for row in read_rows(source)] == ROWS
    parts = split_source(resolve_source(source), 3)
    assert len(parts) == 3 and [row.line for part in parts for row in read_part(part)] == list(range(1, 10))
    assert library == [("o/set", "main", "train", "v1")]


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train[:20%]", range(2)),  # 1.8
        ("train[3:5]", (3, 4)),
        ("train[-2:]", (7, 8)),
        ("train[-50%:-1]", range(5, 8)),  # 4.5 is rounded to 4
        ("train[7:100]", (7, 8)),
        ("train[ : ]", range(9)),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_slice_takes_rows_in_their_own_order(
    library: list[tuple],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    split: str,
    rows: Iterable[int],
    num_parts: int,
) -> None:
    monkeypatch.setattr(sources, "MIN_PART_BYTES", 1)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))  # blank lines are no rows
    for source in (Source(path="hub:o/set", split=split), Source(path=str(tmp_path / "rows.jsonl"), split=split)):
        expected = [ROWS[row] for row in rows]
        assert [row.fields for row in read_rows(source)] == expected
        assert [
            row.fields for part in split_source(resolve_source(source), num_parts) for row in read_part(part)
        ] == expected
    assert all(asked[2] == "train" for asked in library)


def test_splits_are_joined_in_the_order_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_saved(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    source = Source(path=str(tmp_path), split="test[8:]+train[:2]")
    assert [row.fields for row in read_rows(source)] == [ROWS[8], ROWS[0], ROWS[1]]
    with pytest.raises(UserError, match="only a data set with several splits"):
        list(read_rows(Source(path=str(tmp_path / "train"), split="train+test")))
    with pytest.raises(ValueError, match="train is named twice"):
        parse_split("train[:1]+test+train[5:]")


def test_a_split_that_a_folder_cannot_have_is_refused_instead_of_reading_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows-1.jsonl").write_text('{"n": 1}')
    write_saved(tmp_path / "saved")
    for folder in ("files", "saved"):
        assert list(read_rows(Source(path=str(tmp_path / folder), split="train[:1]")))
        with pytest.raises(UserError, match="no split test"):
            list(read_rows(Source(path=str(tmp_path / folder), split="test[:1]")))
    state = tmp_path / "saved" / "state.json"
    state.write_text(state.read_text().replace('"train"', '"test"'))
    assert len(list(read_rows(Source(path=str(tmp_path / "saved"), split="test")))) == len(ROWS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"path": "hub:o/none"}, ["cannot be loaded", "hub:o/none", "doesn't exist", "check the name"]),
        ({"path": "hub:o/set", "split": "dev"}, ["Unknown split 'dev'", "choose one with `split`"]),
        (
            {"path": "hub:o/set", "split": "train[5]"},
            ["split train[5]", "write a name, or a slice such as train[:20%]"],
        ),
        ({"path": "hub:o/set", "split": "train[9:]"}, ["holds no rows"]),
    ],
)
def test_what_the_hub_does_not_have(library: list[tuple], keys: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        list(read_rows(Source(**keys)))
    assert all(word in str(caught.value) for word in words)


def test_named_files_take_the_place_of_a_split(library: list[tuple]) -> None:
    source = Source(path="hub:o/set", files=("data/a.jsonl", "data/b*.jsonl"))
    assert [row.fields for row in read_rows(source)] == ROWS
    assert library == [("o/set", None, "train", None, "data/a.jsonl", "data/b*.jsonl")]


def test_the_first_rows_of_a_set_are_fetched_as_a_stream(
    library: list[tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    class Stream:
        def take(self, num_rows: int) -> Stream:
            taken.append(num_rows)
            return self

        def with_format(self, name: str) -> Stream:
            assert name == "arrow"
            return self

        def iter(self, batch_size: int) -> Iterable[pa.Table]:
            yield pa.Table.from_pylist(ROWS[:2])
            yield pa.Table.from_pylist(ROWS[2 : taken[-1]])

    whole = sys.modules["datasets"].load_dataset
    monkeypatch.setattr(sys.modules["datasets"], "config", types.SimpleNamespace(HF_DATASETS_CACHE=tmp_path / "cache"),
                        raising=False)  # fmt: skip
    monkeypatch.setattr(
        sys.modules["datasets"],
        "load_dataset",
        lambda name, subset, **rest: Stream() if rest.get("streaming") else whole(name, subset, **rest),
    )
    assert [row.fields for row in read_rows(Source(path="hub:o/set", split="train[1:5]"))] == ROWS[1:5]
    hub_sets._fetch.cache_clear()
    assert [row.fields for row in read_rows(Source(path="hub:o/set", split="train[1:5]"))] == ROWS[1:5]
    assert taken == [5] and not library  # the second time from the cache
    for split in ("train", "train[:50%]", "train[2:]", "train[:-1]"):  # what needs the number of rows, or all of them
        list(read_rows(Source(path="hub:o/set", split=split)))
    assert taken == [5] and library == [("o/set", None, "train", None)]


@pytest.mark.parametrize("version", [None, "3.6.0"])
def test_without_the_library_it_is_named(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if version is None else types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "datasets", found)
    with pytest.raises(UserError, match="datasets") as caught:
        list(read_rows(Source(path="hub:o/other")))
    assert "pip install 'datasets>=4'" in str(caught.value)


def test_a_saved_set_is_a_folder(tmp_path: Path) -> None:
    write_saved(tmp_path)
    assert [row.fields for row in read_rows(tmp_path)] == ROWS
    assert [file.name[:10] for file in resolve_source(tmp_path).files] == ["data-00000", "data-00001"]
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        list(read_rows(tmp_path))


def test_a_saved_set_of_several_splits(tmp_path: Path) -> None:
    write_saved(tmp_path / "train")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(list(read_rows(Source(path=str(tmp_path))))) == 9
    with pytest.raises(UserError, match="no such split") as caught:
        list(read_rows(Source(path=str(tmp_path), split="test")))
    assert "['train']" in str(caught.value)


@pytest.mark.parametrize("split", ["..", "../train"])
def test_a_split_is_no_way_out_of_the_folder(tmp_path: Path, split: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(UserError, match="no such split"):
        list(read_rows(Source(path=str(tmp_path / "set"), split=split)))
