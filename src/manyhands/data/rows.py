"""What passes between the reading of rows and their meaning. Knows neither files nor formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of a source. ``line`` counts from 1: the line where the row begins, in Parquet and Arrow files its
    number.
    """

    fields: dict[str, Any]
    file: str
    line: int


@dataclass(frozen=True)
class Part:
    """A stretch of one file that can be read alone, in another process too.

    ``start`` and ``stop`` count bytes in line-based files, row groups in Parquet and record batches in Arrow files;
    a ``stop`` of None is the end. ``first_line`` is the line, or row, that ``start`` lies at. ``large``: more than a
    process should read alone, though nothing in it can be found without reading what is before.
    """

    file: str
    kind: str
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    large: bool = False
