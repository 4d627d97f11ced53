"""What a user reads when a file or a row is wrong, and that right files are read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.formats import FIELDS, RowRefused, detect_format, to_conversation
from manyhands.data.sources import Row, read_rows
from manyhands.errors import UserError


def read(path: Path, content: bytes) -> list[Row]:
    path.write_bytes(content)
    return list(read_rows(path))


def test_lines_are_numbered_blank_lines_skipped_marks_removed(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9"}')
    assert [(row.fields, row.line) for row in rows] == [({"a": 1}, 1), ({"a": "é"}, 4)]


def test_text_documents_are_divided_by_blank_lines(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.txt", b"\n one\ntwo\n\n \n\nthree\n")
    assert [(row.fields["text"], row.line) for row in rows] == [(" one\ntwo", 2), ("three", 7)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1}\n{"a": }\n', ["1 lines cannot be read", "a.jsonl:2: broken JSON: Expecting value at column 7"]),
        (b'{"a": 1}\n[1]\nnull\n"x"', ["a.jsonl:2: a row must be an object, this is a list", ":3:", "null", ":4:", "a string"]),
        (b'{"a": 1}\n{"a": "\xff"}\n', ["a.jsonl:2: not UTF-8: invalid start byte (byte 0xff at column 8)"]),
        (b'{"a": "\\ud800"}\n', ["a.jsonl:1", "surrogate"]),
        (b"[" * 3, ["begins with a JSON list", "JSONL"]),
        (b"\xff\xfe{\x00", ["UTF-16"]),
        (b"", ["empty"]),
        (b"\n \n", ["no rows"]),
        (b'{"a": ' + b"[" * 100_000, ["a.jsonl:1: broken JSON"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["a.jsonl:1: broken JSON"]),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.jsonl", content)
    for word in words:
        assert word in str(caught.value)


def test_twenty_findings_and_the_number_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.jsonl", b"{}\n" + b"{\n" * 30)
    assert "30 lines cannot be read" in str(caught.value)
    assert len(caught.value.details) == 21 and caught.value.details[-1] == "and 10 more"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such data file"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="folder, not a data file"):
        list(read_rows(tmp_path))


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(lambda text: json.dumps({"text": text}).encode() + b"\n" + text.encode("utf-8", "ignore"))
)
def test_any_bytes_give_rows_or_a_clear_refusal(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for name in ("x.jsonl", "x.txt"):
        path = tmp_path_factory.getbasetemp() / name
        try:
            rows = read(path, content)
        except UserError:
            continue
        assert rows and all(isinstance(row.fields, dict) for row in rows)


def row(**fields: object) -> Row:
    return Row(fields, "f.jsonl", 7)


@pytest.mark.parametrize("format", FIELDS)
def test_formats_are_detected(format: str) -> None:
    assert detect_format([row(id=1, **dict.fromkeys(FIELDS[format], "x"))] * 3) == format


def test_format_errors_list_fields_and_formats() -> None:
    with pytest.raises(UserError, match="format of the rows is not known") as none:
        detect_format([row(instruction="a", output="b")])
    assert "f.jsonl:7" in str(none.value) and "instruction, output" in str(none.value) and "question, answer" in str(none.value)
    with pytest.raises(UserError, match=r"several formats: messages, text") as both:
        detect_format([row(messages=[], text="a")])
    assert "data.format" in str(both.value)
    with pytest.raises(UserError, match="other fields than the rows before it"):
        detect_format([row(text="a"), row(question="a", answer="b")])


@pytest.mark.parametrize(
    ("format", "fields", "reason"),
    [
        ("messages", {"messages": []}, "at least one"),
        ("messages", {"messages": "hi"}, "list of messages"),
        ("messages", {"messages": ["hi"]}, "message 1 of messages is not an object"),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ("messages", {"messages": [{"role": "bot", "content": "a"}]}, "'bot'; known roles: system, user, assistant"),
        ("messages", {"messages": [{"role": "tool", "content": "a"}]}, "tool messages cannot be trained yet"),
        ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "tool calls cannot be trained yet"),
        ("messages", {"messages": [{"role": "assistant", "content": None}]}, "must be a string"),
        ("messages", {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "weights of single messages"),
        ("messages", {"messages": [{"role": "assistant", "content": "a"}], "tools": [{}]}, "the row has tools"),
        ("question", {"question": "a"}, "no field answer"),
        ("question", {"question": "a", "answer": 3}, "answer must be a string, this is int"),
        ("question", {"question": "a", "answer": " "}, "answer is empty"),
        ("text", {"text": ""}, "text is empty"),
    ],
)
def test_rows_are_refused_with_the_reason(format: str, fields: dict, reason: str) -> None:
    with pytest.raises(RowRefused) as caught:
        to_conversation(row(**fields), format)
    assert reason in str(caught.value)


def test_rows_become_conversations() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert to_conversation(row(question="a", answer="b"), "question") == turns
    assert to_conversation(row(prompt="a", completion="b"), "prompt") == turns
    system = {"role": "system", "content": "s"}
    assert to_conversation(row(prompt=[system, turns[0]], completion="b"), "prompt") == [system, *turns]
    assert to_conversation(row(messages=turns, id=3), "messages") == turns
    assert to_conversation(row(text="a"), "text") == "a"
