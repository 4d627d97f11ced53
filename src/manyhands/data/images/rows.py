"""Which images a row has, and where in its messages they stand. Knows no file, no decoder and no tokenizer.

An image is a path, an address (http, https), a data URL, encoded bytes, base64 text of them, or an object with one of
these under ``bytes``, ``path``, ``url``, ``image_url``, ``image_path``, ``image`` or ``base64``, such as Parquet's
image columns have.

| where a row has them | where they go |
|---|---|
| parts of a content, ``{type: image, image: ...}`` | in place of these parts |
| the column ``images`` or ``image``: one, or a list | in place of ``<image>`` in texts, and of parts without an image |
| the column alone, no such part or mark | before the first user message's text (messages, prompt, question, pairs) |

A line break next to ``<image>`` belongs to it where the column is ``image``, as where the mark comes from; templates
write their own.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.config.sources import IMAGES
from manyhands.config.tasks import PAIRS
from manyhands.core.units import count_of
from manyhands.data.read.columns import carries
from manyhands.data.read.messages import IMAGE_KEYS, Message, Reading, RowRefused, parse_json

MARK = "<image>"
SYSTEM_ROLES = ("system", "developer")
OTHER_MARKS = ("<video>", "<audio>")
ANY_MARK, LINE_MARK = re.compile(MARK), re.compile(rf"{MARK}\n|\n{MARK}$|{MARK}")
MAX_IMAGES = 1000  # of one row
PUT_FIRST = ("messages", "prompt", "question", *PAIRS)  # formats whose images need no place in a text


@dataclass(frozen=True)
class ImageRef:
    """An image as a row names it: ``place`` is a path or an address, ``data`` its encoded bytes; one of them is
    empty."""

    place: str = ""
    data: bytes = b""


def read_image(value: Any, where: str, reading: Reading | None = None) -> ImageRef:
    """One image in any of the forms that rows have. Raises RowRefused."""
    reading = Reading() if reading is None else reading
    while isinstance(value, dict):
        given = [(key, value[key]) for key in IMAGE_KEYS if value.get(key) is not None]
        if not given:
            keys = ", ".join(map(str, value))
            raise RowRefused(f"{where} is an object without {', '.join(IMAGE_KEYS)} (keys: {keys})")
        reading.leave_of_image(value, where)
        key, value = given[0]
        if isinstance(value, str) and key in ("bytes", "base64"):
            return ImageRef(data=_decode(value, where))
    if isinstance(value, (bytes, bytearray)):
        if not value:
            raise RowRefused(f"{where} has no bytes")
        return ImageRef(data=bytes(value))
    if not isinstance(value, str):
        raise RowRefused(f"{where} must be a path, bytes or an object with them, this is {type(value).__name__}")
    if not value.strip():
        raise RowRefused(f"{where} is empty")
    if value.startswith("data:"):
        head, comma, data = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RowRefused(f"{where} is a data URL that is not base64")
        return ImageRef(data=_decode(data, where))
    return ImageRef(place=value.removeprefix("file://"))


def _decode(text: str, where: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RowRefused(f"{where} is not base64") from None
    if not data:
        raise RowRefused(f"{where} has no bytes")
    return data


def read_column(
    fields: Mapping[str, Any], names: Mapping[str, str], reading: Reading | None = None
) -> tuple[str, list[ImageRef]]:
    """(the column, its images) of a row; ("", []) where it has none, or nulls alone. ``names`` are other names of
    fields, {ours: the row's}. Raises RowRefused for both columns."""
    renamed = set(names.values())  # ``{images: image}`` is one column
    held = [
        (column, fields.get(names.get(column, column)))
        for column in IMAGES
        if names.get(column) or column not in renamed
    ]
    held = [(column, value) for column, value in held if carries(value)]
    if not held:
        return "", []
    if len(held) > 1:
        raise RowRefused("the row has both images and image: keep one")
    column, value = held[0]
    name = names.get(column, column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, name)
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_IMAGES:
        raise RowRefused(f"{name} holds {len(listed):,} images, at most {MAX_IMAGES:,} can be in one row")
    return column, [
        read_image(entry, f"image {number} of {name}", reading) for number, entry in enumerate(listed, start=1)
    ]


def place_images(
    messages: Sequence[Message], column: str, given: Sequence[ImageRef], format: str, reading: Reading | None = None
) -> tuple[list[Message], tuple[ImageRef, ...]]:
    """(the messages with a part ``{type: image}`` at the place of each image, the images in this order).

    ``given`` are those of ``column``. Raises RowRefused where images and places are not as many, and for the marks of
    other media.
    """
    for message in messages:
        for text in texts_of_message(message):
            if mark := next((mark for mark in OTHER_MARKS if mark in text), None):
                raise RowRefused(f"a text holds {mark}, the mark of a medium that cannot be trained: remove it")
    placed = [_split_marks(message, column) for message in messages]
    places = [part for message in placed for part in parts_of(message) if part["type"] == "image"]
    waiting = [part for part in places if part.get("image") is None]
    empty = len(waiting)
    for number, part in enumerate(waiting):
        if (index := part.pop("index", number)) != number:
            raise RowRefused(
                f"an image part has the index {index} at place {number} of the row's images: put them in order"
            )
    if given and not places and format in PUT_FIRST:
        placed = _put_first(placed, len(given))
        empty = len(given)
    if empty != len(given):
        has = f"{count_of(len(given), 'image')} in the row's column" if given else "the row has no images"
        raise RowRefused(
            f"{has}, and {count_of(empty, 'place')} for them ({MARK} in a text, or a part of type image without one)"
        )
    rest = iter(given)
    images: list[ImageRef] = []
    for message in placed:
        for part in parts_of(message):
            if part["type"] == "image":
                own = part.pop("image", None)
                where = f"image {len(images) + 1} of the messages"
                images.append(next(rest) if own is None else read_image(own, where, reading))
    return placed, tuple(images)


def leave_out_system(
    messages: Sequence[Message], images: Sequence[ImageRef]
) -> tuple[list[Message], tuple[ImageRef, ...]]:
    """The messages without system prompts, and ``images``, which stand in them in this order, without those of these
    prompts."""
    rest = iter(images)
    kept: list[Message] = []
    shown: list[ImageRef] = []
    for message in messages:
        own = [next(rest) for part in parts_of(message) if part["type"] == "image"]
        if message["role"] not in SYSTEM_ROLES:
            kept.append(message)
            shown += own
    return kept, tuple(shown)


def parts_of(message: Message) -> Iterator[dict[str, Any]]:
    """The parts of a content that is a list of them."""
    content = message.get("content")
    return iter(content if isinstance(content, list) else ())


def has_image(message: Message) -> bool:
    """Whether a part of its content is an image."""
    return any(part["type"] == "image" for part in parts_of(message))


def texts_of_message(message: Message) -> list[str]:
    """The texts of a content, which may be a list of parts."""
    content = message.get("content")
    parts = [part["text"] for part in parts_of(message) if part["type"] == "text"]
    return [content] if isinstance(content, str) else parts


def _split_marks(message: Message, column: str) -> Message:
    """The message as parts where its texts hold marks; parts are copied."""
    content = message.get("content")
    if content is None or (isinstance(content, str) and MARK not in content):
        return message
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    split: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text":
            split.append(dict(part))
            continue
        for number, text in enumerate((LINE_MARK if column == "image" else ANY_MARK).split(part["text"])):
            split += [{"type": "image"}] if number else []
            split += [{"type": "text", "text": text}] if text else []
    return {**message, "content": split}


def _put_first(messages: list[Message], count: int) -> list[Message]:
    """The messages with places for images before the text of the first user message."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            filled = {**message, "content": [*({"type": "image"} for _ in range(count)), *text]}
            return [*messages[:number], filled, *messages[number + 1 :]]
    raise RowRefused("the row has images, and no user message that they could stand in")
