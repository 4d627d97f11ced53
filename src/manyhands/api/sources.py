"""Rows in memory as a source of a run: written once, to a file named by its content. Imports no torch.

A table of Arrow (a ``datasets.Dataset`` is one) is written as it is and read as Arrow files are; other rows are written
as JSON lines.
"""

import base64
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from manyhands.core.errors import UserError
from manyhands.core.files import hash_files
from manyhands.data.read.hub_sets import STREAMED_ROWS, write_tables
from manyhands.data.read.text_files import keep_unique

FOLDER = "memory"  # in data.cache
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")  # of Pillow's images, which PNG holds without a loss


def write_rows(data: Any, cache: Path, name: str) -> str:
    """The path that names ``data`` in a run: its own if it is a path or ``hub:OWNER/NAME``, else that of a file below
    ``cache`` that holds its rows.

    ``data``: a list or another iterable of dicts, a function that returns one, a ``datasets.Dataset``, a pandas
    ``DataFrame``. Images may be those of Pillow. ``name``: of the parameter, for messages and for the file. The same
    rows give the same file, which is not written again. Raises ``UserError`` with the row and the column of what JSON
    cannot hold.
    """
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data)
    folder = cache.expanduser() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tables = _list_tables(data)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            count = _write_lines(data, name, file) if tables is None else write_tables(tables, file)
            file.flush()
            os.fsync(file.fileno())
        if count == 0:
            raise UserError(
                f"{name} has no rows",
                where=type(data).__name__,
                why="an iterator that was read before is empty" if isinstance(data, Iterator) else "",
                fix="give rows; a generator can be read once: give the function that makes it",
            )
        digest = hash_files([Path(temporary)])[Path(temporary)]
        path = folder / f"{name}-{digest[:16]}.{'jsonl' if tables is None else 'arrow'}"
        if not path.exists():
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    return str(path)


def _list_tables(data: Any) -> Iterator[Any] | None:
    """The Arrow tables of a ``datasets.Dataset``, a stream of one whose types are known, a pyarrow or polars table;
    None where there are none, or where a transform of the user's makes the rows.
    """
    kind = f"{type(data).__module__}.{type(data).__name__}"
    if kind.startswith("polars."):
        data, kind = data.to_arrow(), "pyarrow."
    if kind.startswith("pyarrow.") and hasattr(data, "to_batches"):
        return iter([data])
    if not kind.startswith("datasets.") or isinstance(data, Mapping) or data.features is None:
        return None
    format = getattr(data, "format", {})  # a stream has none
    if format.get("type") == "custom":
        return None
    columns = {"columns": format["columns"]} if format.get("columns") else {}
    tables = data.with_format("arrow", **columns).iter(batch_size=STREAMED_ROWS)
    return (table.replace_schema_metadata(None) for table in tables)


def _write_lines(data: Any, name: str, file: BinaryIO) -> int:
    count = 0
    for count, row in enumerate(list_rows(data, name), start=1):
        file.write(_encode(row, count, name))
    return count


def list_rows(data: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The rows of whatever holds them."""
    kind = f"{type(data).__module__}.{type(data).__name__}"
    if kind.startswith("pandas."):
        yield from _frame_rows(data)
        return
    if isinstance(data, Mapping):
        splits = kind.startswith("datasets.")
        raise UserError(
            f"{name} is a {type(data).__name__}, not rows",
            why=f"it has the {'splits' if splits else 'keys'} {', '.join(map(str, list(data)[:5]))}",
            fix=f"give one split, such as data[{next(iter(data), 'train')!r}]" if splits else "give a list of dicts",
        )
    if isinstance(data, Callable) and not isinstance(data, Iterable):  # type: ignore[arg-type]
        data = data()
    if not isinstance(data, Iterable):
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UserError(
                f"{name} is a {type(data).__name__}, not rows",
                fix="give a list of dicts, a datasets.Dataset, a pandas DataFrame, an iterable of dicts, or a path",
            )
        data = map(data.__getitem__, range(len(data)))
    yield from data


def _frame_rows(frame: Any) -> Iterator[dict[str, Any]]:
    """Missing values of pandas, which are NaN, NaT and NA, are null."""
    if not hasattr(frame, "columns"):
        raise UserError("a pandas Series is one column, not rows", fix="give the DataFrame")
    columns = [str(column) for column in frame.columns]
    if twice := next((column for index, column in enumerate(columns) if column in columns[:index]), None):
        raise UserError(f"two columns of the DataFrame have the name {twice}", fix="rename one of them")
    missing = frame.isna()
    for values, nulls in zip(
        frame.itertuples(index=False, name=None), missing.itertuples(index=False, name=None), strict=True
    ):
        yield {
            column: None if null is True or getattr(null, "item", lambda: None)() is True else value
            for column, value, null in zip(columns, values, nulls, strict=True)
        }


def _encode(row: Any, number: int, name: str) -> bytes:
    if not isinstance(row, Mapping):
        raise UserError(
            f"{name} has a row that is a {type(row).__name__}, not a dict",
            where=f"row {number}",
            fix='give dicts by column, such as {"text": ...} or {"prompt": ..., "completion": ...}',
        )
    plain: dict[str, Any] = {}
    for column, value in row.items():
        try:
            if str(column) in plain:
                raise ValueError(f"another key is {str(column)!r} as text, too")
            plain[str(column)] = _plain(value)
        except ValueError as error:
            raise UserError(
                f"{name} has a value that cannot be written as JSON",
                where=f"row {number}, column {column!r}",
                why=str(error),
                fix="convert it to text, numbers, lists or dicts, or leave the column out",
            ) from None
    return json.dumps(plain, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Text, numbers, lists and dicts; numpy's are converted. ValueError for anything else."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("it is not valid Unicode text") from None
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no number")
        return value
    if isinstance(value, Mapping):
        return keep_unique([(str(key), _plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy's scalars and arrays, tensors
        return _plain(value.tolist())
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value).__module__.startswith("PIL."):
        return _plain(_encode_image(value))
    raise ValueError(f"it is a {type(value).__module__}.{type(value).__name__}")


def _encode_image(image: Any) -> bytes:
    """A Pillow image as a file of a format that loses nothing."""
    file = io.BytesIO()
    image.save(file, "PNG" if image.mode in PNG_MODES else "TIFF", exif=image.getexif())
    return file.getvalue()
