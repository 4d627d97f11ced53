"""What can still be shown of data that a run refuses: each source alone, its faults gathered, the rows before them
kept.

The store that is made of them lies in a folder of its own that the caller throws away: it never gets a name in the
cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.images.open import ImageOpener
from manyhands.data.read.columns import Columns
from manyhands.data.read.files import Findings, Row
from manyhands.data.read.formats import DETECT_ROWS, Format, choose_format, detect_format, trains_images
from manyhands.data.read.sources import (
    ResolvedSource,
    list_sources,
    read_part,
    resolve_source,
    resolve_sources,
    split_source,
)
from manyhands.data.store.segment import join_segments
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import EVERY
from manyhands.data.tokenize.parallel import CHUNK_CHARACTERS_HERE
from manyhands.data.tokenize.part import PartTokenizer
from manyhands.data.tokenize.prepare import finish
from manyhands.data.tokenize.summary import Outcome, PreparedData, summarize
from manyhands.preview.contents import Refused


@dataclass(frozen=True)
class Usable:
    """``facts`` and ``store``: None for too few rows. ``sources``: those of ``store.meta["sources"]``."""

    facts: PreparedData | None
    store: TokenStore | None
    sources: tuple[ResolvedSource, ...]
    refused: tuple[Refused, ...]


def prepare_usable(
    config: RunConfig, model_folder: Path, tokenizer: Any, folder: Path, report: Callable[[str], Any]
) -> Usable:
    """Tokenizes the usable part of ``config.data`` into ``folder``, in this process. No UserError for bad data."""
    data, sets = config.data, config.evaluate.data
    try:
        with_images = trains_images(data.images, model_folder, resolve_sources(data))
        images = ImageOpener(data, model_folder, tokenizer) if with_images else None
    except UserError:  # no row can be read, which is an error of its source
        images = None
    sources: list[ResolvedSource] = []
    made: list[dict[str, Any]] = []
    segments: list[tuple[int, Path]] = []
    refused: list[Refused] = []
    for number, (use, name, given) in enumerate(list_sources(data, sets)):
        report(f"checking {name} for errors")
        outcome, of_source = Outcome(), folder / f"{number:04d}"
        try:
            source = resolve_source(given, data, name, use)
            parts = split_source(source, 1)
            first = list(islice((row for part in parts for row in read_part(part, Findings())), DETECT_ROWS))
            format, doubt = _choose_format(first, source, config.task, bool(tokenizer.chat_template), images)
            part_tokenizer = PartTokenizer(
                data, config.task, tokenizer, (source,), (format,), CHUNK_CHARACTERS_HERE, images
            )
            files: dict[str, int] = {}
            for index, part in enumerate(parts):
                of_part = part_tokenizer.run(part, 0, of_source / f"{index:06d}")
                files[part.file] = of_part.num_samples
                outcome.add(of_part)
        except UserError as error:
            refused.append(Refused(name, (error,)))
            continue
        errors = outcome.explain_faults(source, config.task, data)
        if doubt is not None and not errors:
            errors = [doubt]
        if errors:
            refused.append(Refused(name, tuple(errors)))
        if outcome.num_samples:
            segments += [(len(sources), path) for path in sorted(of_source.iterdir())]
            sources.append(source)
            made.append(outcome.to_meta() | {"samples_of_files": list(files.values())})
    if not any(source.use == "train" for source in sources):
        return Usable(None, None, (), tuple(refused))
    join_segments(folder, [path for _, path in segments], [index for index, _ in segments], EVERY)
    try:
        named = {"digest": "usable", "tokens": "", "made": made, "seed": config.seed, "task": config.task}
        finish(sources, data, folder, named)
        store = TokenStore.open(folder)
        facts = summarize(store, config.seed, config.batch, data.max_length, config.stop)
        return Usable(facts, store, tuple(sources), tuple(refused))
    except UserError:  # one row cannot be divided, weights that leave no row, ...
        return Usable(None, None, (), tuple(refused))


def _choose_format(
    first: Sequence[Row], source: ResolvedSource, task: str, has_template: bool, images: ImageOpener | None
) -> tuple[Format | None, UserError | None]:
    """The format that a run chooses; of rows that disagree the majority's, and what speaks against it."""
    if not first:  # none can be read: reported when they are tokenized
        return None, None
    try:
        return choose_format(first, source, task, has_template, images is not None), None
    except UserError as error:
        columns, formats = Columns(source.fields, source.ignore), Counter[Format]()
        for row in first:
            with suppress(UserError):
                formats[detect_format([columns.keep(row)], source.fields, task)] += 1
        if source.format != "auto" or not formats:
            raise
        source = replace(source, format=formats.most_common(1)[0][0])
        return choose_format(first, source, task, has_template, images is not None), error
