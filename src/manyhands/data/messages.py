"""Messages, tool calls and tool definitions in the one form that chat templates take; what cannot be is refused with
the reason.

Knows no formats of rows and no tokenizer. A message has a role, a content (text; null only where tools are called), and
where given ``tool_calls`` with arguments as objects, ``reasoning_content`` or ``thinking``, and our ``weight``
(``loss_weight`` is the same) or ``train``. A content in parts is joined: text, and for an assistant reasoning and tool
calls. Keys that are null are left out, other keys are handed to the template as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhands.config.sources import MEDIA
from manyhands.core.files import describe_json_fault
from manyhands.data.text_files import is_encodable, parse_value

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
THINKING = ("reasoning_content", "thinking")
PARTS = {
    "text": ("text", "value"),
    "reasoning": ("value", "text", "reasoning"),
    "thinking": ("thinking", "value", "text"),
}
IMAGE_PARTS = ("image", "image_url", "image_path")
CALL_PART = "tool_call"  # {type: tool_call, value: JSON text of a call}
SHAREGPT_HINT = (
    " (turns with from and value are the format sharegpt: data.fields {conversations: NAME} says where they stand)"
)


class RowRefused(Exception):
    """A row cannot be used; the message says why. The caller adds file and line."""


class ImagesRefused(RowRefused):
    """A message has an image where text alone is read."""


def check_messages(value: Any, field: str, fields: Mapping[str, str], images: bool = False) -> list[Message]:
    """A list of messages, or JSON text of one. ``fields`` may give other names for ``role`` and ``content``; with
    ``images`` a content may have parts that are images, and is then a list of parts. Raises RowRefused.
    """
    value = parse_json(value, field) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise RowRefused(f"{field} must be a list of messages with at least one in it")
    role_key, content_key = fields.get("role", "role"), fields.get("content", "content")
    messages: list[Message] = []
    bare = {role_key, content_key}
    for number, message in enumerate(value, start=1):
        if (
            isinstance(message, dict)
            and message.keys() == bare
            and isinstance(message[content_key], str)
            and message[role_key] in ROLES
        ):
            messages.append(
                {"role": message[role_key], "content": message[content_key]}
            )  # most are so, and need no more checks
            continue
        where = f"message {number} of {field}"
        if not isinstance(message, dict):
            raise RowRefused(f"{where} is not an object with {role_key} and {content_key}")
        if role_key not in message and "from" in message:
            raise RowRefused(f"{where} has no {role_key}{SHAREGPT_HINT}")
        rest = {
            key: entry for key, entry in message.items() if key not in (role_key, content_key) and entry is not None
        }
        messages.append(make_message(message.get(role_key), message.get(content_key), rest, where, images))
    return messages


def make_message(role: Any, content: Any, rest: Message, where: str, images: bool = False) -> Message:
    """One checked message; ``rest`` holds its other keys, without nulls. Raises RowRefused."""
    if isinstance(content, list):
        content, rest = _join_parts(content, rest, where, images)
    if "loss_weight" in rest:
        if "weight" in rest:
            raise RowRefused(f"{where} has both weight and loss_weight: keep one")
        rest = {**rest, "weight": rest["loss_weight"]}
        del rest["loss_weight"]
    if media := next((key for key in rest if rest[key] and key.casefold() in MEDIA), None):
        raise RowRefused(f"{where} has {media}, and only text can be trained")
    calls = _read_calls(rest, where)
    if role == "function":  # the older name
        role = "tool"
    if not isinstance(role, str) or role not in ROLES:
        raise RowRefused(f"{where} has the role {_quote(role)}; known roles: {', '.join(ROLES)}")
    if role != "assistant":
        for key in ("tool_calls", *THINKING):
            if calls if key == "tool_calls" else rest.get(key):
                raise RowRefused(f"{where} has {key}, but its role is {role}: only an assistant has them")
    message: Message = {"role": role, "content": _read_content(content, where, may_be_null=bool(calls))}
    for key, entry in rest.items():
        if key in THINKING and not isinstance(entry, str):
            raise RowRefused(f"{key} of {where} must be a string, this is {type(entry).__name__}")
        if key not in ("tool_calls", "function_call"):
            message[key] = entry
    _check_weight(message, where)
    if calls:
        message["tool_calls"] = calls
    return message


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _read_content(content: Any, where: str, *, may_be_null: bool) -> str | list[dict[str, Any]] | None:
    if isinstance(content, (str, list)) or (content is None and may_be_null):
        return content
    because = " (null is for messages that call tools)" if content is None else ""
    raise RowRefused(f"the content of {where} must be a string, this is {type(content).__name__}{because}")


def _join_parts(
    parts: list[Any], rest: Message, where: str, images: bool
) -> tuple[str | list[dict[str, Any]] | None, Message]:
    """The content of a message that comes in parts, and its other keys with what the parts add to them. It is a text,
    or a list of parts if some are images (``{type: image, image: ...}``, see ``image_rows.py``). Raises RowRefused.
    """
    texts: list[str] = []
    shown: list[dict[str, Any]] = []  # texts and images in their order
    thoughts: list[str] = []
    calls: list[Any] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind == CALL_PART:
            call = part.get("value", part.get(CALL_PART))
            calls.append(parse_json(call, f"a tool call of {where}") if isinstance(call, str) else call)
            continue
        if images and kind in IMAGE_PARTS:
            held = {key: value for key, value in part.items() if key != "type" and value is not None}
            shown.append({"type": "image"} | ({"image": held} if held.keys() - {"text"} else {}))
            continue
        if kind in IMAGE_PARTS:
            raise ImagesRefused(
                f"the content of {where} has an image, and this run trains text alone: the model takes no images, "
                "data.images is false, or none of the first 100 rows has one (then set data.images: true)"
            )
        if not isinstance(kind, str) or kind not in PARTS:
            known = ", ".join((*PARTS, CALL_PART, *IMAGE_PARTS[:images]))
            raise RowRefused(
                f"the content of {where} has a part of type {_quote(kind)}, and only text "
                f"{'and images ' * images}can be trained (types: {known})"
            )
        text = next((part[key] for key in PARTS[kind] if isinstance(part.get(key), str)), None)
        if text is None:
            keys = ", ".join(map(str, part))
            raise RowRefused(
                f"a part of the content of {where} is {kind}, but none of its keys ({keys}) is "
                f"{' or '.join(PARTS[kind])}"
            )
        (texts if kind == "text" else thoughts).append(text)
        if kind == "text":
            shown.append({"type": "text", "text": text})
    if thoughts:
        if any(rest.get(key) for key in THINKING):
            raise RowRefused(f"{where} has reasoning in its content and in a key of its own: keep one")
        rest = {**rest, "reasoning_content": "".join(thoughts)}
    if calls:
        if rest.get("tool_calls"):
            raise RowRefused(f"{where} has tool calls in its content and in tool_calls: keep one")
        rest = {**rest, "tool_calls": calls}
    if any(part["type"] == "image" for part in shown):
        return shown, rest
    return ("".join(texts) if texts or not calls else None), rest


def _read_calls(rest: Message, where: str) -> list[dict[str, Any]]:
    """``tool_calls``, or the older ``function_call``, as {type, function: {name, arguments: object}} with further
    keys.
    """
    calls = rest.get("tool_calls")
    if calls is None and "function_call" in rest:
        calls = [rest["function_call"]]
    if isinstance(calls, str):
        calls = parse_json(calls, f"tool_calls of {where}")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RowRefused(f"tool_calls of {where} must be a list, this is {type(calls).__name__}")
    return [read_call(call, f"tool call {number} of {where}") for number, call in enumerate(calls, start=1)]


def read_call(call: Any, where: str) -> dict[str, Any]:
    """One tool call, flat or under ``function``, its arguments an object or JSON text of one. Raises RowRefused."""
    outer = call if isinstance(call, dict) else {}
    function = outer.get("function", outer)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefused(f"{where} must be an object with name and arguments, by itself or under `function`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"arguments of {where}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowRefused(
            f"arguments of {where} must be an object or JSON text of one, this is {type(arguments).__name__}"
        )
    kept = {
        key: entry for key, entry in outer.items() if key not in ("function", "name", "arguments") and entry is not None
    }
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def check_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """Definitions of tools, a list or JSON text of one; a bare {name, ...} is put under ``function``. None where there
    are none.
    """
    if isinstance(value, str):
        value = parse_json(value, field) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowRefused(f"{field} must be a list of tools or JSON text of one, this is {type(value).__name__}")
    tools = []
    for number, tool in enumerate(value, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRefused(f"tool {number} of {field} must be an object with a name, by itself or under `function`")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _check_weight(message: Message, where: str) -> None:
    if "weight" in message:
        message["weight"] = check_weight(message["weight"], f"weight of {where}")
    if "train" in message:
        if not isinstance(message["train"], bool):
            raise RowRefused(f"train of {where} must be true or false, this is {_quote(message['train'])}")
        if "weight" in message:
            raise RowRefused(f"{where} has both weight and train: keep one")


def check_weight(value: Any, where: str) -> float:
    """A weight of the loss, a number >= 0; text of a number (from CSV) is one too. Raises RowRefused."""
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise RowRefused(f"{where} must be a number >= 0, this is {_quote(value)}")
    return weight


def weight_of(message: Message) -> float:
    """A message's ``weight`` (number >= 0), or 1 or 0 for its ``train``; 1 without either. Raises RowRefused."""
    weight, train = message.get("weight", 1.0), message.get("train", True)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise RowRefused(f"the weight of a message must be a number >= 0, this is {weight!r}")
    if "weight" in message and "train" in message and bool(train) != (weight > 0):
        raise RowRefused("a message has weight and train that contradict each other: keep one")
    return float(weight) if train else 0.0


