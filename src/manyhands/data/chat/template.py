"""A tokenizer's chat template as a function from messages to text, the same on every day, and what it may cost. Knows
no spans and no tokens.

A template is a program from outside: a loop, a recursion or a product of strings may never end. Two bounds, both of CPU
time, so that a busy machine refuses nothing that an idle one takes: ``probe_in_subprocess`` renders small conversations
in a forked process with limits of time and memory, before any row; ``limit_cpu`` ends the rendering of a row that takes
too long. What a template does with the content of rows is bounded in time only.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import Any

import psutil

from manyhands.config.checks import check_template_kwargs
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.read.messages import THINKING, Message, RowRefused

RENDER_CPU_S = 10.0  # of one call; a conversation takes a ten-thousandth of it
CPU_S_A_CONVERSATION = 0.05  # more, for calls with many
TRIAL_CPU_S = 20
TRIAL_BYTES = 1 << 30
TRIAL_WALL_S = 600.0  # the process hangs, it does not compute
MAX_CHARACTERS = 10_000_000  # of a trial's conversation of some hundred
TURN = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there"})
TRIALS = (list(TURN), [{"role": "system", "content": "Be brief"}, *TURN], [*TURN, *TURN, TURN[0]], [*TURN] * 8)
TOO_MUCH_MEMORY, TOO_LONG_TEXT = 3, 4


class _TooSlow(BaseException):
    """No ``Exception``: templates' own errors are caught as such, by Jinja too."""


class _Limit:
    """The one limit of this process that is set; signals reach the main thread only."""

    def __init__(self) -> None:
        self.end_s, self.installed, self.active = 0.0, False, False

    def check(self, *_: Any) -> None:
        if not self.active:  # a signal that was under way when the rendering ended
            return
        left_s = self.end_s - time.thread_time()
        if left_s <= 0:
            raise _TooSlow
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s, 0.01))  # the time was other threads'


