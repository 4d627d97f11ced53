"""From what a run file says about its data to rows: which files, in which parts, row by row. Knows no tokenizer.

A source is a file, a folder of files of one kind, a folder that ``save_to_disk`` wrote, or a data set of the hub. Its
rows have one order, whatever the number of parts it is read in. What is wrong is gathered: up to 20 places as
``file:line: reason``.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from manyhands.config.schema import DataSection, Source
from manyhands.config.sources import SplitSlice, parse_split
from manyhands.core.errors import UserError
from manyhands.data.read.arrow_files import read_arrow, read_parquet, split_arrow, split_parquet
from manyhands.data.read.files import (
    BINARY_KINDS,
    KIND_NAMES,
    NOT_UTF8,
    FilePart,
    Findings,
    Row,
    check_file,
    is_packed_data,
    kind_of,
    split_lines,
    unpacked_bytes,
)
from manyhands.data.read.hub_sets import fetch_set, is_hub, list_saved_set
from manyhands.data.read.text_files import count_documents, read_csv, read_json, read_jsonl, read_text

READERS: dict[str, Callable[[FilePart, Findings], Iterator[Row]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "text": read_text,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
FIXES = {
    "jsonl": "write one JSON object a line, in UTF-8",
    "json": "write a list of JSON objects, in UTF-8",
    "csv": "write a header and as many fields in each record, quoted where they hold separators, in UTF-8",
    "text": "save the file as UTF-8",
}
Use = Literal["train", "validation", "set"]  # a set is one of evaluate.data
MIN_PART_BYTES = 1 << 20  # less is not worth a part of its own
# Words in file names that say which split a file belongs to.
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "valid": "validation", "validation": "validation",
               "val": "validation", "dev": "validation", "eval": "validation"}  # fmt: skip


@dataclass(frozen=True)
class ResolvedSource:
    """A source of a run: its files, and how its rows are read, with what it does not say itself taken from ``data``.

    Resolved once in a preparation, whose stages each take what they need of it.
    """

    name: str
    path: str
    use: Use
    split: str
    slices: tuple[tuple[SplitSlice, tuple[Path, ...]], ...]  # of the split, with the files of each in their order
    format: str
    fields: dict[str, str]
    ignore: tuple[str, ...]
    roles: dict[str, str]
    drop_system: bool
    too_long: str
    weight: float
    max_samples: int | None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for _, files in self.slices for file in files)


def resolve_sources(data: DataSection, sets: Mapping[str, str] = MappingProxyType({})) -> tuple[ResolvedSource, ...]:
    """The sources of ``data.train``, of ``data.validation``, and of ``evaluate.data``: ``sets``, a path by name.

    Lists their files and fetches those of the hub. Raises UserError.
    """
    return tuple(resolve_source(source, data, name, use) for use, name, source in list_sources(data, sets))


def list_sources(data: DataSection, sets: Mapping[str, str]) -> list[tuple[Use, str, Source]]:
    """(use, name, source) of each in their order; as ``resolve_sources``, but reads no file."""
    train, validation = name_sources(data.train), name_sources(data.validation or ())
    listed: list[tuple[Use, str, Source]] = [("train", name, source) for name, source in train]
    listed += [("validation", name, source) for name, source in validation]
    return [*listed, *(("set", name, Source(path=path)) for name, path in sets.items())]


def name_sources(value: str | Sequence[str | Source]) -> list[tuple[str, Source]]:
    """Sources by name, by default the file, folder or data set, then ``-2``. UserError for equal given names."""
    sources = [
        Source(path=item) if isinstance(item, str) else item for item in ((value,) if isinstance(value, str) else value)
    ]
    given = [source.name for source in sources if source.name is not None]
    if twice := next((name for index, name in enumerate(given) if name in given[:index]), None):
        raise UserError(f"two sources have the name {twice}", where="data", fix="give each another name")
    named: dict[str, Source] = {}
    for source in sources:
        name = stem = source.name or _stem(source.path)
        number = 2
        while source.name is None and (name in given or name in named):
            name, number = f"{stem}-{number}", number + 1
        named[name] = source
    return list(named.items())


def resolve_source(
    value: Source | str | Path, data: DataSection | None = None, name: str = "", use: Use = "train"
) -> ResolvedSource:
    """One source with its files, each checked; those of the hub are fetched for it. Raises UserError."""
    source = value if isinstance(value, Source) else Source(path=str(value))
    data = data or DataSection(train=source.path)
    format = source.format or data.format
    return ResolvedSource(
        name or source.name or _stem(source.path),
        source.path,
        use,
        source.split,
        tuple((rows, _list_split(source, rows, format)) for rows in _read_split(source)),
        format,
        dict(data.fields if source.fields is None else source.fields),
        data.ignore if source.ignore is None else source.ignore,
        dict(source.roles),
        source.drop_system,
        source.too_long or data.too_long,
        source.weight,
        source.max_samples,
    )


def _stem(path: str) -> str:
    name = path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
    stem = name.rsplit(".", 1)[0] if kind_of(Path(name)) else name
    return stem.removeprefix("hub:") or "rows"


def _read_split(source: Source) -> tuple[SplitSlice, ...]:
    """The slices that ``source.split`` names. Raises UserError."""
    try:
        slices = parse_split(source.split)
    except ValueError as error:
        raise UserError(
            "the split cannot be read", where=f"{source.path}, split {source.split}", why=str(error)
        ) from error
    if len(slices) > 1 and not is_hub(source.path) and not (Path(source.path) / "dataset_dict.json").is_file():
        raise UserError(
            "only a data set with several splits can join them",
            where=f"{source.path}, split {source.split}",
            fix="list the files as sources of their own",
        )
    return slices


def _list_split(source: Source, rows: SplitSlice, format: str) -> tuple[Path, ...]:
    """The files of a slice, in the order they are read."""
    if is_hub(source.path):
        return fetch_set(source, rows)
    path = Path(source.path).expanduser()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error
    files = tuple(map(check_file, _list_folder(path, rows.name) if is_folder else (path,)))
    if any(kind_of(file) == "text" for file in files) and format not in ("auto", "text"):
        raise UserError(
            f"a .txt file holds plain text, but its format is {format}",
            where=str(files[0]),
            fix="give a .jsonl file, or set data.format: text and task: cpt",
        )
    return files


def _list_folder(folder: Path, split: str) -> tuple[Path, ...]:
    """The data files in a folder and below it, sorted; hidden ones and other kinds of files are left out."""
    saved = list_saved_set(folder, split)
    if saved is not None:
        return saved
    found = [path for path in _walk(folder) if path.is_file()]
    files = sorted(filter(kind_of, found))
    if packed := sorted(filter(is_packed_data, found)):
        raise UserError("the folder holds a packed data file", where=str(packed[0]), fix="unpack it, or pack it as .gz")
    if not files:
        raise UserError(
            "the folder holds no data files", where=str(folder), fix=f"name a file that ends in {KIND_NAMES}"
        )
    by_kind = {kind_of(file): file.relative_to(folder) for file in files}
    if len(by_kind) > 1:
        why = f"such as {', '.join(str(file) for file in by_kind.values())}"
        raise UserError(
            "the folder holds several kinds of data files", where=str(folder), why=why, fix="name the files in a list"
        )
    words = {file: re.findall(r"[^\W\d_]+", str(file.relative_to(folder)).lower()) for file in files}
    by_split = {SPLIT_WORDS[word]: file for file in files for word in words[file] if word in SPLIT_WORDS}
    if len(by_split) > 1:
        why = f"such as {', '.join(str(file.relative_to(folder)) for file in by_split.values())}"
        raise UserError(
            "the folder holds several splits of the data",
            where=str(folder),
            why=why,
            fix="name the files to read in a list",
        )
    return tuple(files)


def _walk(folder: Path) -> Iterator[Path]:
    """What is in a folder and below it, linked folders too, each once; hidden ones are left out."""

    def refuse(error: OSError) -> None:  # without it the files of such a folder would be missing without a word
        raise UserError("the data folder cannot be read", where=str(error.filename), why=str(error)) from error

    seen: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        is_new = (real := os.path.realpath(root)) not in seen  # a link may lead back to a folder above it
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        yield from (Path(root, name) for name in files if is_new and not name.startswith("."))


def split_source(source: ResolvedSource, num_parts: int) -> list[FilePart]:
    """Parts that hold every row of the source once, in order, about ``num_parts`` of a like size (one at least for each
    file).

    JSONL is divided at the ends of lines, text at blank lines, Parquet between row groups, Arrow between record
    batches; other kinds, and packed files, are one part each. What could not be divided far enough is marked as large.
    Raises UserError where a file cannot be read.
    """
    parts: list[FilePart] = []
    sizes = {file: unpacked_bytes(file) for file in source.files}
    wanted_bytes = max(MIN_PART_BYTES, sum(sizes.values()) / max(1, num_parts))
    for rows, files in source.slices:
        pieces = [piece for file in files for piece in _split_file(file, max(1, round(sizes[file] / wanted_bytes)))]
        parts += pieces if rows.is_whole else _slice_parts(pieces, rows)
    if not parts:
        raise UserError(
            "the split holds no rows", where=f"{source.path}, split {source.split}", fix="choose other bounds"
        )
    return parts


def _slice_parts(parts: Sequence[FilePart], rows: SplitSlice) -> list[FilePart]:
    """The parts that hold rows of a slice, each with those to skip and to take. Rows are counted as far as needed."""
    counts = {index: count_rows(part) for index, part in enumerate(parts) if rows.needs_total}
    first, behind = rows.bounds(sum(counts.values()) if rows.needs_total else sys.maxsize)
    kept, passed = [], 0
    for index, part in enumerate(parts):
        if passed >= behind:
            break
        if index not in counts and index < len(parts) - 1:
            counts[index] = count_rows(part)
        num_rows = counts.get(index, sys.maxsize)  # of the last part, whose end its reader finds
        skip, take = max(0, first - passed), behind - passed
        if skip < min(num_rows, take):
            kept.append(replace(part, skip=skip, take=take - skip if take < num_rows else None))
        passed += num_rows
    return kept


def count_rows(part: FilePart) -> int:
    """Rows of a part as of ``read_part``, but Parquet and Arrow without reading. UserError for the unreadable."""
    if part.kind in BINARY_KINDS and not part.file.lower().endswith(".gz"):
        path = Path(part.file)
        pieces = split_parquet(path) if part.kind == "parquet" else split_arrow(path)
        return sum(num_rows for num_rows, _ in pieces[part.start : part.stop])
    findings = Findings()
    if part.kind == "text":
        num_rows = count_documents(part, findings)
    else:
        num_rows = sum(1 for _ in READERS[part.kind](part, findings))
    if (error := explain_unreadable(findings, part.file)) is not None:
        raise error  # what is not counted would move the bounds of the slice
    return num_rows


def take_rows(part: FilePart, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of the part's slice; a text in pieces must be used up before the next row is asked for."""
    for number, row in enumerate(rows):
        if part.take is not None and number >= part.skip + part.take:
            return
        if number >= part.skip:
            yield row
        else:
            for value in row.fields.values():
                if isinstance(value, Iterator):
                    deque(value, maxlen=0)


