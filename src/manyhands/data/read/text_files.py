"""Rows of text files: JSONL, JSON, CSV and TSV, plain documents. One generator a kind, each bounded by its longest row.

| kind | a row is |
|---|---|
| jsonl | one JSON object a line; blank lines are skipped |
| json | an object of a list, or of several one after the other; or one that an object at the top holds |
| csv | a record below the header; the separator is a tab in .tsv files, else the header's own of ``, ; tab |`` |
| text | a document ``{"text": ...}``; documents are separated by blank lines |

A first column of a CSV file that has numbers and no name is pandas' index: it is called ``Unnamed: 0``, as pandas calls
it, and no format reads it.

A .json file is read a value at a time: a list is never in memory whole. An object at the top is: it may be one row,
rows under one key (``{"data": [...]}``), or columns (``{"question": [...], "answer": [...]}``), so it is bounded by
``MAX_OBJECT_BYTES``. What is wrong with a line becomes a finding, and reading continues. Knows no format of rows,
except that turns of one conversation are no rows.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from manyhands.core.errors import UserError
from manyhands.core.files import describe_json_fault
from manyhands.core.units import count_of
from manyhands.data.read.files import MAX_LINE_BYTES, NOT_UTF8, FilePart, Findings, Row, open_data, read_lines

SEPARATORS = ",;\t|"
INDEX = "Unnamed: 0"
MAX_VALUES = 16 << 20  # of one JSON text; each is an object of some 64 bytes, however short it is written


def keep_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError where a key stands twice, of which only one value could be used."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return fields


def parse_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError (of keys that stand twice, too) or RecursionError."""
    return json.loads(text, object_pairs_hook=keep_unique)


def drop_nulls(value: Any) -> Any:
    """A value inside a row without the nulls of its objects. Arrow's structs cannot tell them from fields that are not
    there, and the same data is to give the same rows whatever it is stored in. May raise RecursionError.
    """
    if isinstance(value, dict):
        return {name: drop_nulls(entry) for name, entry in value.items() if entry is not None}
    return [drop_nulls(entry) for entry in value] if isinstance(value, list) else value


def walk(value: Any) -> Iterator[Any]:
    """A value and all in it but key names, without recursion: rows may nest as deeply as JSON allows."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def find_inexpressible(value: Any) -> str | None:
    """The first part of a value that JSON cannot express, such as NaN or a date, as text; None where there is none."""

    def expresses(part: Any) -> bool:
        return isfinite(part) if isinstance(part, float) else part is None or isinstance(part, (str, int, dict, list))

    return next((f"{part!r:.60}" for part in walk(value) if not expresses(part)), None)


def read_jsonl(part: FilePart, findings: Findings) -> Iterator[Row]:
    for number, text in read_lines(Path(part.file), findings, part.start, part.stop, part.first_line):
        if text.isspace() or not text:
            continue
        if (fault := count_fault(text)) is not None:
            findings.add(part.file, number, fault)
            continue
        try:
            fields = parse_value(text.rstrip())  # of a line that ends too early, the fault is not in a second line
        except json.JSONDecodeError as error:
            findings.add(part.file, number, f"broken JSON: {describe_json_fault(error)} at column {error.colno}")
            continue
        except (ValueError, RecursionError) as error:  # a number of too many digits; nesting without end
            findings.add(part.file, number, f"broken JSON: {error}")
            continue
        yield from make_row(fields, text, part.file, number, findings)


def count_fault(text: str) -> str | None:
    """Why a JSON text is not read: more values than memory is for. Strings with many commas count as that, too."""
    if len(text) <= MAX_VALUES or text.count(",") + text.count("[") + text.count("{") <= MAX_VALUES:
        return None
    return f"more than {MAX_VALUES:,} values in one row: divide it"


def make_row(fields: Any, text: str, file: str, line: int, findings: Findings) -> Iterator[Row]:
    """The row of a parsed JSON value, or none and a finding; ``text`` is what it was parsed from."""
    if not isinstance(fields, dict):
        kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
        findings.add(file, line, f"a row must be an object, this is {kinds.get(type(fields), 'null')}")
        return
    if "\\ud" in text.lower() and not is_encodable(fields):
        findings.add(file, line, "half of a surrogate pair (\\ud800 to \\udfff) stands alone: not a character")
        return
    if "null" in text:
        try:
            fields = {name: drop_nulls(value) for name, value in fields.items()}
        except RecursionError:
            findings.add(file, line, "the row is nested too deeply")
            return
    yield Row(fields, file, line)


def is_encodable(value: Any) -> bool:
    """Whether every string in a JSON value consists of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def read_text(part: FilePart, findings: Findings) -> Iterator[Row]:
    document: list[str] = []
    begin, num_characters = 1, 0
    for number, line in chain(read_lines(Path(part.file), findings, part.start, part.stop, part.first_line), [(0, "")]):
        if line.strip():
            if not document:
                begin, num_characters = number, 0
            document.append(line.rstrip("\r\n"))
            num_characters += len(line)
            if num_characters > MAX_LINE_BYTES or len(document) > MAX_VALUES:
                bounds = f"{MAX_LINE_BYTES >> 20} MiB or {MAX_VALUES:,} lines"
                fault = f"the document is longer than {bounds}: divide it by blank lines"
                findings.add(part.file, begin, fault, stops=True)
                return
        elif document:
            yield Row({"text": "\n".join(document)}, part.file, begin)
            document = []


