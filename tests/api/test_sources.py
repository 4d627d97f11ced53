"""Rows in memory: one file by content, the same rows whatever holds them, refusals with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.api.runs import open_run, plain
from manyhands.api.sources import write_rows
from manyhands.core.errors import UserError
from manyhands.data.read.sources import read_rows

ROWS = [{"prompt": "a", "completion": "ä", "weight": 0.5}, {"prompt": "b", "completion": "c", "weight": None}]


class Indexed:
    """As torch's map-style datasets are."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize(
    "data", [ROWS, tuple(ROWS), iter(ROWS), lambda: (row for row in ROWS), Indexed()], ids=lambda d: type(d).__name__
)
def test_rows_become_one_file_named_by_its_content(tmp_path: Path, data: Any) -> None:
    path = write_rows(data, tmp_path, "train")
    assert read(path) == ROWS
    written = Path(path).stat().st_mtime_ns
    assert write_rows(list(ROWS), tmp_path, "train") == path and Path(path).stat().st_mtime_ns == written
    assert write_rows(ROWS[:1], tmp_path, "train") != path
    assert sorted(p.name[:6] for p in (tmp_path / "memory").iterdir()) == ["train-"] * 2, "a temporary file is left"


def test_numpy_values_are_plain_ones(tmp_path: Path) -> None:
    row = {"input_ids": np.array([1, 2]), "weight": np.float32(0.5), "labels": (np.int64(-100), 2)}
    assert read(write_rows([row], tmp_path, "train")) == [{"input_ids": [1, 2], "weight": 0.5, "labels": [-100, 2]}]


def test_numpy_values_of_keys_are_plain_ones() -> None:
    keys = {"seed": np.int64(3), "learning_rate": np.float32(0.5), "list": np.array([1, 2])}
    assert json.dumps(plain(keys)) == '{"seed": 3, "learning_rate": 0.5, "list": [1, 2]}'


def test_a_mistake_in_overrides_is_said_to_be_there() -> None:
    """And not on a command line, which a script does not have."""
    run = {"model": {"name": "org/model"}, "data": {"train": "rows.jsonl"}}
    with pytest.raises(UserError) as error:
        open_run(run, {"stop.max_steps": 0, "nope": 1})
    assert [detail.split(":")[0] for detail in error.value.details] == ["overrides", "overrides"]


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "a.jsonl", tmp_path, "train") == str(tmp_path / "a.jsonl")
    assert write_rows("hub:openai/gsm8k", tmp_path, "train") == "hub:openai/gsm8k"


def test_a_data_frame_with_missing_values(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    assert read(write_rows(pandas.DataFrame(ROWS), tmp_path, "train")) == ROWS


def test_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    path = write_rows(made, tmp_path, "train")
    assert [row.fields for row in read_rows(path)] == ROWS
    assert write_rows(made.to_iterable_dataset(), tmp_path, "train") == path
    with pytest.raises(UserError, match="is a DatasetDict") as error:
        write_rows(datasets.DatasetDict(train=made), tmp_path, "train")
    assert error.value.fix == "give one split, such as data['train']"


@pytest.mark.parametrize(
    ("data", "what", "where"),
    [
        ([], "train has no rows", "list"),
        (iter([]), "train has no rows", "list_iterator"),
        ({"prompt": ["a"]}, "train is a dict, not rows", ""),
        (["text"], "train has a row that is a str, not a dict", "row 1"),
        ([ROWS[0], {"image": object()}], "cannot be written as JSON", "row 2, column 'image'"),
        ([{"weight": float("nan")}], "cannot be written as JSON", "row 1, column 'weight'"),
        ([{"text": "\ud800"}], "cannot be written as JSON", "row 1, column 'text'"),
        (5, "train is a int, not rows", ""),
    ],
)
def test_what_is_no_rows_is_refused_and_leaves_nothing(tmp_path: Path, data: Any, what: str, where: str) -> None:
    with pytest.raises(UserError, match=what) as error:
        write_rows(data, tmp_path, "train")
    assert error.value.where == where
    assert not list((tmp_path / "memory").iterdir())
