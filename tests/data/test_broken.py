"""Broken rows, files and encodings: a clear refusal or a right result, never another exception.

``MANYHANDS_EXAMPLES=100000 pytest tests/data/test_broken.py`` runs that many cases (1,000 without), divided among the
tests.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.config.sources import INNER, OPTIONAL, REQUIRED
from manyhands.core.errors import UserError
from manyhands.data.read import sources, text_files
from manyhands.data.read.files import Findings, Row
from manyhands.data.read.formats import (
    Conversation,
    Pair,
    Ready,
    ReadyTokens,
    RowRefused,
    Segments,
    settle_format,
    to_conversation,
)
from manyhands.data.read.messages import ROLES
from manyhands.data.read.sources import read_part, read_rows, resolve_source, split_source
from manyhands.data.tokenize import long_text
from manyhands.data.tokenize.long_text import read_documents

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252", "utf-32")
NUM_CASES = int(os.environ.get("MANYHANDS_EXAMPLES", "1000"))

# Every property with the number of examples that it needs for one case in a hundred thousand.
PROPERTIES: dict[str, tuple[float, Callable]] = {}


def prop(share: float, cases: int, **arguments: st.SearchStrategy) -> Callable:
    """A property that takes ``share`` of all cases and tries ``cases`` of them with each example."""

    def register(check: Callable) -> Callable:
        PROPERTIES[check.__name__] = (share / cases, given(**arguments)(check))
        return check

    return register


texts = st.text(max_size=12) | st.sampled_from(
    ["", " ", "a", "\ud800", "\x00", '"', "{", "[]", '[{"role": "assistant", "content": "x"}]']
)
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
names = st.sampled_from(
    sorted({name for group in (REQUIRED, OPTIONAL, INNER) for fields in group.values() for name in fields})
)


def mostly(usual: st.SearchStrategy, rare: st.SearchStrategy = values) -> st.SearchStrategy:
    return st.integers(0, 9).flatmap(lambda number: rare if number == 0 else usual)


def objects(**fields: st.SearchStrategy) -> st.SearchStrategy:
    """Objects that have each field or not, and sometimes a strange one."""
    return st.fixed_dictionaries(
        {}, optional={name: mostly(field) for name, field in fields.items()} | {"extra": values}
    )


calls = st.lists(
    objects(
        name=texts,
        arguments=st.dictionaries(texts, values, max_size=2) | texts,
        function=objects(name=texts, arguments=texts),
    ),
    max_size=2,
)
message = objects(
    role=st.sampled_from((*ROLES, "function")),
    content=texts | st.lists(objects(type=st.just("text"), text=texts), max_size=2),
    tool_calls=calls, function_call=calls, name=texts, reasoning_content=texts, thinking=texts,
    weight=st.floats(0, 2), train=st.booleans(),
)  # fmt: skip
turn = objects(
    **{
        "from": st.sampled_from(["human", "gpt", "system", "function_call", "observation"]),
        "value": texts,
        "weight": st.floats(),
    }
)
field_values = {
    "messages": st.lists(message, max_size=4), "conversations": st.lists(turn | message, max_size=4),
    "tools": calls, "weight": st.floats(), "prompt": texts | st.lists(message, max_size=2),
    "input_ids": st.lists(st.integers(), max_size=3), "labels": st.lists(st.integers(-101, 3), max_size=3),
    "segments": st.lists(st.fixed_dictionaries({"text": texts, "label": st.booleans()}), max_size=3),
    "history": st.lists(st.lists(texts, min_size=1, max_size=3), max_size=2),
}  # fmt: skip
fields_of = {
    format: st.fixed_dictionaries(
        {name: mostly(field_values.get(name, texts)) for name in REQUIRED[format]},
        optional={name: mostly(field_values.get(name, texts)) for name in OPTIONAL[format]} | {"other": values},
    )
    for format in REQUIRED
}
row_fields = st.one_of(*fields_of.values(), st.dictionaries(names | texts, values, max_size=4))


def check_conversation(found: Conversation | Pair | str | Ready) -> None:
    """What may go on to the chat template: characters only, known roles, contents and weights; or tokens and texts."""
    if isinstance(found, ReadyTokens):
        assert found.ids.shape == found.trained.shape and found.weight > 0
        return
    if isinstance(found, Segments):
        assert found.weight > 0 and all(isinstance(text, str) for text, _ in found.parts)
        return
    if isinstance(found, str):
        assert found.strip()
        return
    if isinstance(found, Pair):
        check_conversation(found.chosen)
        check_conversation(found.rejected)
        return
    assert found.weight > 0 and any(message["role"] == "assistant" for message in found.messages)
    for message in found.messages:
        assert message["role"] in ROLES and (isinstance(message["content"], str) or message["tool_calls"])
        assert None not in message.values() or message["content"] is None
        assert 0 <= message.get("weight", 1) < float("inf") and message.get("train", True) in (True, False)
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], dict)
    assert found.tools is None or all(isinstance(tool["function"]["name"], str) for tool in found.tools)


@prop(0.4, 8, found=row_fields, fields=mostly(st.just({}), st.dictionaries(names, names, max_size=2)))
def rows_of_any_fields(folder: Path, found: dict, fields: dict) -> None:
    rows = [Row(found, "f", 1)]
    for format, task in (*((format, "sft") for format in REQUIRED), ("auto", "cpt"), ("auto", "sft")):
        try:
            settled = settle_format(rows, format, fields, task)
            check_conversation(to_conversation(rows[0], settled, fields))
        except (UserError, RowRefused) as refused:
            assert str(refused).strip()


def read_parts(path: Path, findings: Findings, *, pieces: bool = False) -> list[Row]:
    """All rows read in parts; documents of plain text also in pieces, as where they are to be split."""
    read = read_documents if pieces else read_part
    rows = [row for part in split_source(resolve_source(path), 3) for row in map(join_pieces, read(part, findings))]
    return rows if not findings.count else []


def join_pieces(row: Row) -> Row:
    return (
        Row({"text": "".join(row.fields["text"])}, row.file, row.line)
        if isinstance(row.fields.get("text"), Iterator)
        else row
    )


def read_all(path: Path) -> list[Row] | None:
    """All rows, or None after a refusal that names the file; whole and in parts alike."""
    try:
        rows = list(read_rows(path))
    except UserError as error:
        assert str(path) in str(error)
        rows = None
    try:
        findings = Findings()
        parted = read_parts(path, findings)
        if path.name.startswith("x.txt"):
            assert read_parts(path, Findings(), pieces=True) == parted
    except UserError:
        parted, findings.count = [], 1
    assert rows is None or (parted == rows and not findings.count)
    assert rows is not None or findings.count or not parted
    return rows


any_bytes = st.binary(max_size=80) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))


@prop(0.3, 2 * len(SUFFIXES), content=any_bytes, pack=st.booleans())
def files_of_any_bytes(folder: Path, content: bytes, pack: bool) -> None:
    for name in (f"x{suffix}{packed}" for suffix in SUFFIXES for packed in ("", ".gz")):
        (folder / name).write_bytes(gzip.compress(content) if pack else content)
        assert all(isinstance(row.fields, dict) for row in read_all(folder / name) or [])


def encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


SHAPES = ("lines", "list", "indented", "under", "escaped")


@prop(0.1, len(SHAPES), rows=st.lists(row_fields.filter(encodable), min_size=1, max_size=4), chunk=st.integers(1, 40))
def whole_json_is_read_as_it_is(folder: Path, rows: list[dict], chunk: int) -> None:
    for shape in SHAPES:
        check_json(folder, rows, shape, chunk)


def check_json(folder: Path, rows: list[dict], shape: str, chunk: int) -> None:
    path = folder / ("x.jsonl" if shape in ("lines", "escaped") else "x.json")
    if path.suffix == ".jsonl":
        text = "\n".join(json.dumps(row, ensure_ascii=shape == "escaped") for row in rows)
    else:
        text = json.dumps(
            {"v": 1, "rows": rows} if shape == "under" else rows,
            indent=1 if shape == "indented" else None,
            ensure_ascii=False,
        )
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK_BYTES", chunk)
        found = read_all(path)
    wanted = [{name: without_nulls(value) for name, value in row.items()} for row in rows]
    assert json.dumps([row.fields for row in found or []]) == json.dumps(wanted)


def without_nulls(value: object) -> object:
    """As Arrow's structs are read: nulls of objects inside a row are fields that are not there."""
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return value