def count_documents(part: FilePart, findings: Findings) -> int:
    """Documents of a part of a text file, of any length: memory holds a line."""
    lines = read_lines(Path(part.file), findings, part.start, part.stop, part.first_line)
    return sum(is_text for is_text, _ in groupby(lines, lambda numbered: bool(numbered[1].strip())))


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


def read_csv(part: FilePart, findings: Findings) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE_BYTES)  # the module's own limit is 128 KiB, for all readers of the process
    path = Path(part.file)
    lines = _Lines(path, findings)
    is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
    separator = "\t" if is_tsv else _find_separator(lines.first)
    if named := re.fullmatch(r'"?sep=(.)"?\s*', lines.first):  # for Excel, in front of the header
        separator = named[1]
        next(lines)
    records = csv.reader(lines, delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        begin = lines.number + 1
        try:
            record = next(records, None)
        except csv.Error as error:
            fault = str(error)
            if fault.startswith("new-line character"):  # the rest is advice to programmers
                fault = "a carriage return without a line feed; where all lines end so: tr '\\r' '\\n' < OLD > NEW"
            findings.add(part.file, begin, f"broken CSV: {fault}", stops=header is None)
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
            findings.add(part.file, begin, f"{count_of(len(record), 'field')}, but the header has {len(header)}")
        elif header[0] == INDEX and not record[0].strip().isdecimal():
            raise _nameless(header, path, begin)
        else:
            yield Row(dict(zip(header, record, strict=True)), part.file, begin)


def _find_separator(header: str) -> str:
    """The separator that stands most often in the header outside quotes, a comma where none does."""
    outside = "".join(header.split('"')[::2])
    return max(SEPARATORS, key=lambda separator: (outside.count(separator), separator == ","))


def _check_header(names: list[str], path: Path, line: int) -> list[str]:
    names = [name.strip() or INDEX * (index == 0) for index, name in enumerate(names)]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if "" in names:
        raise _nameless(names, path, line)
    if twice is not None:
        raise UserError(
            "two columns have the same name",
            where=f"{path}:{line}",
            why=f"the header is: {', '.join(names)}",
            fix="name every column in the first line",
        )
    return names


def _nameless(names: list[str], path: Path, line: int) -> UserError:
    return UserError(
        "a column has no name",
        where=f"{path}:{line}",
        why=f"the header is: {', '.join(names)}; only the first one may have none, where it holds numbers (the index "
        "that pandas writes)",
        fix="name every column in the first line, or write the file with index=False",
    )


CHUNK_BYTES = 1 << 20
MAX_OBJECT_BYTES = 256 << 20
BLANKS = re.compile(r"[ \t\r\n]*")
TURNS = ("messages", "conversations")  # a list under such a key is one conversation
CUT_CHARACTERS = 16  # an error so near to the end of what was read may be due to the end


class _Broken(ValueError):
    """The text is no JSON from here on; the message says why."""


class _Scanner:
    """JSON values of a stream of UTF-8, one after the other, with the lines they begin at."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decode = file, codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decoder = json.JSONDecoder(object_pairs_hook=keep_unique)
        self._buffer, self._position, self._ended = "", 0, False
        self.line = 1  # of the position
        self.max_characters = MAX_OBJECT_BYTES

    def peek(self) -> str:
        """The next character that is no blank, which stays; nothing at the end."""
        while True:
            self._advance(BLANKS.match(self._buffer, self._position).end())  # type: ignore[union-attr]
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read():
                return ""

    def skip(self) -> None:
        self._advance(self._position + 1)

    def value(self) -> tuple[Any, str, int]:
        """(value, its text, line). Reads on, twice as much each time, while the value may only be cut off."""
        self.peek()
        line = self.line
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
                if end < len(self._buffer) or not self._read():  # a number at the end may go on
                    text = self._buffer[self._position : end]
                    self._advance(end)
                    return value, text, line
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._buffer) - CUT_CHARACTERS or error.msg.startswith(
                    "Unterminated string"
                )
                if not (near_end and self._read()):
                    self._advance(min(error.pos, len(self._buffer)))
                    raise _Broken(f"broken JSON: {describe_json_fault(error)}") from None
            except (ValueError, RecursionError) as error:
                raise _Broken(f"broken JSON: {error}") from None

    def _advance(self, position: int) -> None:
        self.line += self._buffer.count("\n", self._position, position)
        self._position = position

    def _read(self) -> bool:
        """Reads on; false at the end of the file."""
        if self._ended:
            return False
        kept = self._buffer[self._position :]
        if len(kept) > self.max_characters:
            raise _Broken(f"one value is longer than {self.max_characters >> 20} MiB: write the rows as JSONL")
        if (fault := count_fault(kept)) is not None:
            raise _Broken(f"{fault}, or write the rows as JSONL")
        raw = self._file.read(max(CHUNK_BYTES, len(kept)))
        self._ended = not raw
        try:
            text = self._decode(raw, self._ended)
        except UnicodeDecodeError as error:
            self._advance(len(self._buffer))
            self.line += error.object.count(b"\n", 0, error.start)
            raise _Broken(f"{NOT_UTF8}: {error.reason} (byte 0x{error.object[error.start]:02x})") from None
        self._buffer, self._position = kept + text, 0
        return True


def read_json(part: FilePart, findings: Findings) -> Iterator[Row]:
    with open_data(Path(part.file)) as file:
        scanner = _Scanner(file)
        try:
            if scanner.peek() == "[":
                values = _iterate_list(scanner)
            else:
                values = _iterate_values(scanner, part.file)
            for value, text, line in values:
                yield from make_row(value, text, part.file, line, findings)
        except _Broken as error:
            findings.add(part.file, scanner.line, str(error), stops=True)


def _iterate_list(scanner: _Scanner) -> Iterator[tuple[Any, str, int]]:
    scanner.skip()
    if scanner.peek() == "]":
        scanner.skip()
    else:
        while True:
            yield scanner.value()
            following = scanner.peek()
            if following not in (",", "]"):
                raise _Broken(
                    "broken JSON: the list is not closed" if not following else "broken JSON: a comma or ] is missing"
                )
            scanner.skip()
            if following == "]":
                break
    if scanner.peek():
        raise _Broken("broken JSON: something follows the list")


def _iterate_values(scanner: _Scanner, file: str) -> Iterator[tuple[Any, str, int]]:
    if not scanner.peek():
        return
    value, text, line = scanner.value()
    if scanner.peek():  # objects one after the other
        yield value, text, line
        while scanner.peek():
            yield scanner.value()
    elif isinstance(value, dict):
        for row in _rows_inside(value, file):
            yield row, text if row is value or "\\u" in text or "null" in text else "", line
    else:
        yield value, text, line


def _rows_inside(value: dict[str, Any], file: str) -> list[Any]:
    """The rows that a single object holds: itself, those of its only list of objects, or those of its columns."""
    lists = {name: entry for name, entry in value.items() if isinstance(entry, list)}
    if any(isinstance(value.get(name), list) and all(isinstance(turn, dict) for turn in value[name]) for name in TURNS):
        return [value]
    of_objects = [name for name, entry in lists.items() if entry and all(isinstance(row, dict) for row in entry)]
    if len(of_objects) == 1 and len(lists) == 1:
        return lists[of_objects[0]]
    if len(lists) < len(value) or not lists:
        return [value]
    lengths = {name: len(entry) for name, entry in lists.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name}: {length:,}" for name, length in lengths.items())
        raise UserError(
            "the columns of the JSON file are not equally long",
            where=file,
            why=said,
            fix="give every column as many values",
        )
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
