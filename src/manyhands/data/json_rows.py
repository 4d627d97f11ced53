"""Rows of a .json file, read a value at a time: a list of objects, objects one after the other, or an object that holds
rows.

A list is never in memory whole. An object at the top is: it may be one row, rows under one key (``{"data": [...]}``),
or columns (``{"question": [...], "answer": [...]}``), so it is bounded by ``MAX_OBJECT_BYTES``. Knows no format of
rows, except that turns of one conversation are no rows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from manyhands.core.errors import UserError
from manyhands.core.files import describe_json_fault
from manyhands.data.files import open_data
from manyhands.data.findings import Findings
from manyhands.data.rows import Part, Row
from manyhands.data.text_rows import count_fault, fault_of

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
        self._decoder = json.JSONDecoder()
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
            raise _Broken(f"not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x})") from None
        self._buffer, self._position = kept + text, 0
        return True


def read_json(part: Part, findings: Findings) -> Iterator[Row]:
    with open_data(Path(part.file)) as file:
        scanner = _Scanner(file)
        try:
            if scanner.peek() == "[":
                values = _iterate_list(scanner)
            else:
                values = _iterate_values(scanner, part.file)
            for value, text, line in values:
                if (fault := fault_of(value, text)) is not None:
                    findings.add(part.file, line, fault)
                else:
                    yield Row(value, part.file, line)
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
            yield row, text if row is value or "\\u" in text else "", line
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
