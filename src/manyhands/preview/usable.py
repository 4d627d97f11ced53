"""What can still be shown of data that a run refuses: each source alone, its faults gathered, the rows before them
kept.

The store that is made of them lies in a folder of its own that the caller throws away: it never gets a name in the
cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig, Source
from manyhands.core.errors import UserError
from manyhands.data.columns import Columns
from manyhands.data.files import FilePart, Findings, Row
from manyhands.data.formats import DETECT_ROWS, choose_format, detect_format, trains_images
from manyhands.data.image_open import ImageOpener
from manyhands.data.prepare import Inputs, finish
from manyhands.data.segment import join_segments
from manyhands.data.sources import list_files, read_part, resolve_sets, resolve_sources, split_source
from manyhands.data.store import TokenStore
from manyhands.data.streams import WITH_IMAGES
from manyhands.data.summary import Outcome
from manyhands.data.tokenize import PartTokenizer
from manyhands.data.tokenize_parallel import CHUNK_CHARACTERS_HERE
from manyhands.preview.contents import Refused


@dataclass(frozen=True)
class Usable:
    """``store`` is None where not enough rows are left; ``sources`` are those that ``store.meta["sources"]``
    describes.
    """

    store: TokenStore | None
    sources: tuple[Source, ...]
    refused: tuple[Refused, ...]


def prepare_usable(
    config: RunConfig, model_folder: Path, tokenizer: Any, folder: Path, report: Callable[[str], Any]
) -> Usable:
    """Tokenizes into ``folder`` what can be used of ``config.data``, in this process. Raises no UserError for a fault
    of the data.
    """
    asked = [
        resolve_sources(value, config.data) if value is not None else ()
        for value in (config.data.train, config.data.validation)
    ]
    try:
        has_images = trains_images(config, model_folder, [*asked[0], *asked[1]])
        images = ImageOpener(config, model_folder, tokenizer) if has_images else None
    except UserError:  # no row can be read, which is an error of its source
        images = None
    sets: list[str] = []
    made: list[dict[str, Any]] = []
    sources: list[Source] = []
    segments: list[tuple[int, Path]] = []
    refused: list[Refused] = []
    num_train = 0
    for number, source in enumerate((*asked[0], *asked[1], *resolve_sets(config))):
        report(f"checking {source.name} for errors")
        outcome, errors, files = _tokenize_source(config, tokenizer, source, folder / f"{number:04d}", images)
        if errors:
            refused.append(Refused(source.name or source.path, tuple(errors)))
        if outcome is not None and outcome.num_samples:
            segments += [(len(sources), path) for path in sorted((folder / f"{number:04d}").iterdir())]
            sources.append(source)
            made.append(outcome.to_meta() | {"samples_of_files": files})
            num_train += number < len(asked[0])
            sets += [str(source.name)] * (number >= len(asked[0]) + len(asked[1]))
    if not num_train:
        return Usable(None, (), tuple(refused))
    join_segments(folder, [path for _, path in segments], [source for source, _ in segments], WITH_IMAGES)
    inputs = Inputs(tuple(sources), num_train, tuple(map(list_files, sources)), {}, tuple(sets))
    try:
        finish(config, inputs, folder, {"digest": "usable", "tokens": "", "made": made})
        return Usable(TokenStore.open(folder), tuple(sources), tuple(refused))
    except UserError:  # one row cannot be divided, ...
        return Usable(None, (), tuple(refused))


def _tokenize_source(
    config: RunConfig, tokenizer: Any, source: Source, folder: Path, images: ImageOpener | None
) -> tuple[Outcome | None, list[UserError], list[int]]:
    """(what became of its rows, what is wrong, rows of each file); the segments lie in ``folder``."""
    total, files = Outcome(), dict[str, int]()
    try:
        parts = split_source(source, 1)
        format, doubt = _choose_format(config, source, parts, bool(tokenizer.chat_template), images is not None)
        part_tokenizer = PartTokenizer(
            config.data, config.task, tokenizer, (source,), (format,), CHUNK_CHARACTERS_HERE, images
        )
        for number, part in enumerate(parts):
            outcome = part_tokenizer.run(part, 0, folder / f"{number:06d}")
            files[part.file] = outcome.num_samples
            total.add(outcome)
    except UserError as error:
        return None, [error], []
    errors = total.explain_faults(config, source.path)
    return total, errors if errors or doubt is None else [doubt], list(files.values())


def _choose_format(
    config: RunConfig, source: Source, parts: list[FilePart], has_template: bool, images: bool
) -> tuple[Any, UserError | None]:
    """The format as a run chooses it; where the first rows do not fit together, that of most of them, and what speaks
    against it.
    """
    first = list(islice((row for part in parts for row in read_part(part, Findings())), DETECT_ROWS))
    if not first:  # none can be read, which is said when they are tokenized; nothing else speaks for a format
        return ("messages" if source.format in (None, "auto") else source.format), None
    try:
        return choose_format(first, source, config.task, has_template, images), None
    except UserError as error:
        formats = Counter(filter(None, (_tell(row, source, config) for row in first)))
        if (source.format or "auto") != "auto" or not formats:
            raise
        return choose_format(
            first, source.model_copy(update={"format": formats.most_common(1)[0][0]}), config.task, has_template, images
        ), error


def _tell(row: Row, source: Source, config: RunConfig) -> str | None:
    try:
        row = Columns(source.fields or {}, source.ignore or ()).keep(row)
        return detect_format([row], source.fields or {}, config.task)
    except UserError:
        return None
