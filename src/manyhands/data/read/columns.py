"""What a row carries beside the fields that its format reads: named where that is harmless, refused where it changes
the meaning.

| column | what it says | a run |
|---|---|---|
| chosen, rejected, ... | one answer is better than another | refuses it where its format does not read it |
| label | an answer is good or bad, or the class of a text | refuses it, but for plain text |
| masks and weights, labels with -100 | what is trained of the row | refuses it where its format does not read it |
| any with a number for each of a row's input_ids | something about each token | refuses it |
| image(s), video(s), audio(s), ... | the text is about something else that the row holds | refuses it |
| any other | | names it as not read |

A value that is null, empty text, an empty list or one of nulls carries nothing. ``data.ignore`` takes columns out of
every row before anything else looks at it. Knows no tokenizer and no file.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from manyhands.config.sources import IMAGES, LABEL, MEDIA, OPTIONAL, PREFERENCE, REQUIRED, TRAINED
from manyhands.config.tasks import READY, name_tasks
from manyhands.core.errors import UserError
from manyhands.data.read.files import Row
from manyhands.data.read.messages import RowRefused
from manyhands.data.store.streams import IGNORED

PLACEHOLDERS = ("<image>", "<video>", "<audio>")  # how data sets of several tools mark where the medium goes
WITHOUT_IMAGES = ("text", *READY)  # formats whose rows never have images
MAX_NAMES = 100  # of columns that are not read; more of them are values under names of their own
MAX_SHAPES = 1000  # sets of names that are remembered


def carries(value: Any) -> bool:
    """Whether a column holds something; false and 0 are something, not-a-number and a list of nulls are nothing."""
    if isinstance(value, list) and value and all(entry is None for entry in value):
        return False
    return value == value and (bool(value) or isinstance(value, (int, float)))


class Columns:
    """A source's columns. ``fields``: {ours: the row's}; ``ignore``: left out. ``images``: reads columns of images."""

    def __init__(self, fields: Mapping[str, str], ignore: Collection[str] = (), images: bool = False) -> None:
        self._fields, self._ignore, self._images = fields, frozenset(ignore), images
        # of rows of one format with the same columns: those that change the meaning, the others that are not read
        self._shapes: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
        self.leaves_media = any(name.strip().casefold() in MEDIA for name in self._ignore)

    def keep(self, row: Row, left_out: set[str] | None = None) -> Row:
        """The row without the columns of ``data.ignore``; names of those that it has go into ``left_out``."""
        if self._ignore.isdisjoint(row.fields):
            return row
        if left_out is not None:
            left_out.update(self._ignore & row.fields.keys())
        return Row({name: value for name, value in row.fields.items() if name not in self._ignore}, row.file, row.line)

    def check(self, row: Row, format: str, unread: set[str]) -> None:
        """Adds columns that hold something unread to ``unread``. RowRefused for one that changes the row's meaning."""
        key = (format, *row.fields)
        shape = self._shapes.get(key)
        if shape is None:
            read = self._read(format)
            names = [name for name in row.fields if name not in read]
            telling = [name for name in names if is_telling(name, format)]
            shape = telling, [name for name in names if name not in telling]
            if len(self._shapes) < MAX_SHAPES:
                self._shapes[key] = shape
        telling, others = shape
        for name in telling:
            if carries(row.fields[name]):
                hint = ""
                if MEDIA.get(name.strip().casefold()) == "images" and format not in WITHOUT_IMAGES:
                    way = "images: true" if name.strip().casefold() in IMAGES else f"fields.images: {name}"
                    hint = f"data.{way} trains it where the model takes images, "
                raise RowRefused(
                    f"{describe(name, row.fields[name])}: the column {name} would not be used ({hint}data.ignore "
                    f"leaves it out)"
                )
        ids = row.fields.get(self._fields.get("input_ids", "input_ids")) if format == "tokens" else None
        for name in others:
            if (fault := _describe_entries(name, row.fields[name], ids)) is not None:
                raise RowRefused(f"the column {name} {fault}, and would not be used (data.ignore leaves it out)")
            if name not in unread and carries(row.fields[name]) and len(unread) < MAX_NAMES:
                unread.add(name)

    def refuse(self, rows: Sequence[Row], format: str | None = None) -> None:
        """UserError for the first row with a column that changes its meaning; a label does, except in text."""
        read = {*self._fields.values(), *(self._read(format) if format else ())}
        read |= set(IMAGES) if self._images and not format else set()
        for row in rows:
            telling = [
                name
                for name in row.fields
                if name not in read and is_telling(name, format) and carries(row.fields[name])
            ]
            if telling:
                raise _refusal(row, telling, self._fields, self._images)

    def _read(self, format: str) -> set[str]:
        more = IMAGES if self._images and format not in WITHOUT_IMAGES else ()
        return {self._fields.get(field, field) for field in (*REQUIRED[format], *OPTIONAL[format], *more)}


