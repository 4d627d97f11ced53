"""Rows of text files: JSONL, CSV and TSV, plain documents. One generator a kind, each bounded by its longest row.

| kind | a row is |
|---|---|
| jsonl | one JSON object a line; blank lines are skipped |
| csv | a record below the header; the separator is a tab in .tsv files, else the header's own of ``, ; tab |`` |
| text | a document ``{"text": ...}``; documents are separated by blank lines |

What is wrong with a line becomes a finding, and reading goes on. Knows no format of rows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.files import describe_json_fault
from manyhands.data.files import MAX_LINE_BYTES, read_lines
from manyhands.data.findings import Findings
from manyhands.data.rows import Part, Row

SEPARATORS = ",;\t|"
MAX_VALUES = 16 << 20  # of one JSON text; each is an object of some 64 bytes, however short it is written


def read_jsonl(part: Part, findings: Findings) -> Iterator[Row]:
    for number, text in read_lines(Path(part.file), findings, part.start, part.stop, part.first_line):
        if text.isspace() or not text:
            continue
        if (fault := count_fault(text)) is not None:
            findings.add(part.file, number, fault)
            continue
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            findings.add(part.file, number, f"broken JSON: {describe_json_fault(error)} at column {error.colno}")
            continue
        except (ValueError, RecursionError) as error:  # a number of too many digits; nesting without end
            findings.add(part.file, number, f"broken JSON: {error}")
            continue
        if (fault := fault_of(fields, text)) is not None:
            findings.add(part.file, number, fault)
        else:
            yield Row(fields, part.file, number)


def count_fault(text: str) -> str | None:
    """Why a JSON text is not read: more values than memory is for. Strings with many commas count as that, too."""
    if len(text) <= MAX_VALUES or text.count(",") + text.count("[") + text.count("{") <= MAX_VALUES:
        return None
    return f"more than {MAX_VALUES:,} values in one row: divide it"


def fault_of(fields: object, text: str) -> str | None:
    """Why a parsed JSON value is no row; ``text`` is what it was parsed from."""
    if not isinstance(fields, dict):
        return f"a row must be an object, this is {_json_kind(fields)}"
    if "\\ud" in text.lower() and not is_encodable(fields):
        return "half of a surrogate pair (\\ud800 to \\udfff) stands alone: not a character"
    return None


def is_encodable(value: Any) -> bool:
    """Whether every string in a JSON value consists of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}[type(value)]


def read_text(part: Part, findings: Findings) -> Iterator[Row]:
    document: list[str] = []
    begin, num_characters = 1, 0
    for number, line in chain(read_lines(Path(part.file), findings, part.start, part.stop, part.first_line), [(0, "")]):
        if line.strip():
            if not document:
                begin, num_characters = number, 0
            document.append(line.rstrip("\r\n"))
            num_characters += len(line)
            if num_characters > MAX_LINE_BYTES or len(document) > MAX_VALUES:
                fault = f"the document is longer than {MAX_LINE_BYTES >> 20} MiB or {MAX_VALUES:,} lines: divide it by blank lines"
                findings.add(part.file, begin, fault, stops=True)
                return
        elif document:
            yield Row({"text": "\n".join(document)}, part.file, begin)
            document = []


class _Lines:
    """Lines as the csv module takes them, and the number of the last one it took."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._file, self._findings = str(path), findings
        self._lines = read_lines(path, findings, keep_broken=True)
        self.first: str = next((line for _, line in self._lines), "")
        self._waiting: str | None = self.first
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._waiting is not None:
            line, self._waiting, self.number = self._waiting, None, 1
        else:
            self.number, line = next(self._lines)
        if len(line) > MAX_VALUES and max(map(line.count, SEPARATORS)) > MAX_VALUES:
            self._findings.add(self._file, self.number, f"more than {MAX_VALUES:,} fields in one line")
            return "\n"
        return line


def read_csv(part: Part, findings: Findings) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE_BYTES)  # the module's own limit is 128 KiB, for all readers of the process
    path = Path(part.file)
    lines = _Lines(path, findings)
    is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
    records = csv.reader(lines, delimiter="\t" if is_tsv else _find_separator(lines.first), strict=True)
    header: list[str] | None = None
    while True:
        begin = lines.number + 1
        try:
            record = next(records, None)
        except csv.Error as error:
            findings.add(part.file, begin, f"broken CSV: {error}", stops=header is None)
            if header is None:
                return
            continue
        if record is None:
            return
        if not record or (len(record) == 1 and not record[0].strip()):
            continue  # a blank line
        if header is None:
            header = _check_header(record, path, begin)
        elif len(record) != len(header):
            findings.add(part.file, begin, f"{len(record)} fields, but the header has {len(header)}")
        else:
            yield Row(dict(zip(header, record, strict=True)), part.file, begin)


def _find_separator(header: str) -> str:
    """The separator that stands most often in the header outside quotes, a comma where none does."""
    outside = "".join(header.split('"')[::2])
    return max(SEPARATORS, key=lambda separator: (outside.count(separator), separator == ","))


def _check_header(names: list[str], path: Path, line: int) -> list[str]:
    names = [name.strip() for name in names]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None or "" in names:
        what = "two columns have the same name" if twice else "a column has no name"
        raise UserError(
            what,
            where=f"{path}:{line}",
            why=f"the header is: {', '.join(names)}",
            fix="name every column in the first line",
        )
    return names
