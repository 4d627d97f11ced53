"""Turns of {from, value} as messages. Knows no rows and no tokenizer.

| from | becomes |
|---|---|
| human, user | user |
| gpt, chatgpt, assistant, model, bot | assistant |
| system, developer | the same |
| function_call, tool_call | an assistant's tool call, from JSON text {name, arguments} or a list of them |
| observation, tool, tool_response, function_response | tool |

A call that follows the assistant's words is part of the same turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.data.messages import Message, RowRefused, make_message, parse_json

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
CALLS = ("function_call", "tool_call")


def check_turns(value: Any, field: str, fields: Mapping[str, str]) -> list[Message]:
    """A list of turns, or JSON text of one. ``fields`` may give other names for ``from`` and ``value``. Raises
    RowRefused.
    """
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
        if who in CALLS:
            _add_calls(messages, said, rest, where)
            continue
        role = ROLES.get(who) if isinstance(who, str) else None
        if role is None:
            raise RowRefused(f"{where} is from {who!r:.40}; known names: {', '.join((*ROLES, *CALLS))}")
        messages.append(make_message(role, said, rest, where))
    return messages


def _add_calls(messages: list[Message], said: Any, rest: Message, where: str) -> None:
    calls = parse_json(said, where) if isinstance(said, str) else said
    made = make_message("assistant", None, {**rest, "tool_calls": calls if isinstance(calls, list) else [calls]}, where)
    if "tool_calls" not in made:
        raise RowRefused(f"{where} calls no tool")
    last = messages[-1] if messages else {}
    same_weight = all(last.get(key) == made.get(key) for key in ("weight", "train"))
    if last.get("role") == "assistant" and same_weight:
        last["tool_calls"] = [*last.get("tool_calls", []), *made["tool_calls"]]
    else:
        messages.append(made)
