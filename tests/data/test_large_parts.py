"""Files that nobody can divide: all processes work on them, and what comes out is as if one had read them."""

from __future__ import annotations

import csv
import gzip
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.core.errors import UserError
from manyhands.data.read import sources
from manyhands.data.read.sources import read_rows, resolve_source, split_source
from manyhands.data.tokenize import parallel as tokenize_parallel
from manyhands.data.tokenize.prepare import prepare
from tests.data.test_prepare_parallel import WITHOUT_IMPORTS, prepare_by, start, wait_for_end, wait_for_workers

__all__ = ["start"]  # a fixture

WORDS = 'What "is" the answer,\nand why? '


def fields(number: int) -> dict[str, str]:
    return {
        "question": f"{number}: {WORDS * (1 + number % 7)}",
        "answer": f"It is {number}." + " Indeed." * (number % 11),
    }


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_packed(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


WRITERS: dict[str, Callable[[Path, list[dict[str, str]]], object]] = {
    "rows.csv": write_csv,
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "rows.jsonl.gz": write_packed,
    "rows.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_parallel, "PART_BYTES", 1 << 14)
    monkeypatch.setattr(tokenize_parallel, "BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(sources, "MIN_PART_BYTES", 1)


@pytest.fixture
def num_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many segments each preparation joined."""
    seen: list[int] = []
    whole = tokenize_parallel.Job.segments
    monkeypatch.setattr(
        tokenize_parallel.Job,
        "segments",
        lambda job, number: seen.append(len(whole(job, number))) or whole(job, number),
    )
    yield seen


# Reading each kind is test_sources.py's; what is new here, batches that travel between processes, is one code for all.
@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [name if name == "rows.jsonl.gz" else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS]
)
def test_the_store_is_the_same_for_any_number_of_processes(
    name: str, make_config, model_folder: Path, tmp_path: Path, num_segments
) -> None:
    rows = [fields(number) for number in range(1_200)]
    WRITERS[name](tmp_path / name, rows)
    facts, said = prepare_by((1, 3), tmp_path / name, make_config, model_folder)
    assert facts.num_samples + facts.num_validation_samples == len(rows)
    assert num_segments[0] == 1 and num_segments[1] > 2 and said[-1].endswith("by 3 processes")


@pytest.mark.ci
@WITHOUT_IMPORTS
def test_documents_in_pieces_keep_their_place(make_config, plain_folder: Path, tmp_path: Path, num_segments) -> None:
    texts = ["Short. " * 9, "A long one. " * 90_000, "Then some. " * 9_000, "And an end."]
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode()))
    prepare_by((1, 2), tmp_path / "x.txt.gz", make_config, plain_folder, task="cpt", too_long="split", max_length=4096)
    assert num_segments[1] >= 3


@pytest.mark.ci
@WITHOUT_IMPORTS
def test_a_divided_text_gives_each_document_once(make_config, plain_folder: Path, tmp_path: Path, num_segments) -> None:
    (tmp_path / "x.txt").write_text("\n\n".join(f"Document {number}. " * 99 for number in range(60)))
    prepare_by((1, 2), tmp_path / "x.txt", make_config, plain_folder, task="cpt", too_long="split", max_length=4096)
    assert len(num_segments) > 3


@pytest.mark.ci
@WITHOUT_IMPORTS
def test_faults_have_the_lines_that_one_process_gives_them(make_config, model_folder: Path, tmp_path: Path) -> None:
    rows = [fields(number) for number in range(1_200)]
    for number in (5, 600, 1_199):
        rows[number]["answer"] = " "
    write_csv(tmp_path / "rows.csv", rows)
    told = []
    for number in (1, 3):
        with pytest.raises(UserError, match="3 rows cannot be trained") as caught:
            prepare(make_config(tmp_path / "rows.csv"), model_folder, lambda _: None, num_processes=number)
        told.append(str(caught.value))
    assert told[0] == told[1]
    places = [row.line for row in read_rows(tmp_path / "rows.csv") if row.fields["answer"] == " "]
    assert f":{places[0]}: " in told[0] and f"(2 more: {places[1]}, {places[2]})" in told[0] and places[-1] > 1_200
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("one field\r\n")
    for number in (1, 3):
        with pytest.raises(UserError, match="1 field, but the header has 2"):
            prepare(make_config(tmp_path / "rows.csv"), model_folder, lambda _: None, num_processes=number)
    assert list((tmp_path / "cache").iterdir()) == []


# One forked process and the interrupt are enough for `make test`; the others differ only in who is hit.
@pytest.mark.ci
@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), None]
)
def test_a_killed_process_ends_all_and_leaves_nothing(victim: int | None, start, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", [{"question": WORDS, "answer": "Indeed. " * 200}] * 10_000)  # more than one part
    process = start(tmp_path / "rows.csv")
    below = wait_for_workers(process, tmp_path / "cache")
    if victim is None:
        process.send_signal(signal.SIGINT)
    else:
        below[victim].send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert victim is None or "UserError: error: a process that tokenizes the data was killed" in told
    wait_for_end(below)
    assert list((tmp_path / "cache").iterdir()) == []


def test_only_what_cannot_be_divided_is_large(tmp_path: Path) -> None:
    rows = [fields(number) for number in range(3_000)]
    for name, write in WRITERS.items():
        write(tmp_path / name, rows)
        assert [part.large for part in split_source(resolve_source(tmp_path / name), 6)] == [True]
        assert [part.large for part in split_source(resolve_source(tmp_path / name), 1)] == [False]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "groups.parquet", row_group_size=250)
    assert not any(part.large for part in split_source(resolve_source(tmp_path / "groups.parquet"), 6))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = split_source(resolve_source(tmp_path / "rows.jsonl"), 6)
    assert len(parts) == 6 and not any(part.large for part in parts)


def test_a_packed_file_counts_as_what_it_holds(tmp_path: Path) -> None:
    write_packed(tmp_path / "rows.jsonl.gz", [fields(0)] * 5_000)
    size = (tmp_path / "rows.jsonl.gz").stat().st_size
    assert sources.unpacked_bytes(tmp_path / "rows.jsonl.gz") == 5_000 * len(json.dumps(fields(0)) + "\n") > 20 * size
    (tmp_path / "x.gz").write_bytes(b"abc")
    assert sources.unpacked_bytes(tmp_path / "x.gz") == 3
