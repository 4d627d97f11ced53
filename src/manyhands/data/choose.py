"""What the rows of a source are: their format, and whether a run trains images. Told from the first rows of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.config.sources import IMAGES, READY
from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.columns import Columns, carries
from manyhands.data.files import Row
from manyhands.data.formats import FIELDS, Format, detect_format, settle_format
from manyhands.data.image_processor import family_of
from manyhands.data.messages import IMAGE_PARTS
from manyhands.data.sources import Source, read_rows

DETECT_ROWS = 100
PLAIN_FORMATS = ("text", "prompt", *READY)  # which need no chat template
PART_IN_TEXT = re.compile(rf'"type"\s*:\s*"(?:{"|".join(IMAGE_PARTS)})"')  # of messages that are JSON text


def trains_images(config: RunConfig, model_folder: str | Path, sources: Sequence[Source]) -> bool:
    """Whether rows are read with their images. Raises UserError where they are asked for and the model takes none."""
    asked, family = config.data.images, family_of(model_folder)
    mapped = [name for source in sources for name in (source.fields or {}) if name in IMAGES]
    if family.images is None and (asked is True or mapped):
        raise UserError(
            "this model cannot be trained with images",
            where="data.images" if asked is True else f"data.fields: {mapped[0]}",
            why=families.why_no_images(read_object(Path(model_folder) / "config.json")),
            fix="choose another model, or leave the images out with data.images: false and data.ignore: [images]",
        )
    if family.images is None or asked is False:
        return False
    return asked is True or any(
        has_images(row, source) for source in sources for row in islice(read_rows(source), DETECT_ROWS)
    )


def has_images(row: Row, source: Source) -> bool:
    """Whether a row has a column of images, or images among the parts of its messages."""
    names = [(source.fields or {}).get(name, name) for name in IMAGES]
    ignored = source.ignore or ()
    return any(carries(row.fields.get(name)) for name in names if name not in ignored) or any(
        _holds_part(value) for name, value in row.fields.items() if name not in ignored
    )


def _holds_part(value: Any) -> bool:
    if isinstance(value, str):
        return PART_IN_TEXT.search(value) is not None
    waiting = [value]  # not by recursion: rows may be nested as deeply as JSON is read
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("type") in IMAGE_PARTS:
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def choose_format(source: Source, config: RunConfig, has_template: bool, images: bool = False) -> Format | None:
    """The format of a source's rows, from the first 100 for ``auto``; None where each row has its own (task mixed,
    auto).

    Refuses what the task or the tokenizer cannot take.
    """
    return choose_format_by(list(islice(read_rows(source), DETECT_ROWS)), source, config, has_template, images)


def choose_format_by(
    first: Sequence[Row], source: Source, config: RunConfig, has_template: bool, images: bool = False
) -> Format | None:
    """The same, from the given rows of the source."""
    fields, asked = source.fields or {}, source.format or "auto"
    columns = Columns(fields, source.ignore or (), images)
    first = [columns.keep(row) for row in first]
    columns.refuse(first)
    if config.task == "mixed" and asked == "auto":
        found = {detect_format([row], fields, config.task) for row in first}
    else:
        found = {settle_format(first, asked, fields, config.task)}
        columns.refuse(first, *found)
    for format in sorted(found):
        check_format(format, config, has_template, source.path)
    return None if config.task == "mixed" and asked == "auto" else found.pop()


def check_format(format: Format, config: RunConfig, has_template: bool, where: str) -> None:
    """Raises UserError where the task, or a tokenizer without a chat template, cannot take rows of the format."""
    if config.task != "mixed" and format not in READY and (config.task == "cpt") != (format == "text"):
        other, wanted = ("sft", FIELDS["text"]) if config.task == "cpt" else ("cpt", FIELDS["messages"])
        raise UserError(
            f"task {config.task} cannot use rows of the format {format}",
            where=where,
            why="cpt trains every token of text rows; sft trains the answers of conversations; mixed does both",
            fix=f"set task: {other} or mixed, or give rows with the field {wanted[0]}",
        )
    if format not in PLAIN_FORMATS and not has_template:
        raise UserError(
            f"the tokenizer has no chat template, and rows of the format {format} need one",
            where=where,
            fix="give model.chat_template (Jinja text, a file, or a name such as alpaca, which needs no tokens "
            "of its own), or rows with prompt and completion",
        )