@prop(
    0.06,
    1,
    records=st.lists(st.lists(st.text(max_size=6), min_size=2, max_size=2), min_size=1, max_size=4),
    tabs=st.booleans(),
)
def whole_csv_is_read_as_it_is(folder: Path, records: list[list[str]], tabs: bool) -> None:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL).writerows([["a", "b"], *records])
    path = folder / ("x.tsv" if tabs else "x.csv")
    path.write_bytes(buffer.getvalue().encode())
    assert [list(row.fields.values()) for row in read_all(path) or []] == records


@prop(0.1, len(ENCODINGS), rows=st.lists(row_fields, min_size=1, max_size=3), suffix=st.sampled_from(SUFFIXES[:5]),
      cut=st.integers(0, 40), at=st.integers(0, 200), byte=st.binary(max_size=2))  # fmt: skip
def files_that_were_damaged(folder: Path, rows: list[dict], suffix: str, cut: int, at: int, byte: bytes) -> None:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = folder / f"x{suffix}"
    for encoding in ENCODINGS:
        content = text.encode(encoding, "replace")
        path.write_bytes(content[:at] + byte + content[at + cut :])
        for row in read_all(path) or []:
            try:
                check_conversation(to_conversation(row, settle_format([row], "auto", {}, "sft")))
            except (UserError, RowRefused):
                continue


