"""What the fields of a row mean: the format of a source, and from a row to a conversation or a text. Knows no
tokenizer.

| format | fields (in brackets: where a row has them) | becomes |
|---|---|---|
| messages | messages: list of {role, content}; (tools, chat_template_kwargs, weight) | the conversation itself |
| sharegpt | conversations: list of {from, value}; (system, as messages) | the conversation |
| alpaca | instruction, output; (input, system, history, weight) | a user turn, instruction then input, and an answer |
| prompt | prompt, completion: strings or lists of messages; (system, as messages) | a user and an assistant turn |
| question | question, answer: strings; (system, weight) | a user and an assistant turn |
| query | query, response: strings; (system, history, tools, weight) | a user and an assistant turn |
| preference | chosen, rejected: strings, messages or lists of messages; (see below) | two answers to one prompt |
| rejected_response | messages, rejected_response: as rejected; (system, tools, ...) | its last answer and a worse one |
| label | label: true or false; the fields of one of the first six | the conversation, and whether its answer is good |
| text | text: string; (weight) | the text |
| tokens | input_ids: list of ids; (see below) | these ids, without a chat template, no token added |
| segments | segments: list of {text, label: whether it is trained} | the ids of each text by itself, joined |

The prompt of a preference is what both lists begin with; of answers alone it is one of ``prompt``, ``messages``,
``conversations``, ``question``, or ``instruction`` and ``input``, below ``system`` and ``history``.

What a row of tokens may have besides, an entry for each token. A token is trained if all of the first two say so.

| field | is |
|---|---|
| labels | the token, or -100 where it is not trained |
| completion_mask, assistant_masks, loss_mask | 1 where the token is trained, else 0 |
| loss_weights | what the token's loss is multiplied by |
| attention_mask, position_ids, token_type_ids | ones; 0, 1, 2, ...; zeros: anything else is refused |
| special_tokens_mask | 0 or 1: says nothing about training |

``seq_lengths`` and ``length`` are the number of tokens; more documents than one are refused.

``data.fields`` says where they have other names. What becomes of other fields: ``columns.py``.

The roles of messages and of sharegpt turns, whatever tool they come from, are those of ``messages.py``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as make_field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from manyhands import families
from manyhands.config.sources import IMAGES, INNER, OPTIONAL, REQUIRED, known_fields
from manyhands.config.tasks import JUDGED, PAIRS, READY, TASKS, name_tasks
from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.images.processor import family_of
from manyhands.data.images.rows import (
    SYSTEM_ROLES,
    has_image,
    leave_out_system,
    place_images,
    read_column,
    texts_of_message,
)
from manyhands.data.read.columns import Columns, carries
from manyhands.data.read.files import Row
from manyhands.data.read.messages import (
    IMAGE_PARTS,
    Message,
    Reading,
    RowRefused,
    add_message,
    check_messages,
    check_tools,
    check_weight,
    parse_json,
)
from manyhands.data.read.sources import ResolvedSource, read_rows
from manyhands.data.read.text_files import find_inexpressible, walk
from manyhands.data.store.streams import IGNORED


def check_turns(value: Any, field: str, fields: Mapping[str, str], reading: Reading) -> list[Message]:
    """A list of turns, or its JSON. ``fields`` may rename ``from`` and ``value``. Raises RowRefused."""
    value = parse_json(value, field) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise RowRefused(f"{field} must be a list of turns with at least one in it")
    from_key, value_key = fields.get("from", "from"), fields.get("value", "value")
    messages: list[Message] = []
    for number, turn in enumerate(value, start=1):
        where = f"turn {number} of {field}"
        if not isinstance(turn, dict):
            raise RowRefused(f"{where} is not an object with {from_key} and {value_key}")
        who, said = turn.get(from_key), turn.get(value_key)
        if who is None and isinstance(turn.get("role"), str):  # messages under the name that sharegpt uses
            who, said, used = turn["role"], turn.get("content"), ("role", "content")
        else:
            used = (from_key, value_key)
        rest = {key: entry for key, entry in turn.items() if key not in used and entry is not None}
        add_message(messages, who, said, rest, where, reading)
    return messages


Format = Literal[
    "messages", "sharegpt", "alpaca", "prompt", "question", "query", "preference", "rejected_response", "label",
    "text", "tokens", "segments",
]  # fmt: skip
FIELDS = cast(Mapping[Format, tuple[str, ...]], REQUIRED)
NONE: Mapping[str, str] = {}
MASKS = ("completion_mask", "assistant_masks", "loss_mask")
A_PACK = "a row is one document: divide this pack, and data.packing packs them again"
DETECT_ROWS = 100
NO_FIELD = "no field"  # begins why a row is refused that has not what its format needs
PLAIN_FORMATS = ("text", "prompt", *PAIRS, *JUDGED, *READY)  # which need no chat template
PROMPTS = ("prompt", "messages", "conversations", "question", "instruction", "input")  # fields of a pair's prompt
PART_IN_TEXT = re.compile(rf'"type"\s*:\s*"(?:{"|".join(IMAGE_PARTS)})"')  # of messages that are JSON text
FILLED_BY = {"objects": ("ref-object", "bbox")}  # placeholders of columns that have other names (ms-swift)


@dataclass(frozen=True)
class Conversation:
    """A row as the chat template takes it. ``weight`` multiplies those of its messages; ``arguments`` are the row's own
    for the template.

    Messages may hold our keys ``weight`` (number >= 0) or ``train`` (bool), which no template may see. The content of a
    message that calls tools may be None. The first ``num_prompt`` are a prompt, of which nothing is trained but where
    all tokens are. ``unread`` are keys below the top level that nothing reads.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    arguments: Mapping[str, Any] | None = None
    images: tuple[Any, ...] = ()  # of its parts ``{type: image}``, in order: ImageRef, once opened OpenedImage
    num_prompt: int = 0
    unread: frozenset[str] = make_field(default=frozenset(), compare=False)
    label: bool | None = None  # whether its answer is good, where the row says so


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each with it."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class ReadyTokens:
    """``ids`` int64, ``trained`` bool and, where they are not all 1, ``weights`` float32, all (T)."""

    ids: np.ndarray
    trained: np.ndarray
    weight: float
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class Segments:
    """(text, whether it is trained) of each."""

    parts: tuple[tuple[str, bool], ...]
    weight: float


