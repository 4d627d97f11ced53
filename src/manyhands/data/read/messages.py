"""Messages, tool calls and tool definitions in the one form that chat templates take; what cannot be is refused with
the reason.

Knows no formats of rows and no tokenizer. A message has a role, a content (text; null only where tools are called), and
where given ``tool_calls`` with arguments as objects, thinking (``THINKING``), and our ``weight`` or ``train``. A
content in parts is joined: text, and for an assistant reasoning and tool calls. Keys that are null are left out. Other
tools' names are read:

| name | becomes |
|---|---|
| the names of ``Reading.roles``, as they are written | the role that they stand for, before all others |
| the roles of ``ROLE_NAMES``, in upper or lower case | the role of that name here |
| the role tool_call or function_call | an assistant's tool call, from JSON text {name, arguments} or a list of them |
| loss, loss_mask, trainable, trained, training, train_on: true, false, 1 or 0 | ``train`` |
| loss_weight, loss_scale | ``weight`` |

A call that follows the assistant's words is part of the same turn. A key at any depth whose name says that it decides
about training, and which is not one of these, is refused (``check_key``); what else is not read is named in
``Reading.unread``, but for the other keys of messages, calls and tools, which the template gets.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as make_field
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from manyhands.config.schema import Role
from manyhands.config.sources import MEDIA
from manyhands.core.files import describe_json_fault
from manyhands.data.read.text_files import is_encodable, parse_value

Message = dict[str, Any]

ROLES: tuple[Role, ...] = get_args(Role)
ROLE_NAMES = MappingProxyType(
    {
        **{role: role for role in ROLES},
        **dict.fromkeys(("human",), "user"),
        **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai"), "assistant"),
        **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
    }
)
CALL_ROLES = ("function_call", "tool_call")
THINKING = ("reasoning_content", "thinking", "reasoning")
MAX_WEIGHT = float(np.finfo(np.float32).max)
TRAIN_KEYS = ("train", "trainable", "trained", "training", "train_on", "loss", "loss_mask")  # true or 1: it is trained
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
# words in the name of a key that decides about training, and in that of one that decides about the pixels of an image
_TRAINS = re.compile(
    "train(s|ed|ing|able)?|untrained|loss|(un)?masks?|masked|weights?|supervised?|learn(ed|able)?|ignored?|skip(ped)?"
)
_SIZES = re.compile("pixels?|resized?|crop(ped)?|rotat(e|ed|ion)|scale|frames?|fps|tiles?")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PARTS = {
    "text": ("text", "value"),
    "reasoning": ("value", "text", "reasoning"),
    "thinking": ("thinking", "value", "text"),
}
IMAGE_PARTS = ("image", "image_url", "image_path")
IMAGE_KEYS = ("bytes", "path", "url", "image_url", "image_path", "image", "base64")  # where an object has its image
CALL_PART = "tool_call"  # {type: tool_call, value: JSON text of a call}
SHAREGPT_HINT = (
    " (turns with from and value are the format sharegpt: data.fields {conversations: NAME} says where they stand)"
)


class RowRefused(Exception):
    """A row cannot be used; the message says why. The caller adds file and line."""


class ImagesRefused(RowRefused):
    """A message has an image where text alone is read."""


@dataclass
class Reading:
    """How messages are read. ``images``: parts of a content may be images. ``roles``: roles by the names that the rows
    of a source have for them. ``unread`` gathers the keys below the top level that hold something and that nothing
    reads.
    """

    images: bool = False
    roles: Mapping[str, str] = make_field(default_factory=dict)
    unread: set[str] = make_field(default_factory=set)

    def leave(self, entries: Mapping[Any, Any], read: Collection[str], of: str, where: str) -> None:
        """Names the keys of ``entries`` that are not among ``read``. Raises RowRefused as ``check_key`` does."""
        for key, value in entries.items():
            if key not in read and holds(value):
                check_key(key, where)
                self.unread.add(f"{key} of {of}")

    def leave_of_image(self, entries: Mapping[Any, Any], where: str) -> None:
        """The same for the keys of an image but ``IMAGE_KEYS``. RowRefused also for those that ask for another size."""
        for key, value in entries.items():
            resizes = _has_word(key, _SIZES) or (key == "detail" and value == "low")
            if resizes and holds(value):
                raise RowRefused(
                    f"{where} has {key}: {_quote(value)}, which would not be used: data.shrink_images_above and "
                    "data.enlarge_images_below set the size of all images; remove it"
                )
        plain = ("detail",) if entries.get("detail") == "auto" else ()
        self.leave(entries, ("type", *IMAGE_KEYS, *plain), "images", where)


def _has_word(key: Any, words: re.Pattern[str]) -> bool:
    return any(words.fullmatch(word.casefold()) for word in _WORD.findall(str(key)))


def holds(value: Any) -> bool:
    """Whether a key's value is more than nothing: null, an empty text, list or object."""
    return value is not None and not (isinstance(value, (str, list, tuple, dict)) and not value)


