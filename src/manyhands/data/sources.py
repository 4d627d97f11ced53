"""From what a run file says about its data to rows: which files, in which parts, row by row. Knows no tokenizer.

A source is a file, a folder of files of one kind, a folder that ``save_to_disk`` wrote, or a data set of the hub. Its
rows have one order, whatever the number of parts it is read in. What is wrong is gathered: up to 20 places as
``file:line: reason``. The library ``datasets`` is imported only to fetch a set: it leaves Arrow files in its own cache,
and those are read like any others, in several processes and without the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from manyhands.config.schema import DataSection, Source
from manyhands.core.errors import UserError
from manyhands.data.arrow_files import read_arrow, read_parquet, split_arrow, split_parquet
from manyhands.data.files import (
    BINARY_KINDS,
    KIND_NAMES,
    FilePart,
    Findings,
    Row,
    check_file,
    kind_of,
    split_lines,
    unpacked_bytes,
)
from manyhands.data.text_files import read_csv, read_json, read_jsonl, read_text

PREFIX = "hub:"
MIN_MAJOR = 4  # before, a data set could bring code that was run


def is_hub(path: str) -> bool:
    return path.startswith(PREFIX)


def fetch_set(source: Source) -> tuple[Path, ...]:
    """The Arrow files of one split of a hub data set, fetched where the cache does not hold them. Raises UserError."""
    if "[" in source.split or "%" in source.split:
        raise UserError(
            "a part of a split cannot be asked for",
            where=f"{source.path}, split {source.split}",
            fix="name the whole split, and set max_samples for a part of it",
        )
    return _fetch(source.path.removeprefix(PREFIX), source.subset, source.split, source.revision)


@lru_cache(maxsize=64)
def _fetch(name: str, subset: str | None, split: str, revision: str | None) -> tuple[Path, ...]:
    where = PREFIX + name + (f", subset {subset}" if subset else "") + f", split {split}"
    datasets = _import_datasets(where)
    try:
        found = datasets.load_dataset(name, subset, split=split, revision=revision, keep_in_memory=False)
        files = tuple(Path(entry["filename"]) for entry in found.cache_files)
    except Exception as error:  # the library, the network and the set's own files raise as they like
        why = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError("the data set cannot be loaded", where=where, why=why, fix=_advise(error, why)) from error
    if not files:
        raise UserError(
            "the data set has no files in the cache", where=where, fix="unset HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    return files


def _import_datasets(where: str) -> Any:
    fix = f"pip install 'datasets>={MIN_MAJOR}', or download the files and name their folder"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data sets of the hub need the package datasets", where=where, why=str(error), fix=fix
        ) from error
    if int(datasets.__version__.split(".")[0]) < MIN_MAJOR:
        raise UserError(
            "the package datasets is too old", where=where, why=f"it is version {datasets.__version__}", fix=fix
        )
    return datasets


def _advise(error: Exception, why: str) -> str:
    if "onfig name is missing" in why or "BuilderConfig" in why:
        return "choose one with `subset`"
    if "nknown split" in why:
        return "choose one with `split`"
    if type(error).__name__ == "DatasetNotFoundError":
        return "check the name (hub:OWNER/NAME); a set that is not public needs a token: `hf auth login`"
    return "check the network, or download the files and name their folder"


def list_saved_set(folder: Path, split: str) -> tuple[Path, ...] | None:
    """The Arrow files of a folder that ``save_to_disk`` wrote, those of ``split`` if it holds several; None for another
    folder.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits or not isinstance(split, str):
            raise UserError(
                "the saved data set has no such split",
                where=str(folder),
                why=f"its splits: {splits}",
                fix="set `split`",
            )
        folder = folder / split
    if not (folder / "state.json").is_file():
        return None
    state = _read_json(folder / "state.json")
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(
            "the saved data set is damaged", where=str(folder / "state.json"), why=f"no {error}", fix="save it again"
        ) from None
    return tuple(folder / name for name in names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "the saved data set is damaged", where=str(path), why=str(error), fix="save it again"
        ) from error
    return value if isinstance(value, dict) else {}


__all__ = [
    "FilePart",
    "Row",
    "Source",
    "check_file",
    "list_files",
    "read_part",
    "read_rows",
    "resolve_sources",
    "split_source",
]

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
MIN_PART_BYTES = 1 << 20  # less is not worth a part of its own
# Words in file names that say which split a file belongs to.
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "valid": "validation", "validation": "validation",
               "val": "validation", "dev": "validation", "eval": "validation"}  # fmt: skip