Ready = ReadyTokens | Segments
Content = Conversation | Pair | str | Ready


def trains_images(asked: bool | str, model_folder: str | Path, sources: Sequence[ResolvedSource]) -> bool:
    """Whether rows are read with images (``asked``: data.images). UserError where it is true and the model has none."""
    family = family_of(model_folder)
    mapped = [name for source in sources for name in source.fields if name in IMAGES]
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


def has_images(row: Row, source: ResolvedSource) -> bool:
    """Whether a row has a column of images, or images among the parts of its messages."""
    names = [source.fields.get(name, name) for name in IMAGES]
    return any(carries(row.fields.get(name)) for name in names if name not in source.ignore) or any(
        PART_IN_TEXT.search(value) is not None
        if isinstance(value, str)
        else any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in walk(value))
        for name, value in row.fields.items()
        if name not in source.ignore
    )


def settle_format(
    rows: Sequence[Row], format: str, fields: Mapping[str, str] = NONE, task: str | None = None
) -> Format:
    """The format of a source: the one asked for, or for ``auto`` the detected one. ``rows`` are its first ones.

    Raises UserError where a field that ``fields`` names stands in none of the rows.
    """
    inner = {name for names in INNER.values() for name in names}
    for field, name in fields.items():
        if field not in inner and rows and not any(name in row.fields for row in rows):
            raise UserError(
                f"no row has the field {name}, which {field} is to be read from",
                where=f"{rows[0].file}:{rows[0].line}",
                why=f"fields found: {_list_fields(rows[0])}",
                fix="correct data.fields",
            )
    return detect_format(rows, fields, task) if format == "auto" else cast(Format, format)


