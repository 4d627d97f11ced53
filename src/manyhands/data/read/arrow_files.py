"""Rows of Parquet and Arrow files as plain Python values. Reads a row group or record batch at a time. Knows no format
of rows.

A struct's fields that are null are left out: such files give every struct all fields that any row has, so a null says
"not there" (``tool_calls`` of a message without any). Maps become objects. Values of an extension type are read as what
they mean (``EXTENSIONS``); a file with a type that is not known is refused.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import numpy as np

from manyhands.core.errors import UserError
from manyhands.data.read.files import MAX_LINE_BYTES, FilePart, Findings, Row, open_data
from manyhands.data.read.text_files import drop_nulls, keep_unique, parse_value

BATCH_ROWS = 32  # as fast as 512, and a sixteenth of the memory where a column repeats one large value
MAX_BATCH_BYTES = 1 << 30
LARGE_BATCH_BYTES = 64 << 20  # is taken row by row
MAX_ROW_BYTES = MAX_LINE_BYTES
USUAL_PACKED_RATIO = 50  # of a column; beyond, a value may stand in the file once and in the rows many times
FREE_ROWS, MAX_ROWS_A_BYTE = 10_000_000, 20

Converter = Callable[[Any], Any]


def read_parquet(part: FilePart, findings: Findings) -> Iterator[Row]:
    with _open_parquet(Path(part.file)) as file:
        groups = list(range(part.start, file.num_row_groups if part.stop is None else part.stop))
        batches = chain.from_iterable(
            file.iter_batches(batch_size=_count_batch_rows(file, group), row_groups=[group], use_threads=False)
            for group in groups
        )
        num_rows, promised = 0, sum(file.metadata.row_group(group).num_rows for group in groups)
        for row in _read_batches(part, batches, findings):
            num_rows += 1
            yield row
        if num_rows != promised and not findings.count:  # pages that are damaged may be passed over without an error
            raise ValueError(f"{num_rows:,} of {promised:,} rows are there")


def split_parquet(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each row group."""
    with _open_parquet(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def read_arrow(part: FilePart, findings: Findings) -> Iterator[Row]:
    with _open_arrow(Path(part.file)) as batches:

        def validated() -> Iterator[Any]:
            """Unlike Parquet's, an Arrow file's bytes are used in place: wrong offsets kill the process."""
            for batch in islice(batches, part.start, part.stop):
                batch.validate(full=True)
                yield batch

        yield from _read_batches(part, validated(), findings)


def _count_batch_rows(file: Any, index: int) -> int:
    """Rows of a row group to decode at once. Values are repeated in memory that a column holds once: then a batch has
    few of them.

    A row is read first: that raises what is wrong with what the file says of its columns. To ask for it ends the
    process (pyarrow 26), as ``RowGroupMetaData.column`` lets C++'s exceptions through.
    """
    next(file.iter_batches(batch_size=1, row_groups=[index], use_threads=False), None)
    group = file.metadata.row_group(index)
    columns = [group.column(index) for index in range(group.num_columns)]
    repeated = [
        column.total_uncompressed_size
        for column in columns
        if column.has_dictionary_page
        and column.total_uncompressed_size > USUAL_PACKED_RATIO * column.total_compressed_size
    ]
    return max(1, min(BATCH_ROWS, MAX_BATCH_BYTES // max(1, sum(repeated))))


def split_arrow(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each record batch; the file is mapped, so nothing of it is read but the headers."""
    with _open_arrow(path) as batches:
        return [(batch.num_rows, batch.get_total_buffer_size()) for batch in batches]


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with ExitStack() as stack, _explain(path):
        source = stack.enter_context(_unpack(path)) if path.name.lower().endswith(".gz") else path
        file = stack.enter_context(pq.ParquetFile(source, pre_buffer=False))
        _check_columns(file.schema_arrow, path)
        num_bytes = path.stat().st_size
        if file.metadata.num_rows > max(FREE_ROWS, MAX_ROWS_A_BYTE * num_bytes):
            raise UserError(
                f"the data file says that it holds {file.metadata.num_rows:,} rows in {num_bytes:,} bytes",
                where=str(path),
                why=f"more than {MAX_ROWS_A_BYTE} rows a byte are all but equal, or not there",
                fix="write each row once, and give the source a weight",
            )
        yield file


@contextmanager
def _unpack(path: Path) -> Iterator[IO[bytes]]:
    """What a .gz holds, in a file that has no name: it is read from its end."""
    with tempfile.TemporaryFile() as file:
        with open_data(path) as packed:
            shutil.copyfileobj(packed, file)
        file.seek(0)
        yield file


@contextmanager
def _open_arrow(path: Path) -> Iterator[Iterator[Any]]:
    import pyarrow as pa

    with ExitStack() as stack, _explain(path):
        if path.name.lower().endswith(".gz"):
            source = pa.PythonFile(stack.enter_context(_unpack(path)), mode="r")
        else:
            source = stack.enter_context(pa.memory_map(str(path)))
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            _check_columns(file.schema, path)
        else:
            stream = pa.ipc.open_stream(source)
            batches = iter(stream)
            _check_columns(stream.schema, path)
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


def _check_columns(schema: Any, path: Path) -> None:
    twice = next((name for index, name in enumerate(schema.names) if name in schema.names[:index]), None)
    if twice is not None:
        raise UserError(
            "two columns have the same name", where=str(path), why=f"the name is {twice}", fix="rename one of them"
        )
    for field in schema:
        _make_converter(field, f"{path}, column {field.name}")


def _read_batches(part: FilePart, batches: Iterator[Any], findings: Findings) -> Iterator[Row]:
    number = part.first_line
    converters: list[Converter | None] | None = None
    for batch in chain.from_iterable(map(_cut_large, batches)):
        if batch.nbytes > MAX_ROW_BYTES:
            findings.add(part.file, number, f"the row has {batch.nbytes:,} bytes, at most {MAX_ROW_BYTES:,} are read")
            number += batch.num_rows
            continue
        if converters is None:
            converters = [_make_converter(field, part.file) for field in batch.schema]
        columns = [
            _read_column(batch.column(index), name, converters[index], part.file, number, findings)
            for index, name in enumerate(batch.schema.names)
        ]
        for offset, values in enumerate(zip(*columns, strict=True)):
            yield Row(dict(zip(batch.schema.names, values, strict=True)), part.file, number + offset)
        number += batch.num_rows


def _cut_large(batch: Any) -> Iterator[Any]:
    """The batch, or its rows one by one: as Python's values they take several times the memory."""
    if batch.nbytes <= LARGE_BATCH_BYTES:
        yield batch
    else:
        yield from (batch.slice(index, 1) for index in range(batch.num_rows))


def _read_column(
    column: Any, name: str, convert: Converter | None, file: str, first: int, findings: Findings
) -> list[Any]:
    try:
        values = column.to_pylist()
        return values if convert is None else [None if value is None else convert(value) for value in values]
    except Exception:  # bytes that are no text, a date beyond Python's, a key that stands twice: find which rows
        values = []
        for index in range(len(column)):
            try:
                value = column[index].as_py()
                values.append(value if convert is None or value is None else convert(value))
            except Exception as error:
                findings.add(file, first + index, f"column {name}: {error}")
                values.append(None)
        return values


def _make_converter(field: Any, where: str) -> Converter | None:
    """What makes a value of ``field``, as pyarrow gives it and not null, what JSON would give: structs without their
    nulls, maps as objects, extension types by ``EXTENSIONS``. None where it is that already. UserError for an extension
    type that is not known.
    """
    import pyarrow as pa
    import pyarrow.types as types

    kind = field.type
    extension = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")  # not registered here
    if isinstance(kind, pa.BaseExtensionType):
        extension = kind.extension_name
    if extension:
        if extension not in EXTENSIONS:
            raise UserError(
                "the data file has a column of a type that is not known",
                where=where,
                why=f"it is Arrow's extension type {extension}, and what its values mean cannot be told from how they "
                "are stored",
                fix="cast the column to a plain type (column.cast of pyarrow), or write the file without it",
            )
        return EXTENSIONS[extension](kind)
    if types.is_struct(kind):
        fields = [(part.name, _make_converter(part, where)) for part in map(kind.field, range(kind.num_fields))]
        return lambda value: _convert_fields((name, value[name], convert) for name, convert in fields)
    if types.is_map(kind):
        convert_item = _make_converter(kind.item_field, where)
        return lambda value: _convert_fields((str(key), item, convert_item) for key, item in value)
    lists = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    if any(getattr(types, is_kind)(kind) for is_kind in lists):
        convert = _make_converter(kind.value_field, where)
        if convert is None:
            return None
        return lambda value: [None if entry is None else convert(entry) for entry in value]
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _make_converter(pa.field("", kind.value_type), where)
    if types.is_union(kind) and any(_make_converter(kind.field(index), where) for index in range(kind.num_fields)):
        raise UserError("the data file has a union of nested types", where=where, fix="write the column as arrow.json")
    return None


def _convert_fields(fields: Iterable[tuple[str, Any, Converter | None]]) -> dict[str, Any]:
    converted = [
        (name, value if convert is None else convert(value)) for name, value, convert in fields if value is not None
    ]
    return keep_unique([(name, value) for name, value in converted if value is not None])


# Arrow's extension types by name, and what makes their values plain. pyarrow gives the value
# itself of those that it has registered, which depends on its version, and the stored one of others.
EXTENSIONS: dict[str, Callable[[Any], Converter]] = {
    "arrow.json": lambda kind: lambda value: drop_nulls(parse_value(value)),
    "arrow.uuid": lambda kind: lambda value: str(value if isinstance(value, UUID) else UUID(bytes=value)),
    "arrow.bool8": lambda kind: bool,
    "arrow.fixed_shape_tensor": lambda kind: lambda value: np.reshape(value, kind.shape).tolist(),
    **{f"datasets.features.features.Array{n}DExtensionType": lambda kind: list for n in range(2, 6)},
}
