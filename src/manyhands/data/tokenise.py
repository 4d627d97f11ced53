"""Streams the rows of one file through rendering and the length policy into a store. Knows no cache and no held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.data.findings import Findings
from manyhands.data.formats import FIELDS, Format, Message, RowRefused, detect_format, to_conversation
from manyhands.data.render import Renderer
from manyhands.data.sources import Row, read_rows
from manyhands.data.store import StoreWriter
from manyhands.errors import UserError

DETECT_ROWS = 100
CHUNK_ROWS = 1000  # rows tokenised at once: enough to keep the tokenizer's threads busy,
CHUNK_CHARACTERS = 4_000_000  # and few enough to bound memory
REPORT_EVERY_S = 10.0


@dataclass
class Counts:
    """What happened to the rows of all files of one preparation."""

    truncated: int = 0  # rows cut at max_length
    split: int = 0  # documents that became several rows
    straddling: int = 0  # tokens across the border of a trained span
    with_markers: int = 0  # rows whose content spells an added token


def choose_format(path: str, config: RunConfig, has_template: bool) -> tuple[Format, Iterator[Row]]:
    """(format, all rows). Looks at the first 100 rows for ``auto``, and refuses what the task or the tokenizer cannot take."""
    rows = read_rows(path, config.data.format)
    first = list(islice(rows, DETECT_ROWS))
    format: Format = detect_format(first) if config.data.format == "auto" else config.data.format
    if (config.task == "cpt") != (format == "text"):
        other, wanted = ("sft", FIELDS["text"]) if config.task == "cpt" else ("cpt", FIELDS["messages"])
        raise UserError(
            f"task {config.task} cannot use rows of the format {format}",
            where=path,
            why="cpt trains every token of text rows; sft trains the answers of conversations",
            fix=f"set task: {other}, or give rows with the field {wanted[0]}",
        )
    if format in ("messages", "question") and not has_template:
        raise UserError(
            f"the tokenizer has no chat template, and rows of the format {format} need one",
            where=path,
            fix="give model.chat_template (Jinja text or a file), or rows with prompt and completion",
        )
    return format, chain(first, rows)


class Tokenising:
    """One file's way into a store. Faults are gathered over the whole file; ``run`` raises them at the end."""

    def __init__(self, config: RunConfig, renderer: Renderer, writer: StoreWriter, counts: Counts, report: Callable[[str], None]) -> None:
        self._max_length, self._too_long, self._task = config.data.max_length, config.data.too_long, config.task
        self._renderer, self._writer, self._counts, self._report = renderer, writer, counts, report
        self._refused, self._long, self._longest = Findings(), Findings(), 0

    def run(self, rows: Iterable[Row], format: Format, path: str) -> int:
        """Appends all rows of a file; returns the number of rows written. Raises UserError with up to 20 faults."""
        before, reported_at = self._writer.num_rows, time.monotonic()
        for chunk in _chunk(self._convert(rows, format)):
            rendered = self._renderer.render_many([conversation for _, conversation in chunk])
            for (row, conversation), result in zip(chunk, rendered, strict=True):
                if isinstance(result, RowRefused):
                    self._refused.add(row.file, row.line, str(result))
                    continue
                self._counts.straddling += result.num_straddling
                self._counts.with_markers += any(map(self._renderer.has_markers, _contents(conversation)))
                self._append(row, result.ids, result.trained)
            if time.monotonic() - reported_at > REPORT_EVERY_S:
                reported_at = time.monotonic()
                self._report(f"tokenised {self._writer.num_rows:,} rows so far")
        self._refused.raise_if_any("{n} rows cannot be trained", where=path, fix="mend or remove these rows")
        cut = " truncate to cut them," + (" split to make several rows of them," if self._task == "cpt" else "")
        self._long.raise_if_any(
            "{n} rows are longer than data.max_length",
            where=path,
            why=f"data.max_length is {self._max_length:,} tokens and data.too_long is refuse; the longest row has {self._longest:,} tokens",
            fix=f"set data.too_long to{cut} or raise data.max_length",
        )
        return self._writer.num_rows - before

    def _convert(self, rows: Iterable[Row], format: Format) -> Iterator[tuple[Row, list[Message] | str]]:
        for row in rows:
            try:
                yield row, to_conversation(row, format)
            except RowRefused as refused:
                self._refused.add(row.file, row.line, str(refused))

    def _append(self, row: Row, ids: np.ndarray, trained: np.ndarray) -> None:
        if not trained[1:].any():
            self._refused.add(row.file, row.line, "no trained token")
            return
        if len(ids) <= self._max_length:
            self._writer.append(ids, trained, row.line)
        elif self._too_long == "refuse":
            self._longest = max(self._longest, len(ids))
            self._long.add(row.file, row.line, f"{len(ids):,} tokens")
        elif self._too_long == "truncate":
            if not trained[1 : self._max_length].any():
                self._refused.add(row.file, row.line, f"no trained token is left of {len(ids):,} after cutting at {self._max_length:,}")
                return
            self._writer.append(ids[: self._max_length], trained[: self._max_length], row.line)
            self._counts.truncated += 1
        else:
            # Blocks share one token: the last target of one is the first input of the next, so no target is lost.
            for start in range(0, len(ids) - 1, self._max_length - 1):
                self._writer.append(ids[start : start + self._max_length], trained[start : start + self._max_length], row.line)
            self._counts.split += 1


def _chunk(rows: Iterable[tuple[Row, list[Message] | str]]) -> Iterator[list[tuple[Row, list[Message] | str]]]:
    chunk: list[tuple[Row, list[Message] | str]] = []
    characters = 0
    for pair in rows:
        chunk.append(pair)
        characters += sum(map(len, _contents(pair[1])))
        if len(chunk) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _contents(conversation: list[Message] | str) -> list[str]:
    return [conversation] if isinstance(conversation, str) else [message["content"] for message in conversation]