def detect_format(rows: Sequence[Row], fields: Mapping[str, str] = NONE, task: str | None = None) -> Format:
    """The one format whose fields every given row has; a UserError where there is none, or more than one.

    ``fields`` are other names of fields, {ours: the row's}. Where the rows fit several, those that ``task`` takes
    count: cpt takes the text, sft the conversation.
    """
    known = [format for format in FIELDS if set(fields) <= set(known_fields(format))]
    if fields and "label" not in fields and not set(JUDGED) & set(TASKS[task].formats if task else ()):
        known = [format for format in known if format not in JUDGED]  # which has the fields of all conversations
    if not known:
        raise UserError(
            f"no format has all the fields {', '.join(fields)}",
            where="data.fields",
            fix=f"name those of one format: {_known()}",
        )
    candidates = set(known)
    for row in rows:
        held = {name for name, value in row.fields.items() if value is not None}
        for names in (held, row.fields.keys()):  # a null is the row's own fault, and said of it where it is converted
            fitting = {each for each in candidates if all(fields.get(field, field) in names for field in FIELDS[each])}
            if fitting:
                break
        if not fitting:
            what = "the format of the rows is not known"
            raise UserError(
                "this row has other fields than the rows before it" if len(candidates) < len(known) else what,
                where=f"{row.file}:{row.line}",
                why=f"fields found: {_list_fields(row)}",
                fix=f"map the fields of one of these formats in data.fields, or rename them in the rows: {_known()}",
            )
        candidates = fitting
    if not rows:
        raise UserError("no rows to tell the format from", fix="give a data file with at least one row")
    candidates -= set(READY) if len(candidates) > 1 else set()  # tokens beside the text that they were made of
    candidates = candidates & set(PAIRS if task is None else TASKS[task].formats) or candidates
    candidates -= set(JUDGED) if len(candidates) > 1 else set()  # a label beside an answer is for who asks for it
    candidates -= {"query"} if len(candidates) > 1 else set()  # columns that other formats have beside theirs
    if len(candidates) > 1:
        raise UserError(
            f"the rows fit several formats: {', '.join(sorted(candidates))}",
            where=f"{rows[0].file}:{rows[0].line}",
            why=f"fields found: {_list_fields(rows[0])}",
            fix="set data.format to one of them",
        )
    return candidates.pop()


def choose_format(
    first: Sequence[Row], source: ResolvedSource, task: str, has_template: bool, images: bool = False
) -> Format | None:
    """The format of a source, from its ``first`` rows for ``auto``; None where the task lets each row have its own.

    Refuses what the task or the tokenizer cannot take.
    """
    fields, asked = source.fields, source.format
    columns = Columns(fields, source.ignore, images)
    first = [columns.keep(row) for row in first]
    if TASKS[task].num_documents == 1:
        columns.refuse(first)
    each_its_own = TASKS[task].mixes and asked == "auto"
    if each_its_own:
        formats = {detect_format([row], fields, task) for row in first}
    else:
        formats = {settle_format(first, asked, fields, task)}
        columns.refuse(first, *formats)
    for format in sorted(formats):
        check_format(format, task, has_template, source.path)
    return None if each_its_own else formats.pop()


def check_format(format: Format, task: str, has_template: bool, where: str) -> None:
    """Raises UserError where the task, or a tokenizer without a chat template, cannot take rows of the format."""
    if format not in (formats := TASKS[task].formats):
        wanted = FIELDS[cast(Format, formats[0])]
        raise UserError(
            f"task {task} cannot use rows of the format {format}",
            where=where,
            why="; ".join(f"{each.name}: {each.summary}" for each in TASKS.values()),
            fix=f"set task: {name_tasks(lambda other: format in other.formats)}, or give rows with the "
            f"field{'s' * (len(wanted) > 1)} {' and '.join(wanted)}",
        )
    if format not in PLAIN_FORMATS and not has_template:
        raise UserError(
            f"the tokenizer has no chat template, and rows of the format {format} need one",
            where=where,
            fix="give model.chat_template (Jinja text, a file, or a name such as alpaca, which needs no tokens "
            "of its own), or rows with prompt and completion",
        )


def _known() -> str:
    return "; ".join(f"{format} ({', '.join(fields)})" for format, fields in FIELDS.items())


