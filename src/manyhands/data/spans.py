"""Where in a rendered conversation each assistant turn lies: spans of characters, found by rendering, never by searching text.

A turn begins where the generation prompt ends and ends with its end-of-turn marker; thinking and tool calls lie inside,
white space behind the marker does not. Three ways, the first that applies:

- *shape*: conversations of the same roles are rendered alike. One with a private character for each content is located
  once; a row that differs from it in nothing but the contents has its turns in the same places.
- *prefix*: the turns before an assistant turn (with the generation prompt), and those up to and with it, rendered alone,
  are nested prefixes of the whole; the turn lies between them.
- *slot*: where a template renders a turn otherwise once more turns follow, the whole is rendered with a private character
  in place of the turn's content, or of the name of its first tool call. What stands before and after it bounds the turn,
  and the turn rendered alone tells how much of that is the turn's own.

Knows no tokens: only the spelling of the tokenizer's added ones, which is what markers are made of.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from manyhands.data.messages import THINKING, Message, RowRefused
from manyhands.data.template import ChatTemplate
from manyhands.errors import UserError

Span = tuple[int, int]  # characters [start, end)
PRIVATE_USE = range(0xE000, 0xF8FF)  # code points that belong to no character
MAX_SHAPES = 512
PROMPT: Message = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class Shape:
    """A conversation without its contents: ``literals[0] slot literals[1] slot ... literals[-1]``.

    ``slots``: whose content stands in each slot, as an index of a message. ``borders``: for each span its two ends, each
    as (position where every slot is one character long, number of slots before it).
    """

    literals: tuple[str, ...]
    slots: tuple[int, ...]
    borders: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True)
class Whole:
    """A conversation and its text."""

    messages: Sequence[Message]
    tools: list[Any] | None
    text: str


@dataclass(frozen=True)
class Ending:
    """What a template writes after an assistant's words: ``marker``, then ``trailer`` where the conversation ends with it.

    An empty marker: only the header of the next turn tells that a turn is over, as in GLM's templates.
    """

    marker: str
    trailer: str


class SpanFinder:
    """Finds assistant turns in texts of one template. ``added_tokens``: the spelling of the tokenizer's added tokens."""

    def __init__(self, template: ChatTemplate, added_tokens: Sequence[str]) -> None:
        self._template = template
        self._leading_token = compile_any(added_tokens, before=r"\s*")
        self._token = compile_any(added_tokens)
        self._ending: Ending | None = None
        self._shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], Shape | None] = {}

    def find(self, messages: Sequence[Message], tools: list[Any] | None, text: str, turns: Sequence[int]) -> tuple[Span, ...]:
        """The spans of the messages ``turns`` (ascending) in ``text``, what the template made of the conversation.

        Raises RowRefused where one cannot be found, UserError where the template ends no assistant turn.
        """
        if not tools and all(len(message) == 2 and isinstance(message.get("content"), str) for message in messages):
            shape = self._shape_of(tuple(message["role"] for message in messages), tuple(turns))
            spans = None if shape is None else _place(shape, messages, text)
            if spans is not None:
                return spans
        return self._find_each(Whole(messages, tools, text), turns)

    @property
    def ends_turns(self) -> bool:
        """False where a template writes no marker after an assistant turn, so that a last turn does not teach to stop."""
        return self._ending is None or bool(self._ending.marker)

    def _find_each(self, whole: Whole, turns: Sequence[int]) -> tuple[Span, ...]:
        spans = tuple(self._find_span(whole, turn) for turn in turns)
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise RowRefused("the spans of two assistant turns overlap: the chat template cannot be masked for this row")
        return spans

    def _shape_of(self, roles: tuple[str, ...], turns: tuple[int, ...]) -> Shape | None:
        key = (roles, turns)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._make_shape(roles, turns)
        return self._shapes[key]

    def _make_shape(self, roles: tuple[str, ...], turns: tuple[int, ...]) -> Shape | None:
        if len(roles) > len(PRIVATE_USE) // 2:
            return None
        slots = [chr(PRIVATE_USE[index]) for index in range(len(roles))]
        messages = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        text = self._template.try_render(messages)
        if text is None or any(text.count(slot) != 1 for slot in slots):
            return None
        try:
            spans = self._find_each(Whole(messages, None, text), turns)
        except RowRefused:
            return None
        places = sorted((text.index(slot), index) for index, slot in enumerate(slots))
        positions = [position for position, _ in places]
        edges = [-1, *positions, len(text)]
        literals = tuple(text[left + 1 : right] for left, right in pairwise(edges))
        borders = tuple(((start, bisect_left(positions, start)), (end, bisect_left(positions, end))) for start, end in spans)
        return Shape(literals, tuple(index for _, index in places), borders)

    def _find_span(self, whole: Whole, turn: int) -> Span:
        messages, tools, text = whole.messages, whole.tools, whole.text
        before = self._template.try_render(messages[:turn], tools, generation=True)
        start = len(before) if before is not None and text.startswith(before) else None
        if start is not None:
            through = text if turn == len(messages) - 1 else self._template.try_render(messages[: turn + 1], tools)
            if through is not None and len(through) >= start and text.startswith(through):
                end = self._find_end_of(through)
                if end is not None and end >= start and _shows(messages[turn], text[start:end]):
                    return start, end + self._measure_next_header(whole, turn, text[end:])
        return self._find_span_by_slot(whole, turn, before)

    def _find_end_of(self, through: str) -> int | None:
        """Where the last turn of a text ends: before the trailer, behind a marker."""
        ending = self._find_ending()
        end = len(through.removesuffix(ending.trailer)) if ending.trailer else len(through)
        if ending.trailer and end == len(through):
            return None
        return end if through.endswith(ending.marker, 0, end) or self._ends_with_token(through[:end]) else None

    def _find_span_by_slot(self, whole: Whole, turn: int, before: str | None) -> Span:
        message, text = whole.messages[turn], whole.text
        private = _choose_private(text)
        filled, head, tail = self._fill_slot(whole, turn, private)
        if not text.endswith(tail) or len(tail) > len(text):
            raise RowRefused(f"the chat template renders what follows message {turn + 1} by its content: it cannot be masked")
        behind = len(text) - len(tail)
        common = _measure_common(head, text[:behind])
        start = self._find_start(whole, filled, private, head, before)
        if start is None or not start <= common:
            if filled["content"] != private:
                raise RowRefused(f"the tool call of message {turn + 1} cannot be told from what stands before it: it cannot be masked")
            # Without the prompt's end: a blank in front belongs to the answer's first token (`` Hello``).
            start = len(text[:common].rstrip(" "))
        if not text[start:behind].strip() and _visible(message) and not message.get("tool_calls"):
            raise RowRefused(f"the chat template shows nothing of message {turn + 1}: it cannot be masked")
        return start, behind + self._measure_tail(whole, turn, filled, private, tail)

    def _fill_slot(self, whole: Whole, turn: int, private: str) -> tuple[Message, str, str]:
        """(the turn with its content or its first call's name replaced, the text before, and after the replacement)."""
        times, refusal = 0, None
        for filled in _fillings(whole.messages[turn], private):
            try:
                text = self._template.render([*whole.messages[:turn], filled, *whole.messages[turn + 1 :]], whole.tools)
            except RowRefused as refused:
                refusal = refused
                continue
            times = text.count(private)
            if times == 1:
                head, _, tail = text.partition(private)
                return filled, head, tail
            if times > 1:
                break
        if refusal is not None and not times:
            raise refusal
        raise RowRefused(f"the chat template shows the content of message {turn + 1} {times} times: it cannot be masked")

    def _find_start(self, whole: Whole, filled: Message, private: str, head: str, before: str | None) -> int | None:
        """Where the turn begins in ``head``: behind the header of an assistant turn and before what the turn itself writes."""
        if before is not None and head.startswith(before):
            return len(before)
        opening = self._template.try_render([PROMPT], whole.tools, generation=True)
        for header, own in self._find_openings(whole.tools, filled, private, before or opening or "", opening or ""):
            if header and head.endswith(header + own):
                return len(head) - len(own)
        return None

    def _find_openings(
        self, tools: list[Any] | None, filled: Message, private: str, prompt: str, opening: str
    ) -> Iterator[tuple[str, str]]:
        """(header, what the turn writes before its slot), as a turn shows them that is alone, as the last one or before another."""
        header = self._find_header(prompt)
        for following in ([], [PROMPT]):
            alone = self._template.try_render([PROMPT, filled, *following], tools)
            if alone is None or alone.count(private) != 1:
                continue
            shown = alone[: alone.index(private)]
            if opening and shown.startswith(opening):
                yield header, shown[len(opening) :]
            elif filled.get("tool_calls"):  # the generation prompt opens something else: a plain answer shows the header
                answer = self._template.try_render([PROMPT, {"role": "assistant", "content": private}, *following], tools) or ""
                common = _measure_common(answer.partition(private)[0], shown)
                yield self._find_header(shown[:common]), shown[common:]
        if filled["content"] == private:
            yield header, ""

    def _find_header(self, text: str) -> str:
        """The end of a text from its last added token on; "" without one."""
        tokens = list(self._token.finditer(text)) if self._token is not None else []
        return text[tokens[-1].start() :] if tokens else ""

    def _measure_tail(self, whole: Whole, turn: int, filled: Message, private: str, tail: str) -> int:
        """How many characters of ``tail``, the text behind the slot, belong to the turn."""
        ending, length = self._find_ending(), 0
        if filled.get("tool_calls"):
            alone = self._template.try_render([PROMPT, filled], whole.tools) or ""
            own = alone.partition(private)[2].removesuffix(ending.trailer)
            if not own or not tail.startswith(own) or (ending.marker and not self._ends_with_token(own)):
                raise RowRefused(f"the end of the tool calls of message {turn + 1} is not to be seen: it cannot be masked")
            length = len(own)
        elif ending.marker and tail.startswith(ending.marker):
            length = len(ending.marker)
        elif ending.marker:
            length = self._measure_token(tail)
            if not length:
                raise RowRefused(f"no end-of-turn marker follows message {turn + 1}: the model would not learn to stop")
        return length + self._measure_next_header(whole, turn, tail[length:])

    def _measure_next_header(self, whole: Whole, turn: int, rest: str) -> int:
        """Length of the next turn's first token, where that alone ends a turn: the model stops by writing it."""
        if self._find_ending().marker or turn + 1 == len(whole.messages) or whole.messages[turn + 1]["role"] == "assistant":
            return 0
        return self._measure_token(rest)

    def _find_ending(self) -> Ending:
        if self._ending is None:
            private = chr(PRIVATE_USE[0])
            answer = {"role": "assistant", "content": private}
            _, shown, suffix = self._template.render([PROMPT, answer]).rpartition(private)
            if not shown:
                raise RowRefused("the chat template does not show an assistant's content: it cannot be masked")
            marker = suffix[: self._measure_token(suffix)]
            if not marker and not suffix.strip():
                followed = self._template.try_render([PROMPT, answer, PROMPT]) or ""
                if not self._measure_token(followed.rpartition(private)[2]):
                    marker = suffix
                    if not marker:
                        raise _no_ending()
            self._ending = Ending(marker or suffix, suffix[len(marker) :] if marker else "")
        return self._ending

    def _measure_token(self, text: str) -> int:
        """Length of the first added token of a text with the white space before it; 0 where something else comes first."""
        found = self._leading_token.match(text) if self._leading_token is not None else None
        return found.end() if found is not None else 0

    def _ends_with_token(self, text: str) -> bool:
        found = list(self._token.finditer(text)) if self._token is not None else []
        return bool(found) and found[-1].end() == len(text)