def _split_file(file: Path, num_parts: int) -> list[FilePart]:
    kind = kind_of(file) or ""
    packed = file.name.lower().endswith(".gz")
    if num_parts == 1:
        return [FilePart(str(file), kind)]
    if kind in ("jsonl", "text") and not packed:
        return [
            FilePart(str(file), kind, *stretch) for stretch in split_lines(file, num_parts, after_blank=kind == "text")
        ]
    if kind in BINARY_KINDS and not packed:
        return _group(file, kind, split_parquet(file) if kind == "parquet" else split_arrow(file), num_parts)
    return [FilePart(str(file), kind, large=True)]


def _group(file: Path, kind: str, pieces: list[tuple[int, int]], num_parts: int) -> list[FilePart]:
    """Neighboring row groups or batches, as (rows, bytes), gathered into parts of a like number of bytes."""
    all_bytes = sum(num_bytes for _, num_bytes in pieces)
    parts: list[FilePart] = []
    start, first_row, row, num_bytes, taken_bytes = 0, 1, 1, 0, 0
    for index, (num_samples, size) in enumerate(pieces, start=1):
        row, num_bytes = row + num_samples, num_bytes + size
        if num_bytes * num_parts >= all_bytes * (len(parts) + 1) or index == len(pieces):
            large = (num_bytes - taken_bytes) * num_parts >= 2 * all_bytes
            parts.append(FilePart(str(file), kind, start, index, first_row, large))
            start, first_row, taken_bytes = index, row, num_bytes
    return parts or [FilePart(str(file), kind)]