def _list_fields(row: Row) -> str:
    names = list(row.fields)
    return (", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "none"


@dataclass(frozen=True)
class Cells:
    """A row by our names. ``names``: {ours: the row's}; ``reading``: of its messages. Methods raise RowRefused."""

    row: Row
    names: Mapping[str, str]
    reading: Reading

    def name(self, field: str) -> str:
        return self.names.get(field, field)

    def get(self, field: str) -> Any:
        return self.row.fields.get(self.names.get(field, field))

    def text(self, field: str) -> str:
        return _check_text(self.get(field), self.name(field))

    def weight(self) -> float:
        """What the row's loss is multiplied by: its field ``weight``, 1 without."""
        value, name = self.get("weight"), self.name("weight")
        if value is None or (isinstance(value, str) and not value.strip()):  # an empty cell of a CSV file
            return 1.0
        weight = check_weight(value, name)
        if weight == 0:
            raise RowRefused(f"{name} is 0: nothing in this row would be trained, leave it out")
        return weight

    def arguments(self) -> dict[str, Any] | None:
        """The row's own arguments of the chat template: a mapping, or JSON text of one; a null among them is none."""
        value, name = self.get("chat_template_kwargs"), self.name("chat_template_kwargs")
        if isinstance(value, str):
            value = parse_json(value, name) if value.strip() else None
        if value is None:
            return None
        if not isinstance(value, dict):
            raise RowRefused(
                f"{name} must be a mapping of arguments of the chat template, this is {type(value).__name__}"
            )
        return {key: argument for key, argument in value.items() if argument is not None} or None

    def history(self) -> list[tuple[str, str]]:
        """Earlier turns as pairs [asked, answered]."""
        value, name = self.get("history"), self.name("history")
        if value is None or value == "":
            return []
        value = parse_json(value, name) if isinstance(value, str) else value
        if not isinstance(value, list):
            raise RowRefused(f"{name} must be a list of pairs [asked, answered], this is {type(value).__name__}")
        for pair in value:
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
                raise RowRefused(f"{name} must be a list of pairs [asked, answered] of strings")
        return [(asked, answered) for asked, answered in value]

    def below_system(self, turns: list[Message]) -> list[Message]:
        """The messages without a system prompt that has its own field."""
        system, name = self.get("system"), self.name("system")
        if system is None or system == "":
            return turns
        if not isinstance(system, str):
            raise RowRefused(f"{name} must be a string, this is {type(system).__name__}")
        if turns[0]["role"] in SYSTEM_ROLES:
            raise RowRefused(f"two system prompts: the field {name} and the first turn")
        return [{"role": "system", "content": system}, *turns]

    def side(self, field: str, role: str) -> list[Message]:
        """A prompt or a completion: a text or a list of messages."""
        if isinstance(value := self.get(field), list):
            return check_messages(value, self.name(field), NONE, self.reading)
        return [{"role": role, "content": self.text(field)}]

    def answer(self, field: str) -> list[Message]:
        """An answer as a text or a message, or a list of messages or turns that may begin with the prompt."""
        value = self.get(field)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return [{"role": "assistant", "content": self.text(field)}]
        is_turns = value and isinstance(value[0], dict) and self.name("from") in value[0]
        return (check_turns if is_turns else check_messages)(value, self.name(field), self.names, self.reading)


def to_conversation(
    row: Row,
    format: Format,
    fields: Mapping[str, str] = NONE,
    *,
    roles: Mapping[str, str] = NONE,
    drop_system: bool = False,
    images: bool = False,
) -> Content:
    """The row as a conversation (without system prompts if they are dropped), or as a text for format ``text`` (its
    weight is ``row_weight``), or as what it brings ready; with ``images`` it may have these. ``roles``: as
    ``Source.roles``. Raises RowRefused with the reason.
    """
    cells = Cells(row, fields, Reading(images, roles))
    empty = [cells.name(field) for field in FIELDS[format] if cells.get(field) is None]
    if missing := [name for name in empty if name not in row.fields]:
        raise RowRefused(f"{NO_FIELD} {' and '.join(missing)} (fields found: {_list_fields(row)})")
    if empty:
        raise RowRefused(f"{' and '.join(empty)} {'are' if len(empty) > 1 else 'is'} null")
    weight = cells.weight()
    if format == "text":
        return cells.text("text")
    if format in READY:
        return _read_tokens(cells.get, weight) if format == "tokens" else _read_segments(cells.get("segments"), weight)
    optional = OPTIONAL[format]
    tools = check_tools(cells.get("tools"), cells.name("tools")) if "tools" in optional else None
    arguments = cells.arguments() if "chat_template_kwargs" in optional else None

    def join(prompt: list[Message], answer: list[Message]) -> Conversation:
        messages, num_prompt = [*prompt, *answer], len(prompt)
        _refuse_filled(row, messages, format, fields)
        placed: tuple[Any, ...] = ()
        if images:
            column, given = read_column(row.fields, fields, cells.reading)
            messages, placed = place_images(messages, column, given, format, cells.reading)
        if drop_system:
            num_prompt -= sum(message["role"] in SYSTEM_ROLES for message in messages[:num_prompt])
            messages, placed = leave_out_system(messages, placed)
        if not any(message["role"] == "assistant" for message in messages[num_prompt:]):
            raise RowRefused("no assistant message: this row has no loss tokens")
        if placed and format in PAIRS and any(has_image(message) for message in messages[num_prompt:]):
            raise RowRefused("an answer of the pair holds an image: images stand in the prompt that both answer")
        calls = [message.get("tool_calls") for message in messages if len(message) > 2]
        for name, shown in (("a tool call", calls), ("tools", tools), ("chat_template_kwargs", arguments)):
            if (found := find_inexpressible(shown)) is not None:
                raise RowRefused(f"{name} holds {found}, which JSON cannot express")
        return Conversation(messages, tools, weight, arguments, placed, num_prompt, frozenset(cells.reading.unread))

    if format in PAIRS:
        if weight != 1:
            raise RowRefused("every pair weighs 1: leave out weight")
        prompt, chosen, rejected = _read_pair(cells, format)
        return Pair(join(prompt, chosen), join(prompt, rejected))
    label = None
    if format in JUDGED:
        if images or weight != 1:
            raise RowRefused("judged answers take no images" if images else "every answer weighs 1: leave out weight")
        label, format = _read_label(cells), _find_turns(cells)
    prompt = cells.below_system(cells.side("prompt", "user")) if format == "prompt" else []
    answer = _CONVERTERS[format](cells)
    if label is not None:
        messages = [*prompt, *answer]
        asked = [number for number, message in enumerate(messages) if message["role"] in ("user", "tool")]
        last = asked[-1] + 1 if asked else 0
        prompt, answer = messages[:last], messages[last:]
        if not last:
            raise RowRefused("there is no prompt before the answer")
        return replace(join(prompt, answer), label=label)
    return join(prompt, answer)


def row_weight(row: Row, fields: Mapping[str, str] = NONE) -> float:
    """What the row's loss is multiplied by. Raises RowRefused."""
    return Cells(row, fields, Reading()).weight()


def _refuse_filled(row: Row, messages: Sequence[Message], format: str, fields: Mapping[str, str]) -> None:
    """RowRefused where a text holds the placeholder of a column that is not read, such as ms-swift's <bbox> of
    ``objects``; ``<name>`` that is closed by ``</name>`` is text.
    """
    read = {fields.get(name, name) for name in (*REQUIRED[format], *OPTIONAL[format], *IMAGES)}
    columns = [
        name for name, value in row.fields.items() if name not in read and isinstance(value, (list, dict)) and value
    ]
    if not columns:
        return
    texts = [text for message in messages for text in texts_of_message(message)]
    for column in columns:
        for name in FILLED_BY.get(column.casefold(), (column, column.removesuffix("s"))):
            if any(f"<{name}>" in text and f"</{name}>" not in text for text in texts):
                raise RowRefused(
                    f"a text holds <{name}>, which the column {column} is to fill, and nothing does so here: "
                    "write what belongs there into the text"
                )


def _check_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RowRefused(f"{field} must be a string, this is {type(value).__name__}")
    if not value.strip():
        raise RowRefused(f"{field} is empty")
    return value


def _read_alpaca(cells: Cells) -> list[Message]:
    instruction, given = cells.text("instruction"), cells.get("input")
    if given is not None and not isinstance(given, str):
        raise RowRefused(f"{cells.name('input')} must be a string, this is {type(given).__name__}")
    has_input = bool(given and given.strip())
    last = (f"{instruction}\n{given}" if has_input else instruction, cells.text("output"))
    turns = _take_turns([*cells.history(), last])
    if has_input:  # for templates that tell them apart; others read the content
        turns[-2] |= {"instruction": instruction, "input": str(given)}
    return cells.below_system(turns)


def _take_turns(pairs: Sequence[tuple[str, str]]) -> list[Message]:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


_CONVERTERS: Mapping[str, Callable[[Cells], list[Message]]] = {
    "messages": lambda row: check_messages(row.get("messages"), row.name("messages"), row.names, row.reading),
    "sharegpt": lambda row: row.below_system(
        check_turns(row.get("conversations"), row.name("conversations"), row.names, row.reading)
    ),
    "alpaca": _read_alpaca,
    "prompt": lambda row: row.side("completion", "assistant"),
    "question": lambda row: row.below_system(_take_turns([(row.text("question"), row.text("answer"))])),
    "query": lambda cells: cells.below_system(
        _take_turns([*cells.history(), (cells.text("query"), cells.text("response"))])
    ),
}


def _read_label(cells: Cells) -> bool:
    """Whether the answer is good: true or false, 1 or 0, also as text. Raises RowRefused."""
    value = str(cells.get("label")).strip().casefold()
    if value not in ("true", "1", "1.0", "false", "0", "0.0"):
        raise RowRefused(f"{cells.name('label')} must be true (a good answer) or false, this is {value[:40]!r}")
    return value in ("true", "1", "1.0")


def _find_turns(cells: Cells) -> Format:
    """Which format the other fields of a row with a label have. Raises RowRefused."""
    fitting = [format for format in _CONVERTERS if all(cells.get(name) is not None for name in REQUIRED[format])]
    if not fitting:
        names = "; ".join(", ".join(REQUIRED[format]) for format in _CONVERTERS)
        raise RowRefused(f"a row with a label needs an answer, by the fields {names}")
    return cast(Format, fitting[0])


def _read_pair(cells: Cells, format: Format) -> tuple[list[Message], list[Message], list[Message]]:
    """(prompt, chosen, rejected) of a row. RowRefused for an empty answer, equal ones or no common prompt."""
    names = ("chosen", "rejected") if format == "preference" else ("messages", "rejected_response")
    chosen, rejected = map(cells.answer, names)
    is_implicit = format == "preference" and not chosen[0]["role"] == rejected[0]["role"] == "assistant"
    if format == "rejected_response":
        asked = [number for number, message in enumerate(chosen) if message["role"] in ("user", "tool")]
        shared = asked[-1] + 1 if asked else 0
        rejected = rejected if rejected[:shared] == chosen[:shared] else chosen[:shared] + rejected
    elif not is_implicit:
        prompt = _read_asked(cells)
        chosen, rejected, shared = prompt + chosen, prompt + rejected, len(prompt)
    else:
        pairs = enumerate(zip(chosen, rejected, strict=False))
        shared = next((number for number, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    prompt, answers = chosen[:shared], (chosen[shared:], rejected[shared:])
    if answers[0] == answers[1]:
        raise RowRefused(f"{names[0]} and {names[1]} are the same answer: neither is better")
    for name, answer in zip(names, answers, strict=True):
        if not any(message.get("content") or message.get("tool_calls") for message in answer):
            raise RowRefused(f"the answer of {cells.name(name)} is empty")
    if not prompt or any(answer[0]["role"] != "assistant" for answer in answers):
        raise RowRefused(
            f"{names[0]} and {names[1]} have no common prompt: their first messages must be the same, up to an answer "
            "of the assistant in each"
        )
    if is_implicit:
        _refuse_other_prompt(cells, chosen, prompt)
    return cells.below_system(prompt), *answers


def _read_asked(cells: Cells) -> list[Message]:
    """The prompt of answers that stand alone."""
    given = [name for name in PROMPTS if carries(cells.get(name))]
    if given == ["instruction", "input"]:
        texts = list(map(cells.text, given))
        prompt = [{"role": "user", "content": "\n".join(texts), "instruction": texts[0], "input": texts[1]}]
    elif len(given) != 1:
        names = " and ".join(map(cells.name, given)) or "none"
        raise RowRefused(f"the answers need one prompt, and of its fields the row has {names} (data.ignore leaves out)")
    elif given[0] in ("messages", "conversations"):
        prompt = cells.answer(given[0])
    else:
        prompt = cells.side(given[0], "user")
    return _take_turns(cells.history()) + prompt


def _refuse_other_prompt(cells: Cells, chosen: list[Message], prompt: list[Message]) -> None:
    """RowRefused where a field holds another prompt than the one that the answers begin with."""
    for name in (*PROMPTS, "history"):
        value = cells.get(name)
        if not carries(value):
            continue
        if isinstance(value, list) and name != "history":
            same = cells.answer(name) in (chosen, prompt)
        else:
            same = any(value == message["content"] for message in prompt)
        if not same:
            raise RowRefused(
                f"{cells.name(name)} is not the prompt that both answers begin with (data.ignore leaves it out)"
            )


def _read_tokens(get: Callable[[str], Any], weight: float) -> ReadyTokens:
    ids = _read_integers(get("input_ids"), "input_ids")
    trained = np.ones(len(ids), dtype=np.bool_)

    def read(name: str, read_list: Callable[[Any, str], np.ndarray]) -> np.ndarray | None:
        if (value := get(name)) is None:
            return None
        entries = read_list(value, name)
        if len(entries) != len(ids):
            raise RowRefused(f"{name} has {len(entries):,} entries, input_ids {len(ids):,}")
        return entries

    if (targets := read("labels", _read_integers)) is not None:
        trained &= targets != IGNORED
        if (wrong := np.flatnonzero(trained & (targets != ids))).size:
            raise RowRefused(
                f"label {wrong[0]} is {targets[wrong[0]]}, neither {IGNORED} nor the token {ids[wrong[0]]}"
            )
    for name in MASKS:
        if (mask := read(name, _read_mask)) is not None:
            trained &= mask
    weights = read("loss_weights", _read_weights)
    if (attention := read("attention_mask", _read_flags)) is not None and (attention != 1).any():
        raise RowRefused("attention_mask is not 1 for every token: leave padding out of input_ids")
    positions = read("position_ids", _read_integers)
    if positions is not None and (positions != np.arange(len(ids))).any():
        raise RowRefused(f"position_ids are not 0, 1, 2, ... to the end: {A_PACK}")
    if (types := read("token_type_ids", _read_flags)) is not None and types.any():
        raise RowRefused("token_type_ids are not all 0, and they would not be used: leave them out (data.ignore)")
    read("special_tokens_mask", _read_mask)
    for name in ("seq_lengths", "length"):
        if (value := get(name)) not in (None, len(ids), [len(ids)]):
            raise RowRefused(f"{name} is {value!r:.40}, and input_ids has {len(ids):,} entries: {A_PACK}")
    return ReadyTokens(ids, trained, weight, weights)


def _read_integers(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) is int and abs(item) < 1 << 31 for item in value):
        raise RowRefused(f"{name} must be a list of integers of 32 bits")
    return np.array(value, dtype=np.int64)


def _read_flags(value: Any, name: str) -> np.ndarray:
    """Integers, of which 0 and 1 may be false and true."""
    if isinstance(value, list):
        value = [int(item) if isinstance(item, bool) else item for item in value]
    return _read_integers(value, name)


def _read_mask(value: Any, name: str) -> np.ndarray:
    flags = _read_flags(value, name)
    if not np.isin(flags, (0, 1)).all():
        raise RowRefused(f"{name} must be 0 or 1 for each token")
    return flags == 1


def _read_weights(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) in (int, float) for item in value):
        raise RowRefused(f"{name} must be a list of numbers")
    return np.array([check_weight(item, f"entry {index} of {name}") for index, item in enumerate(value)], np.float64)


def _read_segments(value: Any, weight: float) -> Segments:
    parts = []
    for number, part in enumerate(value if isinstance(value, list) else [None], start=1):
        if (
            not isinstance(part, Mapping)
            or not isinstance(part.get("text"), str)
            or not isinstance(part.get("label"), bool)
        ):
            raise RowRefused(
                f"segments must be a list of {{text: string, label: true or false}}, not so number {number}"
            )
        if more := [name for name, value in part.items() if name not in ("text", "label") and value is not None]:
            raise RowRefused(f"segment {number} has {', '.join(map(str, more))}, which would not be used")
        parts.append((part["text"], part["label"]))
    return Segments(tuple(parts), weight)