def compile_any(words: Sequence[str], before: str = "") -> re.Pattern[str] | None:
    """A pattern of any of the words, the longest that fits; None without words."""
    longest_first = sorted({word for word in words if word.strip()}, key=lambda word: (-len(word), word))
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _place(shape: Shape, messages: Sequence[Message], text: str) -> tuple[Span, ...] | None:
    """The spans in ``text`` if it is the shape's literals around the contents, as they are or stripped; else None."""
    if not text.startswith(shape.literals[0]):
        return None
    position, grown = len(shape.literals[0]), []
    for index, literal in zip(shape.slots, shape.literals[1:], strict=True):
        content = messages[index]["content"]
        for shown in (content, content.strip()):
            end = position + len(shown)
            if text.startswith(shown, position) and text.startswith(literal, end):
                break
        else:
            return None
        grown.append(len(shown) - 1)
        position = end + len(literal)
    if position != len(text):
        return None
    shifts = [0, *accumulate(grown)]
    return tuple((start + shifts[before], end + shifts[upto]) for (start, before), (end, upto) in shape.borders)


def _fillings(message: Message, private: str) -> Iterator[Message]:
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


def _measure_common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _visible(message: Message) -> str:
    """The content behind the thinking that templates leave out of it."""
    content = message.get("content")
    return content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""


def _shows(message: Message, part: str) -> bool:
    return _visible(message) in part


def _choose_private(text: str) -> str:
    for code in PRIVATE_USE:
        if chr(code) not in text:
            return chr(code)
    raise RowRefused("the row holds every private-use character: it cannot be masked")


def _no_ending() -> UserError:
    return UserError(
        "the chat template writes nothing after an assistant turn",
        why="there is no end-of-turn token to train, so the model would not learn to stop",
        fix="give model.chat_template one that ends assistant turns",
    )
