"""Files of data as bytes and lines, what one row of them is, and the faults found in them. Knows no format of rows."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from manyhands.core.errors import UserError
from manyhands.core.files import similar_path

MAX_SHOWN = 20
MAX_PLACES = 5  # of one fault
NOT_UTF8 = "not UTF-8"


@dataclass
class Findings:
    """Counts faults, and keeps the first 20 different ones with the first places of each, in the order found."""

    count: int = 0
    faults: dict[str, tuple[int, list[tuple[str, int]]]] = field(default_factory=dict)  # reason: (rows with it, where)
    stopped: str = ""  # the place that nothing was read after

    def add(self, file: str, line: int, reason: str, *, stops: bool = False) -> None:
        """``stops``: nothing of the file was read after it."""
        self.count += 1
        if stops and not self.stopped:
            self.stopped = f"{file}:{line}"
        self._keep(reason, 1, [(file, line)])

    def extend(self, other: Findings) -> None:
        """Takes in what was found in the part that follows."""
        self.count += other.count
        for reason, (count, places) in other.faults.items():
            self._keep(reason, count, places)
        self.stopped = self.stopped or other.stopped

    def _keep(self, reason: str, count: int, places: list[tuple[str, int]]) -> None:
        if reason in self.faults or len(self.faults) < MAX_SHOWN:
            before, known = self.faults.get(reason, (0, []))
            self.faults[reason] = before + count, [*known, *places][:MAX_PLACES]

    @property
    def shown(self) -> list[str]:
        """A line ``file:line: reason`` for each kept fault, with more places where several rows have it."""
        return [_describe_fault(reason, count, places) for reason, (count, places) in self.faults.items()]

    def make_error(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> UserError | None:
        """A UserError with every kept finding, None without any; ``{n}`` in ``what`` becomes the count."""
        if not self.count:
            return None
        details = self.shown
        if left := self.count - sum(count for count, _ in self.faults.values()):
            details.append(f"and {left:,} more")
        if self.stopped:
            details.append(f"nothing after {self.stopped} was read: there may be more faults")
        return UserError(_count(what, self.count), where=where, why=why, fix=fix, details=details)


def _describe_fault(reason: str, count: int, places: list[tuple[str, int]]) -> str:
    file, line = places[0]
    if count == 1:
        return f"{file}:{line}: {reason}"
    others = [str(number) if path == file else f"{Path(path).name}:{number}" for path, number in places[1:]]
    more = ", ..." if count > len(places) else ""
    return f"{file}:{line}: {reason} ({count - 1:,} more: {', '.join(others)}{more})"


def _count(what: str, count: int) -> str:
    """``{n} rows are ...`` with its number: ``1 row is ...``."""
    if count == 1:
        what = re.sub(r"\{n\} (\w+)s( are)?\b", lambda found: f"1 {found[1]}" + " is" * bool(found[2]), what)
    return what.replace("{n}", f"{count:,}")


@dataclass(frozen=True)
class Row:
    """One row of a source. ``line`` counts from 1: where the row begins, in Parquet and Arrow files its number."""

    fields: dict[str, Any]
    file: str
    line: int


@dataclass(frozen=True)
class FilePart:
    """A stretch of one file that can be read alone, in another process too.

    ``start`` and ``stop`` count bytes in line-based files, row groups in Parquet and record batches in Arrow files;
    a ``stop`` of None is the end. ``first_line`` is the line, or row, that ``start`` lies at. ``large``: more than a
    process should read alone, though nothing in it can be found without reading what is before. Of its rows the first
    ``skip`` are left out, and no more than ``take`` are read.
    """

    file: str
    kind: str
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    large: bool = False
    skip: int = 0
    take: int | None = None


UTF8_MARK = b"\xef\xbb\xbf"
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
KIND_NAMES = ".jsonl, .json, .csv, .tsv, .parquet, .txt (also with .gz added), or a folder of one kind of them"
BINARY_KINDS = ("parquet", "arrow")
MAX_LINE_BYTES = 256 << 20  # one row is in memory whole; a longer line is a file without line ends
COUNT_CHUNK_BYTES = 8 << 20
# A .gz may unpack to so many times its size, or to so many bytes: text shrinks to a third or a tenth, and at most to
# 1/1032.
MAX_UNPACKED_RATIO = 200
FREE_UNPACKED_BYTES = 1 << 30
UNPACK_CHUNK_BYTES = 1 << 20
SIGNATURES = {  # what a file is, and what to do with it
    b"PAR1": ("a Parquet file", "let its name end in .parquet"),
    b"\x1f\x8b": ("packed with gzip", "let its name end in .gz"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unpack the archive, or save the spreadsheet as .csv"),
    b"\x28\xb5\x2f\xfd": ("packed with Zstandard", "unpack it"),
    b"BZh": ("packed with bzip2", "unpack it"),
    b"\xfd7zXZ": ("packed with xz", "unpack it"),
}
PACKED = (".zst", ".bz2", ".xz", ".zip", ".lz4")  # ends of names that are not unpacked


def kind_of(path: Path) -> str | None:
    """The kind of file that a name says; None where it says none."""
    name = path.name.lower().removesuffix(".gz")
    return KINDS.get(Path(name).suffix)


def is_packed_data(path: Path) -> bool:
    """Whether a name is that of a data file, packed in a way that is not unpacked here."""
    return path.suffix.lower() in PACKED and kind_of(path.with_suffix("")) is not None


def check_file(path: str | Path) -> Path:
    """The path, if it is a file with something in it of a kind and an encoding that can be read; else a UserError."""
    path = Path(path).expanduser()
    try:
        if not path.exists():
            raise UserError(
                "no such data file",
                where=str(path),
                fix=f"check data.train, data.validation and evaluate.data{similar_path(path)}",
            )
        if not path.is_file():
            raise UserError("this is no data file", where=str(path), fix=f"name a file that ends in {KIND_NAMES}")
        if path.stat().st_size == 0:
            raise UserError("the data file is empty", where=str(path), fix="give a file with at least one row")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error
    kind = kind_of(path)
    if kind is None:
        raise UserError(
            "what kind of data file this is cannot be told from its name",
            where=str(path),
            fix=f"unpack an archive, save a spreadsheet as .csv, or let the name end in {KIND_NAMES}",
        )
    if kind not in BINARY_KINDS:
        with open_data(path) as file:
            start = file.read(512)
        _check_text(path, start)
        if kind == "jsonl" and (begins := re.match(rb"\s*(\[|\{\s*\n)", start.removeprefix(UTF8_MARK))):
            what = "list" if begins[1] == b"[" else "object of several lines"
            raise UserError(
                f"the data file begins with a JSON {what}",
                where=f"{path}:1",
                why="a .jsonl file holds one JSON object a line",
                fix="write it as JSONL, or let its name end in .json",
            )
    return path


def _check_text(path: Path, start: bytes) -> None:
    # Latin letters in UTF-16 have a zero in every other byte; UTF-8 has none at all.
    has_zeros = len(start) >= 4 and (not any(start[:64:2]) or not any(start[1:64:2]))
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or has_zeros:
        raise UserError("the data file is UTF-16", where=str(path), fix="save it as UTF-8: iconv -f utf-16 -t utf-8")
    for signature, (what, fix) in SIGNATURES.items():
        if start.startswith(signature):
            raise UserError(
                "the data file is not the text that its name says",
                where=str(path),
                why=f"it is {what}",
                fix=fix,
            )


def unpacked_bytes(path: Path) -> int:
    """Bytes of the file; of a .gz what its end promises: too few with several members, or from 4 GiB on."""
    size = path.stat().st_size
    if not path.name.lower().endswith(".gz") or size < 4:
        return size
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return max(size, int.from_bytes(file.read(4), "little"))


class _Unpacking(io.RawIOBase):
    """The bytes of a .gz. Raises UserError once there are more than any text can be packed into a file of its size."""

    def __init__(self, path: Path, file: gzip.GzipFile) -> None:
        self._path, self._file, self._num_bytes = path, file, 0
        self._max_bytes = max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._num_bytes += count
        if self._num_bytes > self._max_bytes:
            raise UserError(
                f"the packed file unpacks to more than {self._max_bytes:,} bytes",
                where=str(self._path),
                why=f"the limit is {MAX_UNPACKED_RATIO} times its size, and {FREE_UNPACKED_BYTES >> 20:,} MiB "
                f"in any case",
                fix="if it is meant to be so large, unpack it (gunzip) and name the unpacked file",
            )
        return count


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """A file to read bytes from, unpacked where its name ends in .gz. What goes wrong in reading it is a UserError."""
    try:
        if path.name.lower().endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                yield cast(BinaryIO, io.BufferedReader(_Unpacking(path, packed), UNPACK_CHUNK_BYTES))
        else:
            with path.open("rb") as file:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            "the data file cannot be unpacked",
            where=str(path),
            why=str(error),
            fix="copy it again if it is damaged; if it is not packed, remove .gz from its name",
        ) from error
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error


def read_lines(
    path: Path,
    findings: Findings,
    start: int = 0,
    stop: int | None = None,
    first_line: int = 1,
    *,
    keep_broken: bool = False,
) -> Iterator[tuple[int, str]]:
    """(line number, line with its end) of the lines that begin in bytes [start, stop), decoded one by one.

    A line that is not UTF-8 becomes a finding; with ``keep_broken`` it is yielded too, with marks in place of the
    bytes.
    """
    position = start
    with open_data(path) as file:
        if start:
            file.seek(start)
        for number, raw in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=first_line):
            if stop is not None and position >= stop:
                return
            position += len(raw)
            if len(raw) > MAX_LINE_BYTES:
                findings.add(str(path), number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", stops=True)
                return
            if number == 1:
                raw = raw.removeprefix(UTF8_MARK)
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                findings.add(
                    str(path),
                    number,
                    f"{NOT_UTF8}: {error.reason} (byte 0x{raw[error.start]:02x} at column {error.start + 1})",
                )
                if keep_broken:
                    yield number, raw.decode("utf-8", errors="replace")


def split_lines(path: Path, num_parts: int, *, after_blank: bool = False) -> list[tuple[int, int, int]]:
    """(start, stop, first line) of up to ``num_parts`` stretches of bytes of a like size that begin where a line
    begins.

    With ``after_blank`` that line follows a blank one, so that no document of plain text is divided.
    """
    size = path.stat().st_size
    borders = [0]
    with open_data(path) as file:
        for index in range(1, num_parts):
            border = _next_line(file, max(size * index // num_parts, borders[-1], 1))
            if after_blank:
                file.seek(border)
                for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
                    border += len(line)
                    if line.isspace() and line.endswith(b"\n"):
                        break
            if borders[-1] < border < size:
                borders.append(border)
        first_lines = [1]
        file.seek(0)
        for start, stop in pairwise(borders):
            first_lines.append(first_lines[-1] + _count_line_ends(file, stop - start))
    return list(zip(borders, [*borders[1:], size], first_lines, strict=True))


def _next_line(file: BinaryIO, position: int) -> int:
    """Where the first line begins that does not begin before ``position``, which is not 0."""
    position -= 1
    file.seek(position)
    while chunk := file.read(1 << 16):
        found = chunk.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(chunk)
    return position


def _count_line_ends(file: BinaryIO, num_bytes: int) -> int:
    count = 0
    while num_bytes > 0 and (chunk := file.read(min(num_bytes, COUNT_CHUNK_BYTES))):
        count += chunk.count(b"\n")
        num_bytes -= len(chunk)
    return count