def check_key(key: Any, where: str) -> None:
    """RowRefused for a key that nothing reads and whose name says that it decides what is trained."""
    if _has_word(key, _TRAINS):
        raise RowRefused(
            f"{where} has {key}, which would not be used: write train (true or false) or weight (a number) as a key of "
            "a message, or remove it"
        )


def check_messages(value: Any, field: str, fields: Mapping[str, str], reading: Reading | None = None) -> list[Message]:
    """A list of messages, or JSON text of one. ``fields`` may give other names for ``role`` and ``content``; where a
    content may have parts that are images, it is then a list of parts. Raises RowRefused.
    """
    value = parse_json(value, field) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise RowRefused(f"{field} must be a list of messages with at least one in it")
    role_key, content_key = fields.get("role", "role"), fields.get("content", "content")
    messages: list[Message] = []
    bare = {role_key, content_key}
    reading = Reading() if reading is None else reading
    for number, message in enumerate(value, start=1):
        if (
            isinstance(message, dict)
            and message.keys() == bare
            and isinstance(message[content_key], str)
            and message[role_key] in ROLES
            and not reading.roles
        ):
            # most are so, and need no more checks
            messages.append({"role": message[role_key], "content": message[content_key]})
            continue
        where = f"message {number} of {field}"
        if not isinstance(message, dict):
            raise RowRefused(f"{where} is not an object with {role_key} and {content_key}")
        if role_key not in message and "from" in message:
            raise RowRefused(f"{where} has no {role_key}{SHAREGPT_HINT}")
        rest = {key: entry for key, entry in message.items() if key not in bare and entry is not None}
        add_message(messages, message.get(role_key), message.get(content_key), rest, where, reading)
    return messages


def add_message(messages: list[Message], role: Any, content: Any, rest: Message, where: str, reading: Reading) -> None:
    """Appends a checked message or adds its calls to the last; ``rest``: other non-null keys. Raises RowRefused."""
    name = reading.roles.get(role, role.casefold()) if isinstance(role, str) else ""
    if name not in CALL_ROLES:
        if name not in ROLE_NAMES:
            known = ", ".join((*reading.roles, *ROLE_NAMES, *CALL_ROLES))
            raise RowRefused(
                f"{where} has the role {_quote(role)}; known roles: {known} (`roles` of a source in data.train names "
                "others)"
            )
        messages.append(_make_message(ROLE_NAMES[name], content, rest, where, reading))
        return
    calls = parse_json(content, where) if isinstance(content, str) else content
    called = {**rest, "tool_calls": calls if isinstance(calls, list) else [calls]}
    made = _make_message("assistant", None, called, where, reading)
    if "tool_calls" not in made:
        raise RowRefused(f"{where} calls no tool")
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and all(last.get(key) == made.get(key) for key in ("weight", "train")):
        last["tool_calls"] = [*last.get("tool_calls", []), *made["tool_calls"]]
    else:
        messages.append(made)


def _make_message(role: str, content: Any, rest: Message, where: str, reading: Reading) -> Message:
    if isinstance(content, list):
        content, rest = _join_parts(content, rest, where, reading)
    rest = _read_weight(rest, where)
    if media := next((key for key in rest if rest[key] and key.casefold() in MEDIA), None):
        raise RowRefused(f"{where} has {media}, and only text can be trained")
    calls = _read_calls(rest, where, reading)
    if role != "assistant":
        for key in ("tool_calls", *THINKING):
            if calls if key == "tool_calls" else rest.get(key):
                raise RowRefused(f"{where} has {key}, but its role is {role}: only an assistant has them")
    if not (isinstance(content, (str, list)) or (content is None and calls)):
        because = " (null is for messages that call tools)" if content is None else ""
        raise RowRefused(f"the content of {where} must be a string, this is {type(content).__name__}{because}")
    message: Message = {"role": role, "content": content}
    for key, entry in rest.items():
        if key in THINKING and not isinstance(entry, str):
            raise RowRefused(f"{key} of {where} must be a string, this is {type(entry).__name__}")
        if key not in ("tool_calls", "function_call"):
            message[key] = entry
    if calls:
        message["tool_calls"] = calls
    return message