def resolve_sources(value: str | Sequence[str | Source], data: DataSection) -> tuple[Source, ...]:
    """``data.train`` or ``data.validation`` as sources, each with a name of its own, a format and fields. Reads no
    file.

    A source without a name is called by its file, folder or data set; a second of that name gets ``-2``. Two equal
    names that were given are a UserError.
    """
    given = (value,) if isinstance(value, str) else value
    sources = [Source(path=item) if isinstance(item, str) else item for item in given]
    asked = [source.name for source in sources if source.name is not None]
    if twice := next((name for index, name in enumerate(asked) if name in asked[:index]), None):
        raise UserError(f"two sources have the name {twice}", where="data", fix="give each another name")
    taken = set(asked)
    resolved = []
    for source in sources:
        name = source.name or _free_name(_stem(source.path), taken)
        taken.add(name)
        fields = data.fields if source.fields is None else source.fields
        ignore = data.ignore if source.ignore is None else source.ignore
        settled = {"name": name, "format": source.format or data.format, "fields": dict(fields), "ignore": ignore}
        resolved.append(source.model_copy(update=settled))
    return tuple(resolved)


def _stem(path: str) -> str:
    name = path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
    stem = name.rsplit(".", 1)[0] if kind_of(Path(name)) else name
    return stem.removeprefix("hub:") or "rows"


def _free_name(name: str, taken: set[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def list_files(source: Source) -> tuple[Path, ...]:
    """The files of a source in the order they are read, each checked. A hub data set is fetched for it. Raises
    UserError.
    """
    if is_hub(source.path):
        return fetch_set(source)
    path = Path(source.path).expanduser()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error
    files = tuple(map(check_file, _list_folder(path, source.split) if is_folder else (path,)))
    if any(kind_of(file) == "text" for file in files) and source.format not in ("auto", "text", None):
        raise UserError(
            f"a .txt file holds plain text, but its format is {source.format}",
            where=str(files[0]),
            fix="give a .jsonl file, or set data.format: text and task: cpt",
        )
    return files


def _list_folder(folder: Path, split: str) -> tuple[Path, ...]:
    """The data files in a folder and below it, sorted; hidden ones and other kinds of files are left out."""
    saved = list_saved_set(folder, split)
    if saved is not None:
        return saved
    inside = sorted(
        path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    files = [path for path in inside if path.is_file() and kind_of(path)]
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
    by_split = {split: file for file in files for split in _splits_of(file.relative_to(folder))}
    if len(by_split) > 1:
        why = f"such as {', '.join(str(file.relative_to(folder)) for file in by_split.values())}"
        raise UserError(
            "the folder holds several splits of the data",
            where=str(folder),
            why=why,
            fix="name the files to read in a list",
        )
    return tuple(files)


def _splits_of(path: Path) -> set[str]:
    words = "".join(letter if letter.isalpha() else " " for letter in str(path).lower()).split()
    return {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}


def split_source(source: Source, num_parts: int) -> list[FilePart]:
    """Parts that hold every row of the source once, in order, about ``num_parts`` of a like size (one at least for each
    file).

    JSONL is divided at the ends of lines, text at blank lines, Parquet between row groups, Arrow between record
    batches; other kinds, and packed files, are one part each. What could not be divided far enough is marked as large.
    Raises UserError where a file cannot be read.
    """
    files = list_files(source)
    sizes = list(map(unpacked_bytes, files))
    wanted_bytes = max(MIN_PART_BYTES, sum(sizes) / max(1, num_parts))
    parts = []
    for file, size in zip(files, sizes, strict=True):
        parts += _split_file(file, max(1, round(size / wanted_bytes)))
    return parts


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
    for row in READERS[part.kind](part, found):
        if not found.count:
            yield row
    if findings is None:
        raise_unreadable(found, part.file)
    else:
        findings.extend(found)


def raise_unreadable(findings: Findings, where: str) -> None:
    """A UserError for what could not be read, if anything."""
    kind = kind_of(Path(where)) or ""
    findings.raise_if_any("{n} lines cannot be read", where=where, fix=FIXES.get(kind, "write the file again"))


def read_rows(source: Source | str | Path) -> Iterator[Row]:
    """All rows of a source, in order. A UserError at its end names up to 20 places that cannot be read."""
    source = source if isinstance(source, Source) else Source(path=str(source))
    findings, found_any = Findings(), False
    files = list_files(source)
    for file in files:
        for row in read_part(FilePart(str(file), kind_of(file) or ""), findings):
            found_any = True
            if not findings.count:
                yield row
    raise_unreadable(findings, str(files[0]) if len(files) == 1 else source.path)
    if not found_any:
        raise UserError(
            "the file holds no rows",
            where=source.path,
            why="there is nothing but blank lines or a header",
            fix="give at least one row",
        )
