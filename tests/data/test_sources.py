"""What a user reads when a file is wrong, and that right files of every kind are read as they are."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.config.schema import DataSection, Source
from manyhands.core.errors import UserError
from manyhands.data.read import files, sources, text_files
from manyhands.data.read.files import Findings, Row
from manyhands.data.read.sources import name_sources, read_part, read_rows, resolve_source, split_source


def read(path: Path, content: bytes) -> list[Row]:
    path.write_bytes(content)
    return list(read_rows(path))


def refusal(path: Path, content: bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    return str(caught.value)


def places(rows: list[Row]) -> list[tuple[dict, int]]:
    return [(row.fields, row.line) for row in rows]


def test_lines_are_numbered_blank_lines_skipped_marks_removed(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9"}')
    assert places(rows) == [({"a": 1}, 1), ({"a": "é"}, 4)]


def test_text_documents_are_divided_by_blank_lines(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.txt", b"\n one\ntwo\n\n \n\nthree\n")
    assert places(rows) == [({"text": " one\ntwo"}, 2), ({"text": "three"}, 7)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1}\n{"a": }\n', ["1 line cannot be read", "a.jsonl:2: broken JSON: Expecting value at column 7"]),
        (
            b'{"a": 1}\n[1]\nnull\n"x"',
            ["a.jsonl:2: a row must be an object, this is a list", ":3:", "null", ":4:", "a string"],
        ),
        (b'{"a": "b"\n', ["a.jsonl:1: broken JSON: Expecting ',' delimiter at column 10"]),
        (b'{"a": 1}\n{"a": "\xff"}\n', ["a.jsonl:2: not UTF-8: invalid start byte (byte 0xff at column 8)"]),
        (b'{"a": "\\ud800"}\n', ["a.jsonl:1", "surrogate"]),
        (b"[" * 3, ["begins with a JSON list", "JSONL"]),
        (b'{\n  "a": 1\n}\n', ["begins with a JSON object of several lines", "JSONL", ".json"]),
        (b'{"a": 1},\n{"a": 2}\n', ["a.jsonl:1: broken JSON: there is a comma after the value at column 9"]),
        (b"\xff\xfe{\x00", ["UTF-16", "iconv"]),
        ('{"a": 1}\n'.encode("utf-16-le"), ["UTF-16"]),
        ('{"a": "Größe"}\n'.encode("latin-1"), ["a.jsonl:1: not UTF-8", "0xf6", "iconv -f latin1 -t utf-8"]),
        (b"PAR1....", ["a Parquet file", ".parquet"]),
        (gzip.compress(b"{}", mtime=0), ["why: it is packed with gzip\n", "fix: let its name end in .gz"]),
        (b"PK\x03\x04...", ["ZIP"]),
        (b"", ["empty"]),
        (b"\n \n", ["no rows"]),
        (b'{"a": ' + b"[" * 100_000, ["a.jsonl:1: broken JSON"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["a.jsonl:1: broken JSON"]),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, words: list[str]) -> None:
    text = refusal(tmp_path / "a.jsonl", content)
    for word in words:
        assert word in text


def test_twenty_findings_and_the_number_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.jsonl", b"{}\n" + b"{\n" * 30)
    assert "30 lines cannot be read" in str(caught.value)
    assert len(caught.value.details) == 1 and caught.value.details[0].endswith(" (29 more: 3, 4, 5, 6, ...)")
    different = "".join(f'{{"a": {n * "1"}x}}\n' for n in range(1, 31))
    with pytest.raises(UserError) as caught:
        read(tmp_path / "b.jsonl", different.encode())
    assert len(caught.value.details) == 21 and caught.value.details[-1] == "and 10 more"


def test_missing_files_and_unknown_kinds(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    assert f"did you mean {tmp_path / 'train.jsonl'}?" in refusal(tmp_path / "trian.jsonl")
    assert "did you mean" not in refusal(tmp_path / "none.jsonl")
    for name in ("rows.xyz", "rows.xlsx", "rows.jsonl.zst", "rows.tar.gz"):
        assert "unpack an archive, save a spreadsheet as .csv, or let the name" in refusal(tmp_path / name, b"{}")
    assert "if it is not packed, remove .gz" in refusal(tmp_path / "rows.jsonl.gz", b"{}")
    (tmp_path / "folder").mkdir()
    assert "holds no data files" in refusal(tmp_path / "folder")
    for name in ("a.jsonl", "b.jsonl.zst"):  # half of the rows would be missing without a word
        (tmp_path / "folder" / name).write_text("{}")
    assert "packed data file" in (text := refusal(tmp_path / "folder")) and "b.jsonl.zst" in text
    with pytest.raises(UserError, match="plain text, but its format is messages"):
        resolve_source(Source(path=str(write(tmp_path / "a.txt", "words")), format="messages"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    assert "a.jsonl:2: the line is longer than 1 MiB" in refusal(tmp_path / "a.jsonl", b"{}\n" + b" " * (3 << 20))


def test_csv_with_quotes_and_line_ends_inside(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.csv", '\ufeffquestion,answer\r\n"a, ""b""\nc",1\r\n\r\nd,é\r\n'.encode())
    assert places(rows) == [({"question": 'a, "b"\nc', "answer": "1"}, 2), ({"question": "d", "answer": "é"}, 5)]


@pytest.mark.parametrize(
    ("name", "content"), [("a.tsv", b"q\ta\nx, y\tz\n"), ("a.csv", b"q;a\nx, y;z\n"), ("a.csv", b'"q",a\n"x, y",z\n')]
)
def test_separators(tmp_path: Path, name: str, content: bytes) -> None:
    assert places(read(tmp_path / name, content)) == [({"q": "x, y", "a": "z"}, 2)]


def test_a_separator_named_for_excel_is_no_header(tmp_path: Path) -> None:
    assert places(read(tmp_path / "a.csv", b"\xef\xbb\xbfsep=;\r\nq;a\r\nx, y;z\r\n")) == [({"q": "x, y", "a": "z"}, 3)]


def test_line_ends_of_old_programs_are_named(tmp_path: Path) -> None:
    assert "a carriage return without a line feed" in refusal(tmp_path / "a.csv", b"q,a\rx,y\r")


def test_broken_csv_names_the_line_the_record_begins_at(tmp_path: Path) -> None:
    text = refusal(tmp_path / "a.csv", b'q,a\n"x\ny",z\n1\n"b"c,d\n\xff,e\n"open,f\n')
    assert "a.csv:4: 1 field, but the header has 2" in text and "a.csv:5: broken CSV" in text
    assert "a.csv:6: not UTF-8" in text and "a.csv:7: broken CSV: unexpected end of data" in text
    assert "two columns have the same name" in refusal(tmp_path / "a.csv", b"q,q\n1,2\n")
    for nameless in (b"q,\n1,2\n", b",q\nx,2\n", b",\n0,1\n"):
        assert "a column has no name" in refusal(tmp_path / "a.csv", nameless)


ROWS: list[dict[str, Any]] = [{"question": f"q{i}", "answer": "é\n" * i, "tags": [i, {"x": False}]} for i in range(7)]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps({"version": 1, "data": ROWS}),
        json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}),
        "\n".join(map(json.dumps, ROWS)),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        "\ufeff" + json.dumps(ROWS, ensure_ascii=False),
    ],
    ids=["list", "indented", "under a key", "columns", "lines", "one after the other", "mark"],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_json_in_all_its_shapes_and_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, chunk: int
) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    assert [row.fields for row in read(tmp_path / "a.json", content.encode())] == ROWS


def test_json_rows_know_their_lines(tmp_path: Path) -> None:
    assert [row.line for row in read(tmp_path / "a.json", b'\n[\n{"a": 1},\n\n{"a":\n2}, {"a": 3}]')] == [3, 5, 6]


def test_an_object_that_is_one_conversation_is_one_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "tools": []}
    assert [found.fields for found in read(tmp_path / "a.json", json.dumps(row).encode())] == [row]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"a": 1},\n{"a": 2}\n{"a": 3}]', "a.json:3: broken JSON: a comma or ] is missing"),
        (b'[{"a": 1},\n{"a": tru}]', "a.json:2: broken JSON: Expecting value"),
        (b'[{"a": 1},\n{"a": "x', "a.json:2: broken JSON: Unterminated string"),
        (b'[{"a": 1}\n', "a.json:2: broken JSON: the list is not closed"),
        (b'[{"a": 1}]\n]', "a.json:2: broken JSON: something follows the list"),
        (b'[{"a": 1},\n7, {"a": "\\ud800"}]', "a.json:2: a row must be an object, this is a number"),
        (b'[{"a": 1},\n{"a": "\xff"}]', "a.json:2: not UTF-8"),
        (b'{"a": [1, 2], "b": [1]}', "not equally long"),
        (b'{"a": ["\\ud800", "x"]}', "surrogate"),
        (b"[" * 100_000, "broken JSON"),
        (b"[]", "no rows"),
        (b'{"a" 1}', "a.json:1: broken JSON"),
    ],
)
def test_broken_json(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path / "a.json", content)


def test_where_reading_stops_is_said(tmp_path: Path) -> None:
    broken = refusal(tmp_path / "a.json", b'[{"a": 1},\n{"a": tru},\n{"b": fals}]')
    assert "a.json:2 was read: there may be more faults" in broken and "a.json:3" not in broken
    assert "there may be more" not in refusal(tmp_path / "b.json", b'[{"a": 1},\n7, 8]')  # every value was looked at
    assert "there may be more" not in refusal(tmp_path / "a.jsonl", b"{\n{}\n{\n")


def test_a_long_json_list_is_never_whole_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"text": "x" * 2000})
    path.write_text("[" + ",\n".join([row] * 12_000) + "]")  # 24 MB
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path)) == 12_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


NESTED = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        ],
        "n": 1,
    },
    {"messages": [{"role": "user", "content": "b"}], "n": None},
]


def test_parquet_rows_are_plain_and_without_the_nulls_of_structs(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(NESTED * 5)
    table = table.append_column("m", pa.array([[("k", 1)], []] * 5, type=pa.map_(pa.string(), pa.int64())))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    rows = list(read_rows(tmp_path / "a.parquet"))
    assert [row.fields for row in rows] == [NESTED[0] | {"m": {"k": 1}}, NESTED[1] | {"m": {}}] * 5
    assert [row.line for row in rows] == list(range(1, 11))
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert [row.fields for row in read_rows(tmp_path / "b.parquet.gz")] == [row.fields for row in rows]


def make_extension(name: str, storage: pa.Array) -> pa.Table:
    """A column as a file has it whose extension type is not registered in the process that reads it."""
    field = pa.field("v", storage.type, metadata={"ARROW:extension:name": name, "ARROW:extension:metadata": ""})
    return pa.Table.from_arrays([storage], schema=pa.schema([field]))


def wrap(kind: pa.DataType, storage: pa.Array) -> pa.Table:
    return pa.table({"v": pa.ExtensionArray.from_storage(kind, storage)})


JSON_TEXT = pa.array(['{"a": [1, null], "b": null}', '"x"', "null", None])
UUIDS = pa.array([bytes(range(16)), None], pa.binary(16))
EXTENSION_VALUES = [
    (wrap(pa.json_(), JSON_TEXT), [{"a": [1, None]}, "x", None, None]),
    (make_extension("arrow.json", JSON_TEXT), [{"a": [1, None]}, "x", None, None]),
    (wrap(pa.uuid(), UUIDS), ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]),
    (make_extension("arrow.uuid", UUIDS), ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]),
    (wrap(pa.bool8(), pa.array([2, 0, None], pa.int8())), [True, False, None]),
    (make_extension("arrow.bool8", pa.array([2, 0], pa.int8())), [True, False]),
    (wrap(pa.fixed_shape_tensor(pa.int8(), [2, 2]), pa.array([[1, 2, 3, 4]], pa.list_(pa.int8(), 4))),
     [[[1, 2], [3, 4]]]),
    (make_extension("datasets.features.features.Array2DExtensionType", pa.array([[[1], [2]]])), [[[1], [2]]]),
    (pa.table({"v": pa.array([[("k", None), ("l", 1)]], pa.map_(pa.string(), pa.int64()))}), [{"l": 1}]),
]  # fmt: skip


def nest(table: pa.Table) -> pa.Table:
    """The column as a field of structs in lists."""
    column, field = table.column("v").combine_chunks(), table.schema.field("v")
    structs = pa.StructArray.from_arrays([column], fields=[field])
    return pa.table({"v": pa.ListArray.from_arrays(list(range(len(column) + 1)), structs)})


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize(("table", "values"), EXTENSION_VALUES)
def test_extension_types_are_read_as_what_they_mean(tmp_path: Path, table: pa.Table, values: list, suffix: str) -> None:
    nested = [[{} if value is None else {"v": value}] for value in values]
    for name, written, wanted in (("a", table, values), ("b", nest(table), nested)):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(written, path)
        else:
            with pa.ipc.new_stream(path, written.schema) as stream:
                stream.write_table(written)
        assert [row.fields["v"] for row in read_rows(path)] == wanted


def test_structs_of_a_dictionary_lose_their_nulls_too(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([{"a": 1, "b": None}]))
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.table({"v": column}).schema) as stream:
        stream.write_table(pa.table({"v": column}))
    assert [row.fields["v"] for row in read_rows(tmp_path / "a.arrow")] == [{"a": 1}] * 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", [
    make_extension("lab.secret", pa.array(["1"])), wrap(pa.opaque(pa.string(), "t", "v"), pa.array(["1"])),
])  # fmt: skip
def test_an_extension_type_that_is_not_known_is_refused_by_name(tmp_path: Path, table: pa.Table, nested: bool) -> None:
    pq.write_table(nest(table) if nested else table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="type that is not known") as caught:
        list(read_rows(tmp_path / "a.parquet"))
    assert caught.value.where.endswith("a.parquet, column v")
    assert "lab.secret" in caught.value.why or "arrow.opaque" in caught.value.why


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n'),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "m": [{"n": {"k": 1, "text": 2, "text": 2}}]}\n'),
        ("a.json", '[{"text": "a"},\n{"m": [{"text": 1, "text": 2}]}]'),
        ("a.json", '{"text": "a"}\n{"text": "a", "text": "a"}'),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, name: str, content: str) -> None:
    found = refusal(tmp_path / name, content.encode())
    assert f"{name}:2: " in found and "the key 'text' stands twice in one object" in found


@pytest.mark.parametrize("column", [
    pa.array([[("a", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
    pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"k": 1}', '{"k": 1, "k": 2}'])),
])  # fmt: skip
def test_a_key_that_stands_twice_in_arrow_is_refused_with_its_row(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"v": column}), tmp_path / "a.parquet")
    assert "a.parquet:2: column v: the key 'k' stands twice" in refusal(tmp_path / "a.parquet")


def test_parquet_with_bytes_that_are_no_text_names_the_row(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"], type=pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert "a.parquet:2: column text:" in refusal(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    assert "cannot be read" in refusal(tmp_path / "a.parquet", whole[:-9])
    assert "cannot be read" in refusal(tmp_path / "a.parquet", b"{}")


def test_rows_of_damaged_parquet_are_not_lost_in_silence(tmp_path: Path, many_parts: None) -> None:
    """Read alone, the second row group of this file is empty for pyarrow, which raises nothing."""
    rows = [{"text": None, "n": 0}, {"text": None, "n": 1}, {"text": "", "n": 0}]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2, compression="none", write_page_checksum=True)
    parts = split_source(resolve_source(path), 3)
    content = path.read_bytes()
    path.write_bytes(content[:250] + bytes(3) + content[256:])
    with pytest.raises(UserError, match="cannot be read"):
        [row for part in parts for row in read_part(part)]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b'{"text": "a"}\n\n{"text": "b"}'), ("a.json", b'[{"text": "a"}, {"text": "b"}]'),
     ("a.csv", b"text\na\nb\n"), ("a.txt", b"a\n\nb\n")],
)  # fmt: skip
def test_packed_files_are_unpacked(tmp_path: Path, name: str, content: bytes) -> None:
    packed = gzip.compress(content, mtime=0)
    assert [row.fields["text"] for row in read(tmp_path / f"{name}.gz", packed)] == ["a", "b"]
    assert "damaged" in refusal(tmp_path / f"{name}.gz", packed[:-6])
    assert "damaged" in refusal(tmp_path / f"{name}.gz", content)


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for number, name in enumerate(("b.jsonl", "sub/c.jsonl.gz", "a.jsonl", ".hidden/d.jsonl", "README.md")):
        path = write(tmp_path / name, json.dumps({"n": number}) + "\n")
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    assert [row.fields["n"] for row in read_rows(tmp_path)] == [2, 0, 1]
    write(tmp_path / "x.csv", "a\n1\n")
    assert "several kinds" in refusal(tmp_path)


def test_a_folder_that_is_linked_into_another_is_read_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    for name in ("shards/one", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "rows.jsonl", f'{{"of": "{name}"}}')
    (tmp_path / "shards" / "two").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "shards")
    assert [row.fields["of"] for row in read_rows(tmp_path / "shards")] == ["shards/one", "elsewhere"]


def test_a_folder_with_a_test_split_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    assert len(list(read_rows(tmp_path))) == 1
    write(tmp_path / "test.jsonl", "{}")
    text = refusal(tmp_path)
    assert "several splits" in text and "train.jsonl" in text and "test.jsonl" in text


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_PART_BYTES", 1)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 40, 500])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.arrow", "a.csv"])
def test_parts_hold_every_row_once_in_order_with_its_line(
    tmp_path: Path, many_parts: None, num_parts: int, name: str
) -> None:
    rows = [{"text": "é" * (i % 11), "n": str(i)} for i in range(60)]
    path, table = tmp_path / name, pa.Table.from_pylist(rows)
    if name == "a.jsonl":
        path.write_bytes(
            b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\n" * (1 + i % 3) for i, row in enumerate(rows))
        )
    elif name == "a.txt":
        rows = [{"text": row["text"] + "\n x" + row["n"]} for row in rows if row["text"]]
        path.write_text("\r\n" + "".join(row["text"] + "\n" * (2 + i % 3) for i, row in enumerate(rows)))
    elif name == "a.parquet":
        pq.write_table(table, path, row_group_size=7)
    elif name == "a.arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        path.write_text("text,n\n" + "".join(f"{row['text']},{row['n']}\n" for row in rows))
    parts = pickle.loads(pickle.dumps(split_source(resolve_source(path), num_parts)))
    found = [row for part in parts for row in read_part(part)]
    assert [row.fields for row in found] == rows and found == list(read_rows(path))
    assert len(parts) <= num_parts and (name == "a.csv" or num_parts > 9 or len(parts) == num_parts)


def test_findings_of_parts_are_those_of_the_whole(tmp_path: Path, many_parts: None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"{}\n" if i % 3 else b"broken\n" for i in range(90)))
    findings = Findings()
    parts = split_source(resolve_source(path), 8)
    for part in parts:
        assert len(list(read_part(part, findings))) <= 2
    with pytest.raises(UserError) as whole:
        list(read_rows(path))
    assert len(parts) == 8 and findings.count == 30
    assert tuple(findings.shown) == whole.value.details and findings.shown[0].startswith(f"{path}:1: ")
    assert findings.shown[0].endswith("(29 more: 4, 7, 10, 13, ...)")
    with pytest.raises(UserError, match="lines cannot be read"):
        list(read_part(parts[1]))


def test_sources_get_names_formats_and_fields(tmp_path: Path) -> None:
    given = ("a/train.jsonl", "b/train.jsonl.gz", "hub:openai/gsm8k", Source(path="c/", name="train-2"))
    assert [name for name, _ in name_sources(given)] == ["train", "train-3", "gsm8k", "train-2"]
    assert [name for name, _ in name_sources("some/rows.v2.parquet")] == ["rows.v2"]
    with pytest.raises(UserError, match="two sources have the name n"):
        name_sources((Source(path="a", name="n"), Source(path="b", name="n")))
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n")
    data = DataSection(train="x", format="prompt", fields={"prompt": "q"})
    own = Source(path=str(path), format="text", fields={})
    resolved = [resolve_source(source, data) for source in (path, own)]
    assert [(source.format, source.fields) for source in resolved] == [("prompt", {"prompt": "q"}), ("text", {})]


def test_a_slice_counts_what_cannot_be_read_as_little_as_what_is_too_long(tmp_path: Path, monkeypatch) -> None:
    """Rows that are not counted would move the bounds of the slice without a word."""
    path = tmp_path / "a.txt"
    path.write_text("one\n\n" + "two " * 50 + "\n" + "two " * 50 + "\n\n\nthree\n\nfour")
    monkeypatch.setattr("manyhands.data.read.text_files.MAX_VALUES", 1)
    (part,) = split_source(resolve_source(Source(path=str(path), split="train[50%:]")), 1)
    assert (part.skip, part.take) == (2, None), "a document may be longer than what is read at once"
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "a"}\nnot json\n{"text": "b"}\n{"text": "c"}\n')
    with pytest.raises(UserError, match="1 line cannot be read"):
        split_source(resolve_source(Source(path=str(broken), split="train[:50%]")), 1)