def read_part(part: FilePart, findings: Findings | None = None) -> Iterator[Row]:
    """The rows of a part, in order. No row follows the first fault: the rest is only searched for more of them.

    Faults go into ``findings`` when the part ends; without it they are one UserError.
    """
    found = Findings()
    for row in take_rows(part, READERS[part.kind](part, found)):
        if not found.count:
            yield row
    if findings is None:
        if (error := explain_unreadable(found, part.file)) is not None:
            raise error
    else:
        findings.extend(found)


def explain_unreadable(findings: Findings, where: str) -> UserError | None:
    """A UserError for what could not be read, if anything."""
    fix = FIXES.get(kind_of(Path(where)) or "", "write the file again")
    if any(reason.startswith(NOT_UTF8) for reason in findings.faults):
        fix = (
            "save the file as UTF-8: iconv -f latin1 -t utf-8 (windows-1252 where it comes from Windows), or "
            "correct these lines"
        )
    return findings.make_error("{n} lines cannot be read", where=where, fix=fix)


def read_rows(value: ResolvedSource | Source | str | Path) -> Iterator[Row]:
    """All rows of a source, in order. A UserError at its end names up to 20 places that cannot be read."""
    source = value if isinstance(value, ResolvedSource) else resolve_source(value)
    findings, found_any, files = Findings(), False, source.files
    for part in split_source(source, 1):
        for row in read_part(part, findings):
            found_any = True
            if not findings.count:
                yield row
    if (error := explain_unreadable(findings, str(files[0]) if len(files) == 1 else source.path)) is not None:
        raise error
    if not found_any:
        raise UserError("the data holds no rows", where=source.path, fix="give a file with at least one row")