def _read_weight(rest: Message, where: str) -> Message:
    """The message's keys with ``TRAIN_KEYS`` as ``train`` and ``WEIGHT_KEYS`` as ``weight``. Raises RowRefused."""
    given = [key for key in (*WEIGHT_KEYS, *TRAIN_KEYS) if key in rest]
    if len(given) > 1:
        raise RowRefused(f"{where} has both {given[0]} and {given[1]}: keep one")
    others = {}
    for key, value in rest.items():
        if key in WEIGHT_KEYS:
            others["weight"] = check_weight(value, f"{key} of {where}")
        elif key in TRAIN_KEYS:
            if value not in (0, 1) or not isinstance(value, (bool, int)):
                raise RowRefused(f"{key} of {where} must be true or false, this is {_quote(value)}")
            others["train"] = bool(value)
        else:
            if holds(value):
                check_key(key, where)
            others[key] = value
    return others


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _join_parts(
    parts: list[Any], rest: Message, where: str, reading: Reading
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
            reading.leave(part, ("type", "value", CALL_PART), "content parts", f"a part of the content of {where}")
            calls.append(parse_json(call, f"a tool call of {where}") if isinstance(call, str) else call)
            continue
        if reading.images and kind in IMAGE_PARTS:
            held = {key: value for key, value in part.items() if key in IMAGE_KEYS and value is not None}
            others = {key: value for key, value in part.items() if key not in ("text", "index")}
            reading.leave_of_image(others, f"an image of {where}")
            index = {} if held or part.get("index") is None else {"index": part["index"]}
            shown.append({"type": "image", **index} | ({"image": held} if held else {}))
            continue
        if kind in IMAGE_PARTS:
            raise ImagesRefused(
                f"the content of {where} has an image, and this run trains text alone: the model takes no images, "
                "data.images is false, or none of the first 100 rows has one (then set data.images: true)"
            )
        if not isinstance(kind, str) or kind not in PARTS:
            known = ", ".join((*PARTS, CALL_PART, *IMAGE_PARTS[: reading.images]))
            raise RowRefused(
                f"the content of {where} has a part of type {_quote(kind)}, and only text "
                f"{'and images ' * reading.images}can be trained (types: {known})"
            )
        used = next((key for key in PARTS[kind] if isinstance(part.get(key), str)), None)
        if used is None:
            keys = ", ".join(map(str, part))
            raise RowRefused(
                f"a part of the content of {where} is {kind}, but none of its keys ({keys}) is "
                f"{' or '.join(PARTS[kind])}"
            )
        text = part[used]
        reading.leave(part, ("type", used), "content parts", f"a part of the content of {where}")
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


def _read_calls(rest: Message, where: str, reading: Reading) -> list[dict[str, Any]]:
    """``tool_calls`` or the older ``function_call`` as {type, function: {name, arguments: object}, ...}."""
    calls = rest.get("tool_calls")
    if holds(calls) and holds(rest.get("function_call")):
        raise RowRefused(f"{where} has both tool_calls and function_call: keep one")
    if not holds(calls) and "function_call" in rest:
        calls = [rest["function_call"]]
    if isinstance(calls, str):
        calls = parse_json(calls, f"tool_calls of {where}")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RowRefused(f"tool_calls of {where} must be a list, this is {type(calls).__name__}")
    return [_read_call(call, f"tool call {number} of {where}", reading) for number, call in enumerate(calls, start=1)]


def _read_call(call: Any, where: str, reading: Reading) -> dict[str, Any]:
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
    if function is not outer:
        reading.leave(function, ("name", "arguments"), "functions that are called", where)
    kept = {
        key: entry for key, entry in outer.items() if key not in ("function", "name", "arguments") and entry is not None
    }
    for key in kept:
        check_key(key, where)
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def check_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """Definitions of tools, a list or its JSON; a bare {name, ...} goes under ``function``. None where none."""
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


# Keys that each template takes or leaves as it needs them, and those that say nothing.
_PLAIN_KEYS = MappingProxyType(
    {
        "messages": frozenset(
            {"role", "content", "tool_calls", "tool_call_id", "train", "weight", "instruction", "input", *THINKING}
        ),
        "tool calls": frozenset({"type", "id", "function"}),
        "tools": frozenset({"type", "function"}),
        "functions of tools": frozenset({"name", "description", "parameters"}),
    }
)


def find_keys(messages: Sequence[Message], tools: Sequence[Any] | None) -> set[tuple[str, str]]:
    """(what they are keys of, key) of further keys that hold something."""
    return {
        (of, key)
        for of, entries in _list_objects(messages, tools)
        if not entries.keys() <= _PLAIN_KEYS[of]
        for key, value in entries.items()
        if key not in _PLAIN_KEYS[of] and holds(value)
    }


def without_key(
    messages: Sequence[Message], tools: Sequence[Any] | None, of: str, key: str
) -> tuple[list[Message], list[Any]]:
    """Messages and tools in which no object of a kind of ``find_keys`` has a key."""

    def bare(kind: str, entries: Any, inner: str = "") -> Any:
        if not isinstance(entries, dict):
            return entries
        kept = {name: value for name, value in entries.items() if kind != of or name != key}
        if inner == "tool calls" and kept.get("tool_calls"):
            kept["tool_calls"] = [bare(inner, call) for call in kept["tool_calls"]]
        elif inner and "function" in kept:
            kept["function"] = bare(inner, kept["function"])
        return kept

    return (
        [bare("messages", message, "tool calls") for message in messages],
        [bare("tools", tool, "functions of tools") for tool in tools or ()],
    )


def _list_objects(messages: Sequence[Message], tools: Sequence[Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        if len(message) > 2:
            yield "messages", message
            yield from (("tool calls", call) for call in message.get("tool_calls") or ())
    for tool in tools or ():
        if isinstance(tool, dict):
            yield "tools", tool
            if isinstance(tool.get("function"), dict):
                yield "functions of tools", tool["function"]