_limit = _Limit()


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the RowRefused that it raised."""
    try:
        return function(*arguments)
    except RowRefused as refused:
        return refused


@contextmanager
def limit_cpu(num_conversations: int = 1) -> Iterator[None]:
    """Raises UserError once rendering within it takes too long. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _limit.installed:
        signal.signal(signal.SIGVTALRM, _limit.check)
        _limit.installed = True
    seconds = RENDER_CPU_S + CPU_S_A_CONVERSATION * num_conversations
    _limit.end_s = time.thread_time() + seconds
    _limit.active = True
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _TooSlow:
        raise _refusal(f"more than {seconds:.0f} s for {num_conversations} conversation(s)") from None
    finally:
        _limit.active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def probe_in_subprocess(render: Callable[..., str]) -> None:
    """UserError where ``render(messages, add_generation_prompt=...)`` takes too long for small conversations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child uses nothing of theirs
        child = os.fork()
    if child == 0:
        _try_and_exit(render)
    end = time.monotonic() + TRIAL_WALL_S
    pid, status = os.waitpid(child, os.WNOHANG)
    for wait_s in chain((0.001, 0.002, 0.005, 0.01, 0.02), iter(lambda: 0.05, None)):
        if pid or time.monotonic() > end:
            break
        time.sleep(wait_s)
        pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise _refusal(f"no end within {TRIAL_WALL_S:.0f} s")
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        took = {
            TOO_MUCH_MEMORY: f"more than {TRIAL_BYTES >> 30} GiB of memory",
            TOO_LONG_TEXT: f"more than {MAX_CHARACTERS:,} characters",
            -signal.SIGXCPU: f"more than {TRIAL_CPU_S} s",
            -signal.SIGKILL: f"more than {TRIAL_CPU_S} s",
        }.get(code, f"the process that tried it ended with {code}")
        raise _refusal(f"{took} for a conversation of a few words")


def _try_and_exit(render: Callable[..., str]) -> None:
    """In the forked process: never returns."""
    code = 0
    try:
        bytes_now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (bytes_now + TRIAL_BYTES, bytes_now + TRIAL_BYTES))
        for messages in TRIALS:
            for generation in (False, True):
                try:
                    code = (
                        TOO_LONG_TEXT
                        if len(render(messages, add_generation_prompt=generation)) > MAX_CHARACTERS
                        else code
                    )
                except MemoryError:
                    code = TOO_MUCH_MEMORY
                except Exception:  # reported where rows are rendered
                    continue
    finally:
        os._exit(code)


def _refusal(took: str) -> UserError:
    return UserError(
        "the chat template takes too long, or too much memory",
        where="the tokenizer's chat template, or model.chat_template",
        why=f"it took {took}",
        fix="give another template with model.chat_template, by name (chatml, llama3, ...) or as a file",
    )


OURS = frozenset({"weight", "train"})  # keys of a message that are ours, and no template's
GIVEN = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # a statement of transformers'
SHOWN = "\ue000"  # a code point that belongs to no character
CALL_ID = "abcdefghi"  # as long as some templates demand
DATE_STRING = "%d %b %Y"  # how templates write the day that they take as date_string


def chat_template_kwargs_of(config: RunConfig) -> dict[str, Any]:
    """What each ``apply_chat_template`` of a run gets besides messages: preparation, samples and generation."""
    return complete_arguments(config.data.chat_template_kwargs, config.data.date)


def complete_arguments(arguments: Mapping[str, Any], date: str) -> dict[str, Any]:
    """``arguments`` and today's date, which is ``date`` (year-month-day), by both ways in which templates ask for it.

    A template calls ``strftime_now(format)``, for which transformers would take the clock, or names ``date_string``.
    Raises UserError for reserved names and for a date that is none.
    """
    faults = list(check_template_kwargs(arguments, date))
    if faults:
        raise UserError(
            "the arguments of the chat template cannot be used",
            where="data.chat_template_kwargs, data.date",
            details=faults,
        )
    today = datetime.fromisoformat(date)
    return {"date_string": today.strftime(DATE_STRING), **arguments, "strftime_now": today.strftime}


@dataclass(frozen=True)
class CallForm:
    """How a template shows tool calls: with arguments as JSON text or objects, and with which contents where there is
    no text beside them; none where it does not show them."""

    text_arguments: bool
    empty_contents: tuple[str | None, ...]


class ChatTemplate:
    """Renders conversations by ``apply_chat_template`` of ``tokenizer``, with ``arguments`` for the template."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        self._left_out: dict[str, bool] = {}

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation: bool = False) -> str:
        """The text, with ``generation`` the next turn's opening too. RowRefused gives the template's reason."""
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

    def try_render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation: bool = False
    ) -> str | None:
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
            return [attempt(self.render, messages) for messages in conversations]

    def prepare(self, message: Message) -> Message:
        """What the template sees of a message: no keys of ours, and tool calls in the form that it shows."""
        thinks = message["role"] == "assistant" and len(message) > 2 and any(map(message.get, THINKING))
        if "tool_calls" not in message and not OURS & message.keys() and not thinks:
            return message
        seen = {key: value for key, value in message.items() if key not in OURS}
        given = [key for key in THINKING if seen.get(key)]
        if len(given) == 1 and self._thinking_keys and given[0] not in self._thinking_keys:
            seen[self._thinking_keys[0]] = seen.pop(given[0])
        if seen.get("tool_calls"):
            form = self._form_of_calls
            if form.text_arguments:
                seen["tool_calls"] = [_write_arguments(call) for call in seen["tool_calls"]]
            if form.empty_contents and not seen.get("content") and seen.get("content") not in form.empty_contents:
                seen["content"] = form.empty_contents[0]
        return seen

    def replace(self, name: str, value: Any) -> ChatTemplate:
        """The same with one argument set."""
        return ChatTemplate(self._tokenizer, {**self._arguments, name: value})

    def find_arguments(self) -> list[str]:
        """Variables that the template reads and neither sets nor always gets; [] where its text cannot be read."""
        return sorted(self._variables - GIVEN - self._arguments.keys())

    def find_unread(self, names: Iterable[str]) -> list[str]:
        """Those of the names that the template does not read as variables; [] where its text cannot be read."""
        return [name for name in names if self._variables and name not in self._variables]

    @cached_property
    def _variables(self) -> frozenset[str]:
        from jinja2 import Environment, TemplateError, meta

        text = self._tokenizer.chat_template
        if not isinstance(text, str):
            return frozenset()
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", text))
            return frozenset(meta.find_undeclared_variables(parsed))
        except TemplateError:  # a statement of transformers' own
            return frozenset()

    def _as_taken(self, messages: Sequence[Message]) -> list[Message]:
        return in_parts(messages) if self.takes_parts else list(messages)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether contents must be lists of parts: templates of image-text models may ignore plain text."""
        messages: list[Message] = [{"role": role, "content": SHOWN} for role in ("user", "assistant")]

        def shows(messages: list[Message]) -> bool:
            try:
                return SHOWN in self._tokenizer.apply_chat_template(messages, tokenize=False, **self._arguments)
            except Exception:  # whatever a template raises: it takes no such messages
                return False

        return not shows(messages) and shows(in_parts(messages))

    @cached_property
    def _thinking_keys(self) -> tuple[str, ...]:
        """The keys under which the template shows an answer's thinking."""
        turns: list[Message] = [{"role": "assistant", "content": "a"}, _call_tool("a")]
        return tuple(
            key
            for key in THINKING
            if any(SHOWN in (self.try_render([ASKED, {**turn, key: SHOWN}]) or "") for turn in turns)
        )

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows tool calls at all, in any form."""
        return bool(self._form_of_calls.empty_contents)

    @cached_property
    def _form_of_calls(self) -> CallForm:
        """The form in which tool calls are shown best: with no ``None``, ``null`` or Python dictionary that another
        form has not.

        Arguments are objects for most templates and JSON text for DeepSeek's; without text beside them the content must
        be null for some (DeepSeek's distilled ones show no call else) and "" for others (which write null as ``None``).
        """
        faults = {}
        for text_arguments in (False, True):
            for content in ("", None):
                turn = _call_tool(SHOWN, content)
                if text_arguments:
                    turn["tool_calls"] = list(map(_write_arguments, turn["tool_calls"]))
                # the texts of a question and the call, and with the tool's result behind it; "" for what is refused
                alone, continued = (self.try_render([ASKED, turn, *more]) or "" for more in ([], [_answer_tool("a")]))
                text = alone or continued
                if SHOWN in text:  # a form that is taken only from the last message is worse than others, too
                    faults[text_arguments, content] = sum(map(text.count, ("None", "null", "{'b'"))) + (not continued)
        fewest = min(faults.values(), default=0)
        forms = [form for form, number in faults.items() if number == fewest]
        text_arguments = bool(forms) and all(as_text for as_text, _ in forms)
        return CallForm(text_arguments, tuple(content for as_text, content in forms if as_text == text_arguments))

    def leaves_out(self, role: str) -> bool:
        """Whether the template shows nothing of a message of the role ``system``, ``developer`` or ``tool``."""
        if role not in self._left_out:
            told: Message = {"role": role, "content": SHOWN}
            calling = [ASKED, self.prepare(_call_tool("a")), _answer_tool(SHOWN)]
            behind = calling if role == "tool" else [told, ASKED]
            text = self.try_render(behind)
            self._left_out[role] = text is not None and SHOWN not in text
        return self._left_out[role]


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose texts are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


ASKED: Message = {"role": "user", "content": "a"}


def _call_tool(name: str, content: str | None = "") -> Message:
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {"b": "c"}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _answer_tool(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": CALL_ID}


def _write_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
