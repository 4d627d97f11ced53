"""Rows of Parquet and Arrow files as plain Python values. Reads a row group or record batch at a time. Knows no format of rows.

A struct's fields that are null are left out: such files give every struct all fields that any row has, so a null says
"not there" (``tool_calls`` of a message without any). Maps become objects.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from manyhands.data.files import open_data
from manyhands.data.findings import Findings
from manyhands.data.rows import Part, Row
from manyhands.errors import UserError

BATCH_ROWS = 512


def read_parquet(part: Part, findings: Findings) -> Iterator[Row]:
    with _open_parquet(Path(part.file)) as file:
        groups = list(range(part.start, file.num_row_groups if part.stop is None else part.stop))
        batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, use_threads=False)
        num_rows, promised = 0, sum(file.metadata.row_group(group).num_rows for group in groups)
        for row in _read_batches(part, batches, findings):
            num_rows += 1
            yield row
        if num_rows != promised:  # pages that are damaged may be passed over without an error
            raise ValueError(f"{num_rows:,} of {promised:,} rows are there")


def split_parquet(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each row group."""
    with _open_parquet(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def read_arrow(part: Part, findings: Findings) -> Iterator[Row]:
    with _open_arrow(Path(part.file)) as batches:
        wanted = (batch for index, batch in enumerate(batches) if index >= part.start and (part.stop is None or index < part.stop))
        yield from _read_batches(part, map(_validate, wanted), findings)


def _validate(batch: Any) -> Any:
    """The batch itself. Unlike Parquet's, the bytes of an Arrow file are used as they lie there: wrong offsets end the process."""
    batch.validate(full=True)
    return batch


def split_arrow(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each record batch; the file is mapped, so nothing of it is read but the headers."""
    with _open_arrow(path) as batches:
        return [(batch.num_rows, batch.get_total_buffer_size()) for batch in batches]


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with ExitStack() as stack, _explain(path):
        source: Any = path
        if path.name.lower().endswith(".gz"):  # it must be read from its end: unpacked into a file that has no name
            source = stack.enter_context(tempfile.TemporaryFile())
            with open_data(path) as packed:
                shutil.copyfileobj(packed, source)
            source.seek(0)
        file = stack.enter_context(pq.ParquetFile(source, pre_buffer=False))
        _check_columns(file.schema_arrow.names, path)
        yield file


@contextmanager
def _open_arrow(path: Path) -> Iterator[Iterator[Any]]:
    import pyarrow as pa

    with ExitStack() as stack, _explain(path):
        if path.name.lower().endswith(".gz"):
            source = pa.PythonFile(stack.enter_context(open_data(path)), mode="r")
        else:
            source = stack.enter_context(pa.memory_map(str(path)))
        magic = source.read(6) if source.seekable() else b""
        source.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            _check_columns(file.schema.names, path)
        else:
            stream = pa.ipc.open_stream(source)
            batches = iter(stream)
            _check_columns(stream.schema.names, path)
        yield batches


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Whatever pyarrow raises over a file is about that file: its errors share no base class."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            "the data file cannot be read", where=str(path), why=why, fix="write the file again: it is damaged or cut"
        ) from error


def _check_columns(names: list[str], path: Path) -> None:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UserError("two columns have the same name", where=str(path), why=f"the name is {twice}", fix="rename one of them")


def _read_batches(part: Part, batches: Iterator[Any], findings: Findings) -> Iterator[Row]:
    number = part.first_line
    for batch in batches:
        columns = [_read_column(batch.column(index), name, part.file, number, findings) for index, name in enumerate(batch.schema.names)]
        for offset, values in enumerate(zip(*columns, strict=True)):
            yield Row(dict(zip(batch.schema.names, values, strict=True)), part.file, number + offset)
        number += batch.num_rows


def _read_column(column: Any, name: str, file: str, first: int, findings: Findings) -> list[Any]:
    try:
        values = column.to_pylist()
    except Exception:  # bytes that are no text, a date beyond Python's: find which rows
        values = []
        for index in range(len(column)):
            try:
                values.append(column[index].as_py())
            except Exception as error:
                findings.add(file, first + index, f"column {name}: {error}")
                values.append(None)
    return [_to_plain(value, column.type) for value in values] if _is_nested(column.type) else values


def _is_nested(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_nested(kind)


def _to_plain(value: Any, kind: Any) -> Any:
    """A value of a nested type as JSON would give it: structs without their nulls, maps as objects."""
    import pyarrow.types as types

    if value is None or not types.is_nested(kind):
        return value
    if types.is_struct(kind):
        return {name: _to_plain(value[name], kind.field(index).type) for index, name in _names(kind) if value[name] is not None}
    if types.is_map(kind):
        return {str(key): _to_plain(entry, kind.item_type) for key, entry in value}
    if hasattr(kind, "value_type"):
        return [_to_plain(entry, kind.value_type) for entry in value]
    return value


def _names(kind: Any) -> list[tuple[int, str]]:
    return [(index, kind.field(index).name) for index in range(kind.num_fields)]