table_rows = st.lists(
    st.fixed_dictionaries({"text": st.none() | st.text(max_size=5), "n": st.integers(-5, 5)}), min_size=1, max_size=9
)


@prop(0.04, 1, rows=table_rows,
      is_arrow=st.booleans(), at=st.integers(0, 1500), byte=st.binary(max_size=3), cut=st.integers(0, 30))  # fmt: skip
def columns_that_were_damaged(folder: Path, rows: list[dict], is_arrow: bool, at: int, byte: bytes, cut: int) -> None:
    table, path = pa.Table.from_pylist(rows), folder / ("x.arrow" if is_arrow else "x.parquet")
    if is_arrow:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    else:
        pq.write_table(table, path, row_group_size=2, compression="none", write_page_checksum=True)
    content = path.read_bytes()
    at %= len(content)
    path.write_bytes(content[:at] + byte + content[at + cut :])
    found = read_all(path)
    if not byte and not cut:
        assert found is not None and [row.fields for row in found] == rows


def run(name: str, num_cases: int, folder: Path) -> None:
    share, check = PROPERTIES[name]
    quiet = [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ]
    settings(max_examples=max(1, round(share * num_cases)), deadline=None, database=None, suppress_health_check=quiet)(
        check
    )(folder=folder)


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_PART_BYTES", 1)
    monkeypatch.setattr(long_text, "LONG_CHARACTERS", 8)


@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_refusal_or_a_right_result(name: str, many_parts: None, tmp_path: Path) -> None:
    run(name, NUM_CASES, tmp_path)


def test_a_column_whose_description_is_damaged_ends_no_process() -> None:
    """pyarrow ends a process that asks for such a column's description (a histogram with a level too many)."""
    file = Path(__file__).parent / "damaged" / "levels.parquet"
    code = "import sys; from manyhands.data.read.sources import read_rows; list(read_rows(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{file.name}" in done.stderr and "data file cannot be read" in done.stderr
