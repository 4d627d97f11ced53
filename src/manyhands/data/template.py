"""A tokenizer's chat template as a function from messages to text, the same on every day. Knows no spans and no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.config.template_arguments import find_argument_faults
from manyhands.data.messages import Message, RowRefused
from manyhands.data.template_bounds import limit_cpu
from manyhands.errors import UserError

OURS = frozenset({"weight", "train"})  # keys of a message that are ours, and no template's
SHOWN = "\ue000"  # a code point that belongs to no character
DATE_STRING = "%d %b %Y"  # how templates write the day that they take as date_string


def template_arguments_of(config: RunConfig) -> dict[str, Any]:
    """What every ``apply_chat_template`` of a run gets besides the messages: in preparation, samples and generation alike."""
    return complete_arguments(config.data.template_arguments, config.data.date)


def complete_arguments(arguments: Mapping[str, Any], date: str) -> dict[str, Any]:
    """``arguments`` and today's date, which is ``date`` (year-month-day), by both ways in which templates ask for it.

    A template calls ``strftime_now(format)``, for which transformers would take the clock, or names ``date_string``.
    Raises UserError for reserved names and for a date that is none.
    """
    faults = list(find_argument_faults(arguments, date))
    if faults:
        raise UserError("the arguments of the chat template cannot be used", where="data.template_arguments, data.date", details=faults)
    today = datetime.fromisoformat(date)
    return {"date_string": today.strftime(DATE_STRING), **arguments, "strftime_now": today.strftime}


class ChatTemplate:
    """Renders conversations by ``apply_chat_template`` of ``tokenizer``, with ``arguments`` for the template."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments)

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation: bool = False) -> str:
        """The text; with ``generation`` also what opens the next assistant turn. Raises RowRefused with the template's reason."""
        try:
            taken = self._as_taken(messages)
            with limit_cpu():
                return self._tokenizer.apply_chat_template(
                    taken, tools=tools, tokenize=False, add_generation_prompt=generation, **self._arguments
                )
        except UserError:
            raise
        except Exception as error:  # a template is a program from outside: whatever it raises concerns this row
            raise RowRefused(f"the chat template refuses this conversation: {error}") from error

    def try_render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation: bool = False) -> str | None:
        """The same; None where there are no messages or the template refuses them."""
        try:
            return self.render(messages, tools, generation=generation) if messages else None
        except RowRefused:
            return None

    def render_many(self, conversations: Sequence[Sequence[Message]]) -> list[str | RowRefused]:
        """The texts of conversations without tools, in one call; one after the other only if one of them is refused."""
        try:
            taken = [self._as_taken(messages) for messages in conversations]
            with limit_cpu(len(taken)):
                return self._tokenizer.apply_chat_template(taken, tokenize=False, **self._arguments)
        except UserError:
            raise
        except Exception:  # one of them: which, and why, is told below
            return [self._render_or_refuse(messages) for messages in conversations]

    def _render_or_refuse(self, messages: Sequence[Message]) -> str | RowRefused:
        try:
            return self.render(messages)
        except RowRefused as refused:
            return refused

    def prepare(self, message: Message) -> Message:
        """What the template gets to see of a message: nothing of ours, and arguments of tool calls in the form it takes."""
        if "tool_calls" not in message and not OURS & message.keys():
            return message
        seen = {key: value for key, value in message.items() if key not in OURS}
        if seen.get("tool_calls") and self.takes_text_arguments:
            seen["tool_calls"] = [_write_arguments(call) for call in seen["tool_calls"]]
        return seen

    def _as_taken(self, messages: Sequence[Message]) -> list[Message]:
        return in_parts(messages) if self.takes_parts else list(messages)

    @cached_property
    def takes_parts(self) -> bool:
        """``takes_parts`` of this template."""
        return takes_parts(self._tokenizer, self._arguments)

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the arguments of a tool call must be JSON text, as in DeepSeek's templates; the others take objects."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "a", "arguments": {"b": "c"}}}
        asked: Message = {"role": "user", "content": "a"}
        return (
            self.try_render([asked, {"role": "assistant", "content": None, "tool_calls": [call]}]) is None
            and self.try_render([asked, {"role": "assistant", "content": None, "tool_calls": [_write_arguments(call)]}]) is not None
        )


def takes_parts(tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a content must be a list of parts: templates of models of images and text may show nothing of one that is a text."""
    messages: list[Message] = [{"role": role, "content": SHOWN} for role in ("user", "assistant")]

    def shows(messages: list[Message]) -> bool:
        try:
            return SHOWN in tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception:  # whatever a template raises: it takes no such messages
            return False

    return not shows(messages) and shows(in_parts(messages))


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose texts are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _write_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
