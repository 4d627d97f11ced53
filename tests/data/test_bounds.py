"""Data that is made, or happens, to take more memory or time than there is: bounded, with file, line and limit in the
message.
"""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.core.errors import UserError
from manyhands.data.read import arrow_files, files, text_files
from manyhands.data.read.sources import read_rows
from manyhands.data.tokenize import part as tokenize
from manyhands.data.tokenize.prepare import prepare

MIB = 1 << 20


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        for _ in read_rows(path):
            pass
    return str(caught.value)


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that Python's own allocations reach."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz", "a.parquet.gz", "a.arrow.gz"])
def test_a_packed_file_unpacks_to_so_much_and_no_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FREE_UNPACKED_BYTES", 4 * MIB)
    monkeypatch.setattr(files, "MAX_UNPACKED_RATIO", 20)
    blank = b" " * (MIB - 1) + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(blank * 8, mtime=0))
    text = refusal(tmp_path / name)
    assert f"unpacks to more than {4 * MIB:,} bytes" in text and name in text and "gunzip" in text


def test_what_is_packed_as_text_is_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times smaller, and much that is small: neither is a bomb."""
    monkeypatch.setattr(files, "FREE_UNPACKED_BYTES", MIB)
    rows = [{"question": os.urandom(20).hex(), "answer": "yes " * 100} for _ in range(5000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert [row.fields for row in read_rows(tmp_path / "a.jsonl.gz")] == rows


def test_a_bomb_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of nothing, one line without an end, from 64 KB."""
    monkeypatch.setattr(files, "FREE_UNPACKED_BYTES", 16 * MIB)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2 * MIB)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(1) + b" " * (64 * MIB), mtime=0))
    texts: list[str] = []
    assert peak_of(lambda: texts.append(refusal(tmp_path / "a.jsonl.gz"))) < 12 * MIB
    assert "a.jsonl.gz:1: the line is longer than 2 MiB" in texts[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_one_row_of_millions_of_values_is_not_parsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_VALUES", 100_000)
    first, bomb = '{"question": "a", "answer": "b"}', '{"messages": [' + "{}," * 600_000 + "{}]}"
    text = f"[{first},\n{bomb}]" if name == "a.json" else f"{first}\n{bomb}\n"
    (tmp_path / name).write_text(text)
    found = refusal(tmp_path / name)
    assert f"{name}:2: more than 100,000 values in one row" in found
    harmless = json.dumps({"question": "a", "answer": "b " * 200_000})
    (tmp_path / name).write_text(harmless)
    assert len(list(read_rows(tmp_path / name))) == 1


def test_lines_of_nothing_but_separators_and_documents_of_nothing_but_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_VALUES", 100_000)
    (tmp_path / "a.csv").write_text("question,answer\na,b\n" + "," * 200_000 + "\nc,d\n")
    assert "a.csv:3: more than 100,000 fields in one line" in refusal(tmp_path / "a.csv")
    (tmp_path / "a.txt").write_text("a\n\n" + "b\n" * 200_000)
    assert "a.txt:3: the document is longer than 256 MiB or 100,000 lines" in refusal(tmp_path / "a.txt")


def test_parquet_rows_that_are_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of equal values takes no room in the file: millions of rows in some kilobytes."""
    monkeypatch.setattr(arrow_files, "FREE_ROWS", 1000)
    table = pa.table({"question": ["what?"] * 500_000, "answer": ["this"] * 500_000})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    text = refusal(tmp_path / "a.parquet")
    assert "says that it holds 500,000 rows in" in text and "a.parquet" in text
    own = pa.table({"text": [f"a row of its own: {number}" for number in range(5000)]})
    pq.write_table(own, tmp_path / "b.parquet", compression="zstd")
    assert len(list(read_rows(tmp_path / "b.parquet"))) == 5000


def test_a_large_value_that_many_rows_repeat_is_not_in_memory_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB in a dictionary, in 64 rows: 512 MiB if they were decoded at once."""
    monkeypatch.setattr(arrow_files, "MAX_BATCH_BYTES", 32 * MIB)
    monkeypatch.setattr(arrow_files, "LARGE_BATCH_BYTES", 4 * MIB)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array(["a" * (8 * MIB)]))
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    pool = pa.default_memory_pool()
    before, largest = pool.bytes_allocated(), 0

    def read() -> None:
        nonlocal largest
        for row in read_rows(tmp_path / "a.parquet"):
            assert len(row.fields["text"]) == 8 * MIB
            largest = max(largest, pool.bytes_allocated() - before)

    assert peak_of(read) < 40 * MIB and 0 < largest < 128 * MIB


def test_a_row_of_parquet_may_be_as_large_as_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", MIB)
    monkeypatch.setattr(arrow_files, "LARGE_BATCH_BYTES", MIB // 2)
    pq.write_table(pa.table({"text": ["a", "b" * 700_000, "c" * 2 * MIB, "d"]}), tmp_path / "a.parquet")
    assert "a.parquet:3: the row has 2,097," in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize("tools", [False, True])
def test_a_conversation_too_long_to_be_tokenized_at_once_is_refused(
    tools: bool, write_rows, make_config, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer needs some 140 bytes of memory a character: 200 MB ended the process."""
    monkeypatch.setattr(tokenize, "MAX_CONVERSATION_CHARACTERS", 10_000)
    messages = [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because " * (100 if tools else 2_000)},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 10_000}}
    long = {"messages": messages} | ({"tools": [tool]} if tools else {})
    path = write_rows([{"messages": [*messages[:1], {"role": "assistant", "content": "so"}]}] * 30 + [long])
    with pytest.raises(UserError) as caught:
        prepare(make_config(path, too_long="truncate"), model_folder, lambda line: None)
    assert (
        caught.value.details[0].startswith(f"{path}:31: a conversation of 1")
        and "at most 10,000" in caught.value.details[0]
    )
    facts = prepare(make_config(path, too_long="drop"), model_folder, lambda line: None)
    assert facts.left_out == {"data.too_long": {"train": 1}}, "dropped as any other that is too long"


def test_a_long_text_is_tokenized_in_windows_and_has_no_such_limit(
    write_rows, make_config, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "MAX_CONVERSATION_CHARACTERS", 10_000)
    path = write_rows([{"text": "some words " * 5_000}] * 30)
    facts = prepare(make_config(path, task="cpt", too_long="truncate"), model_folder, lambda line: None)
    assert facts.num_truncated == 30
