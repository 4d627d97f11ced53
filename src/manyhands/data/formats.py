"""What the fields of a row mean: from a row to a conversation or a text. Knows no tokenizer and no file.

| format | fields | becomes |
|---|---|---|
| messages | messages: list of {role, content} | the conversation itself |
| prompt | prompt, completion: strings or lists of messages | a user and an assistant turn |
| question | question, answer: strings | a user and an assistant turn |
| text | text: string | the text |

Other fields of a row are ignored; other keys of a message are handed to the chat template as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from manyhands.data.sources import Row
from manyhands.errors import UserError

Format = Literal["messages", "prompt", "question", "text"]
Message = dict[str, Any]

FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant")


class RowRefused(Exception):
    """A row cannot be used; the message says why. The caller adds file and line."""


def detect_format(rows: Sequence[Row]) -> Format:
    """The one format whose fields every given row has; a UserError where there is none, or more than one."""
    candidates = set(FIELDS)
    for row in rows:
        fitting = {format for format in candidates if all(row.fields.get(field) is not None for field in FIELDS[format])}
        if not fitting:
            raise _unknown_format(row, differs=len(candidates) < len(FIELDS))
        candidates = fitting
    if not rows:
        raise UserError("no rows to tell the format from", fix="give a data file with at least one row")
    if len(candidates) > 1:
        raise UserError(
            f"the rows fit several formats: {', '.join(sorted(candidates))}",
            where=f"{rows[0].file}:{rows[0].line}",
            why=f"fields found: {', '.join(rows[0].fields)}",
            fix="say which one in data.format",
        )
    return candidates.pop()


def _unknown_format(row: Row, differs: bool) -> UserError:
    known = "; ".join(f"{format} ({', '.join(fields)})" for format, fields in FIELDS.items())
    return UserError(
        "this row has other fields than the rows before it" if differs else "the format of the rows is not known",
        where=f"{row.file}:{row.line}",
        why=f"fields found: {', '.join(row.fields) or 'none'}",
        fix=f"rename the fields to one of these formats: {known}",
    )


def to_conversation(row: Row, format: Format) -> list[Message] | str:
    """The row as messages, or as a text for format ``text``. Raises RowRefused with the reason."""
    missing = [field for field in FIELDS[format] if row.fields.get(field) is None]
    if missing:
        raise RowRefused(f"no field {' and '.join(missing)} (fields found: {', '.join(row.fields) or 'none'})")
    if row.fields.get("tools"):
        raise RowRefused("the row has tools: conversations with tools cannot be trained yet")
    if format == "text":
        return _check_text(row.fields["text"], "text")
    if format == "messages":
        messages = _check_messages(row.fields["messages"], "messages")
    else:
        asked, answered = FIELDS[format]
        messages = _to_turns(row.fields[asked], asked, "user") + _to_turns(row.fields[answered], answered, "assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowRefused("no assistant message: nothing in this row can be trained")
    return messages


def _check_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RowRefused(f"{field} must be a string, this is {type(value).__name__}")
    if not value.strip():
        raise RowRefused(f"{field} is empty")
    return value


def _to_turns(value: object, field: str, role: str) -> list[Message]:
    if isinstance(value, list):
        return _check_messages(value, field)
    return [{"role": role, "content": _check_text(value, field)}]


def _check_messages(value: object, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RowRefused(f"{field} must be a list of messages with at least one in it")
    for number, message in enumerate(value, start=1):
        where = f"message {number} of {field}"
        if not isinstance(message, dict):
            raise RowRefused(f"{where} is not an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            if role in ("tool", "function"):
                raise RowRefused(f"{where} has the role {role}: tool messages cannot be trained yet")
            raise RowRefused(f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise RowRefused(f"{where} calls tools: tool calls cannot be trained yet")
        for key in ("weight", "train"):
            if key in message:
                raise RowRefused(f"{where} has the key {key}: weights of single messages are not known yet")
        if not isinstance(message.get("content"), str):
            raise RowRefused(f"the content of {where} must be a string, this is {type(message.get('content')).__name__}")
    return value
