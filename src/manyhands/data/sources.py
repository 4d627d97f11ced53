"""Reads rows from files, lazily and with their line numbers. Knows no format of rows, no tokenizer.

``.jsonl`` holds one JSON object a line; ``.txt`` holds documents separated by one or more blank lines, and each becomes
a row ``{"text": ...}``. Both are UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.data.findings import Findings
from manyhands.errors import UserError

UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row of a source; ``line`` counts from 1 and is where the row begins."""

    fields: dict[str, Any]
    file: str
    line: int


def read_rows(path: str | Path, format: str = "auto") -> Iterator[Row]:
    """Yields the rows of a file in order, skipping blank lines.

    ``format`` is the configured one (``data.format``): plain text needs ``auto`` or ``text``. At the first broken line
    no more rows are yielded; the rest of the file is only searched for further broken lines, and then one UserError
    names up to 20 of them. A missing, empty or unreadable file is a UserError at the first row asked for.
    """
    path = check_file(path)
    plain_text = path.suffix.lower() == ".txt"
    if plain_text and format not in ("auto", "text"):
        raise UserError(
            f"a .txt file holds plain text, but data.format is {format}",
            where=str(path),
            fix="give a .jsonl file, or set data.format: text and task: cpt",
        )
    findings = Findings()
    found_any = False
    for row in _read_text(path, findings) if plain_text else _read_jsonl(path, findings):
        found_any = True
        if not findings.count:
            yield row
    findings.raise_if_any(
        "{n} lines cannot be read",
        where=str(path),
        fix="write one JSON object a line, in UTF-8" if not plain_text else "save the file as UTF-8",
    )
    if not found_any:
        raise UserError("the file holds no rows", where=str(path), why="every line is blank", fix="give a file with at least one row")


def check_file(path: str | Path) -> Path:
    """The path, if it is a file with something in it that we know how to read; else a UserError."""
    path = Path(path).expanduser()
    try:
        if path.is_dir():
            raise UserError(
                "this is a folder, not a data file", where=str(path), fix="name one .jsonl file (or .txt for task cpt) in data.train"
            )
        if not path.exists():
            raise UserError("no such data file", where=str(path), fix="check data.train and data.validation in the run file")
        if path.stat().st_size == 0:
            raise UserError("the data file is empty", where=str(path), fix="give a file with at least one row")
        with path.open("rb") as file:
            start = file.read(512)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError("the data file is UTF-16", where=str(path), fix="save it as UTF-8")
    if path.suffix.lower() != ".txt" and start.removeprefix(UTF8_MARK).lstrip()[:1] == b"[":
        raise UserError(
            "the data file begins with a JSON list", where=f"{path}:1", why="one JSON object a line is read", fix="write it as JSONL"
        )
    return path


def _read_jsonl(path: Path, findings: Findings) -> Iterator[Row]:
    for number, text in _read_lines(path, findings):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            findings.add(str(path), number, f"broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
            continue
        except (ValueError, RecursionError) as error:  # a number of too many digits; nesting without end
            findings.add(str(path), number, f"broken JSON: {error}")
            continue
        if not isinstance(fields, dict):
            findings.add(str(path), number, f"a row must be an object, this is {_json_kind(fields)}")
        elif "\\ud" in text.lower() and not _is_encodable(fields):
            findings.add(str(path), number, "half of a surrogate pair (\\ud800 to \\udfff) stands alone: not a character")
        else:
            yield Row(fields, str(path), number)


def _read_text(path: Path, findings: Findings) -> Iterator[Row]:
    document: list[str] = []
    begin = 1
    for number, text in _read_lines(path, findings):
        if text.strip():
            if not document:
                begin = number
            document.append(text)
        elif document:
            yield Row({"text": "\n".join(document)}, str(path), begin)
            document = []
    if document:
        yield Row({"text": "\n".join(document)}, str(path), begin)


def _read_lines(path: Path, findings: Findings) -> Iterator[tuple[int, str]]:
    """Lines without their ends, decoded one by one so that a wrong byte has a line number."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(UTF8_MARK)
                try:
                    yield number, raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    findings.add(
                        str(path), number, f"not UTF-8: {error.reason} (byte 0x{raw[error.start]:02x} at column {error.start + 1})"
                    )
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error


def _is_encodable(fields: dict[str, Any]) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}[type(value)]