def parse_json(text: str, what: str) -> Any:
    """JSON text inside a row. Raises RowRefused."""
    try:
        value = parse_value(text)
    except json.JSONDecodeError as error:
        raise RowRefused(f"{what} is no JSON: {describe_json_fault(error)} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise RowRefused(f"{what} is no JSON: {error}") from None
    if "\\ud" in text.lower() and not is_encodable(value):
        raise RowRefused(f"{what} holds half of a surrogate pair: not a character")
    return value


def visible(message: Message) -> str:
    """The content behind the thinking that templates leave out of it."""
    content = message.get("content")
    return content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""


def hides_thinking(messages: Sequence[Message], text: str) -> bool:
    """Whether the last answer's thinking, a key of its own or in its content, does not stand in the text that a
    template made. Of earlier answers many templates leave it out, as they do when the model is used.
    """
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    content = last.get("content")
    inside = content.rpartition("</think>")[0].rpartition("<think>")[2] if isinstance(content, str) else ""
    thoughts = [" ".join(str(thought or "").split()) for thought in (*map(last.get, THINKING), inside)]
    return any(thoughts) and not all(thought in " ".join(text.split()) for thought in thoughts)


def fill(message: Message, private: str) -> Iterator[Message]:
    """The message with ``private`` as content, or as its first tool call's name; the one it really has goes first.

    An empty content is kept beside tool calls: to fill it would change what the template writes around it.
    """
    plain = {key: value for key, value in message.items() if key not in THINKING}
    by_content = {**plain, "content": private}
    calls = message.get("tool_calls")
    if not calls:
        yield by_content
        return
    by_name = {"content": None, **plain, "tool_calls": [_rename(calls[0], private), *calls[1:]]}
    content = message.get("content")
    yield from (by_content, by_name) if isinstance(content, str) and content.strip() else (by_name, by_content)


def _rename(call: Any, name: str) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name} if isinstance(call, dict) else call


def check_shown(message: Message, turn: int, part: str) -> None:
    """Raises RowRefused where a tool call of the turn does not stand in its text."""
    names = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    texts = [visible(message), *(str(message.get(key) or "").strip() for key in THINKING)]
    texts = [text for text in texts if text and text in part]  # a name in what the turn says is no call
    for name in names:
        if not isinstance(name, str):
            continue
        spellings = (name, json.dumps(name)[1:-1])
        if max(part.count(each) - sum(text.count(each) for text in texts) for each in spellings) < names.count(name):
            beside = "the text beside it, or " if visible(message) else ""
            raise RowRefused(
                f"the chat template does not show the tool call {name} of message {turn + 1}: leave out {beside}"
                "samples with tool calls, or give a model.chat_template that shows them"
            )