def is_telling(name: str, format: str | None) -> bool:
    """Whether a column of this name changes what a row of the format means; None while that is not known."""
    name = name.strip().casefold()
    if name in PREFERENCE or name in MEDIA:
        return True
    return format is not None and (TRAINED.fullmatch(name) is not None or (name == LABEL and format != "text"))


def _describe_entries(name: str, value: Any, ids: Any) -> str | None:
    """What list entries say of a row's tokens (``ids`` of the format ``tokens``); None for other columns."""
    if not isinstance(value, list):
        return None
    if name == "labels" and IGNORED in value:
        return f"says by {IGNORED} what is trained"
    if isinstance(ids, list) and len(value) == len(ids) and all(isinstance(item, (int, float)) for item in value):
        return "has a number for each token"
    return None


def describe(name: str, value: Any) -> str:
    """What kind of data a row with such a column is."""
    plain = name.strip().casefold()
    if TRAINED.fullmatch(plain):
        return "this row says itself what is trained"
    if plain in IMAGES:
        return "this row comes with images, and this run trains text alone"
    if MEDIA.get(plain) == "images":
        return "this row comes with images, which are read from columns named images or image"
    if plain in MEDIA:
        return f"this row comes with {MEDIA[plain]}, which cannot be trained"
    return "this is preference data" if plain in PREFERENCE or _is_verdict(value) else "this row has a label"


def _is_verdict(value: Any) -> bool:
    return value in (True, False) or str(value).strip().casefold() in ("true", "false", "0", "1")


def _refusal(row: Row, telling: Sequence[str], fields: Mapping[str, str], images: bool) -> UserError:
    """``telling`` are the columns of the row that change its meaning; ``images``: those of images are read."""
    plain = {name: name.strip().casefold() for name in telling}
    where, found = f"{row.file}:{row.line}", ", ".join(row.fields)
    ignore = f"set data.ignore: [{', '.join(telling)}]"
    media = [name for name in telling if plain[name] in MEDIA]
    if media:
        kinds = " and ".join(dict.fromkeys(MEDIA[plain[name]] for name in media))
        what, fix = f"these rows come with {kinds}, and only text can be trained", "give other rows"
        if images and kinds == "images":
            what = "these rows come with images in a column that is not named images or image"
            fix = f"set data.fields.images: {media[0]}"
        return UserError(
            what,
            where=where,
            why=f"the column{'s' * (len(media) > 1)} {', '.join(media)} would not be used (columns found: {found})",
            fix=f"{fix}; to train their text alone, {ignore}, and take placeholders such as <image> out of it",
        )
    if any(plain[name] in PREFERENCE for name in telling):
        return UserError(
            f"this is preference data: the column{'s' * (len(telling) > 1)} {', '.join(telling)} would not be used",
            where=where,
            why=f"this run would train every answer as a good one (columns found: {found})",
            fix=f"to train on which answer is better, set task: {name_tasks(lambda task: task.num_documents > 1)}; "
            + _advise_preference(row, telling, ignore),
        )
    name = telling[0]
    if TRAINED.fullmatch(plain[name]):
        return UserError(
            f"the column {name} would not be used, and it says what is trained",
            where=where,
            why=f"masks are read with input_ids (data.format: tokens), a weight with every format (columns: {found})",
            fix=f"give a weight or train to messages, or one weight to the row; to train the row without, {ignore}",
        )
    if _is_verdict(row.fields[name]):
        return UserError(
            f"this is preference data: the column {name} would not be used",
            where=where,
            why=f"{name} marks each answer as good or bad, as for KTO; this run would train bad answers as good ones",
            fix=f"to train on good and bad answers, set task: kto; else remove the rows whose {name} is false, and "
            f"{ignore}",
        )
    return UserError(
        f"the column {name} would not be used, and it may be what these rows are about",
        where=where,
        why=f"it is {str(row.fields[name])[:40]!r} here, and format and data.fields read other columns",
        fix=f"if it is the answer, name it in data.fields, such as {{question: text, answer: {name}}}; else {ignore}",
    )


def _advise_preference(row: Row, telling: Sequence[str], ignore: str) -> str:
    """How to train the good answers alone, where a run can read them."""
    chosen = next((name for name in telling if name.casefold().startswith("chosen")), None)
    if chosen is None:
        return f"remove the bad answers, then {ignore}"
    others = [name for name in telling if name != chosen]
    left_out = f" and data.ignore: [{', '.join(others)}]" if others else ""
    value, prompt = row.fields[chosen], row.fields.get("prompt")
    if isinstance(prompt, list) or (isinstance(prompt, str) and isinstance(value, str)):
        return f"to train the chosen answers alone, set data.fields: {{completion: {chosen}}}{left_out}"
    if isinstance(value, list):
        return f"to train the chosen answers alone, set data.fields: {{messages: {chosen}}}{left_out}"
    return "to train the chosen answers alone, write rows in which they are the last turn"
