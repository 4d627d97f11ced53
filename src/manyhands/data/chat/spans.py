"""Where in a rendered conversation each assistant turn lies: spans of characters, found by rendering, never by
searching text.

A turn begins where the generation prompt ends, or where the turn first differs from it, and ends with its end-of-turn
marker, which may be several tokens; thinking and tool calls lie inside, white space behind the marker does not. Three
ways, the first that applies:

- *shape*: conversations of the same roles are rendered alike. One with a private character for each content is located
  once; a row that differs from it in nothing but the contents has its turns in the same places.
- *prefix*: the turns before an assistant turn (with the generation prompt), and those up to and with it, rendered
  alone, are nested prefixes of the whole; the turn lies between them.
- *slot*: where a template renders a turn otherwise once more turns follow, the whole is rendered with a private
  character in place of the turn's content, or of the name of its first tool call; the message before it gets a second
  one. What stands between the two, against the generation prompt, tells where the turn begins; what stands behind the
  slot, against the same turn as the last one, tells where it ends. An answer without content has no slot: its neighbors
  are replaced.

Knows no tokens: only the spelling of the tokenizer's added ones, which is what markers are made of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from manyhands.core.errors import UserError
from manyhands.data.chat.template import ChatTemplate
from manyhands.data.chat.turn_ends import PRIVATE_USE, PROMPT, Markers, TurnEnds, measure_common
from manyhands.data.read.messages import THINKING, Message, RowRefused, check_shown, fill, visible

MAX_SHAPES = 512

Span = tuple[int, int]  # characters [start, end)


@dataclass(frozen=True)
class TurnShape:
    """A conversation without its contents: ``literals[0] slot literals[1] slot ... literals[-1]``.

    ``slots``: whose content stands in each slot, as an index of a message. ``borders``: for each span its two ends,
    each as (position where every slot is one character long, number of slots before it).
    """

    literals: tuple[str, ...]
    slots: tuple[int, ...]
    borders: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def place(self, contents: Sequence[str], text: str) -> tuple[Span, ...] | None:
        """The spans if ``text`` is the shape's literals around the contents (as they are or stripped), else None."""
        if not text.startswith(self.literals[0]):
            return None
        position, grown = len(self.literals[0]), []
        for index, literal in zip(self.slots, self.literals[1:], strict=True):
            content = contents[index]
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
        return tuple((start + shifts[before], end + shifts[upto]) for (start, before), (end, upto) in self.borders)


def make_shape(text: str, slots: Sequence[str], spans: Sequence[Span]) -> TurnShape:
    """The shape of a text whose messages are single characters of ``slots`` each, and of its turns."""
    places = sorted((text.index(slot), index) for index, slot in enumerate(slots))
    positions = [position for position, _ in places]
    edges = [-1, *positions, len(text)]
    literals = tuple(text[left + 1 : right] for left, right in pairwise(edges))
    borders = tuple(
        ((start, bisect_left(positions, start)), (end, bisect_left(positions, end))) for start, end in spans
    )
    return TurnShape(literals, tuple(index for _, index in places), borders)


@dataclass(frozen=True)
class RenderedText:
    messages: Sequence[Message]
    tools: list[Any] | None
    text: str


class SpanFinder:
    """Finds assistant turns in texts of one template. ``added_tokens``, ``eos``: the spelling of the tokenizer's added
    tokens and of its end-of-text token."""

    def __init__(self, template: ChatTemplate, added_tokens: Sequence[str], eos: str | None = None) -> None:
        self._template, self._eos = template, eos
        self._markers = Markers(added_tokens)
        self._ends = TurnEnds(template, self._markers, eos)
        self._ends_of_calls: set[str] = set()
        self._shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], TurnShape | None] = {}

    def with_template(self, template: ChatTemplate) -> SpanFinder:
        """The same tokens, another template."""
        return SpanFinder(template, self._markers.added, self._eos)

    def find(
        self, messages: Sequence[Message], tools: list[Any] | None, text: str, turns: Sequence[int]
    ) -> tuple[Span, ...]:
        """The spans of the messages ``turns`` (ascending) in ``text``, what the template made of the conversation.

        Raises RowRefused where one cannot be found, UserError where the template ends no assistant turn.
        """
        if not tools and all(len(message) == 2 and isinstance(message.get("content"), str) for message in messages):
            shape = self._shape_of(tuple(message["role"] for message in messages), tuple(turns))
            spans = None if shape is None else shape.place([message["content"] for message in messages], text)
            if spans is not None:
                return spans
        return self._find_each(RenderedText(messages, tools, text), turns)

    def notes(self) -> list[str]:
        """What a user should know about how the template ends turns, once rows were found."""
        ending = self._ends.known
        if ending is None:
            return []
        marker, notes = ending.marker.strip(), []
        if not ending.marker and not ending.inner:
            notes.append(
                "the chat template writes no end-of-turn token: a turn's end is the first token of the next one, "
                f"so the last turn of a sample does not teach the model to stop{self._advise_argument()}"
            )
        elif not ending.marker:
            notes.append(
                f"the chat template ends a turn with {ending.inner.strip()}, but not the last one of a sample, "
                f"which does not teach the model to stop{self._advise_argument()}"
            )
        elif not ending.inner:
            notes.append(
                "the chat template ends only the last turn of a sample: the others do not teach the model to stop"
            )
        elif self._eos is not None and self._eos in ending.trailer and self._eos not in ending.marker:
            notes.append(
                f"turns end with {marker}, by which generation must stop; {self._eos} at a sample's end is not trained"
            )
        notes += [
            f"turns that call tools end with {token}, by which generation must stop, too"
            for token in sorted(self._ends_of_calls)
        ]
        return notes

    def _advise_argument(self) -> str:
        """Which argument makes the template end the last turn, if one does."""
        for name in self._template.find_arguments():
            finder = SpanFinder(self._template.replace(name, True), self._markers.added)
            try:
                if finder._ends.find().marker:
                    return f"; data.chat_template_kwargs: {{{name}: true}} makes it end that, too"
            except (RowRefused, UserError):
                continue
        return ""

    def _find_each(self, rendered: RenderedText, turns: Sequence[int]) -> tuple[Span, ...]:
        for turn in turns:
            check_shown(rendered.messages[turn], turn, rendered.text)
        spans = [self._find_span(rendered, turn) for turn in turns]
        for number, turn in enumerate(turns):
            if number and turns[number - 1] == turn - 1:  # the generation prompt may have nothing behind another answer
                start, end = spans[number]
                spans[number] = (min(end, max(start, spans[number - 1][1])), end)
        for (start, end), turn in zip(spans, turns, strict=True):
            if rendered.messages[turn].get("tool_calls"):
                check_shown(rendered.messages[turn], turn, rendered.text[start:end])
                self._note_end_of_calls(rendered.text[start:end])
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise RowRefused(
                    "the spans of two assistant turns overlap: the chat template cannot be masked for this row"
                )
        return tuple(spans)

    def _note_end_of_calls(self, part: str) -> None:
        """Remembers by which token a turn with tool calls ends, where that is another than an answer's."""
        marker, tokens = self._ends.find().marker.strip(), [found.group() for found in self._markers.find_all(part)]
        if marker and tokens and not part.endswith(marker):
            self._ends_of_calls.add(tokens[-1])

    def _shape_of(self, roles: tuple[str, ...], turns: tuple[int, ...]) -> TurnShape | None:
        key = (roles, turns)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._make_shape(roles, turns)
        return self._shapes[key]

    def _make_shape(self, roles: tuple[str, ...], turns: tuple[int, ...]) -> TurnShape | None:
        if len(roles) > len(PRIVATE_USE) // 2:
            return None
        slots = [chr(PRIVATE_USE[index]) for index in range(len(roles))]
        messages = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        text = self._template.try_render(messages)
        if text is None or any(text.count(slot) != 1 for slot in slots):
            return None
        try:
            spans = self._find_each(RenderedText(messages, None, text), turns)
        except RowRefused:
            return None
        return make_shape(text, slots, spans)

    def _find_span(self, rendered: RenderedText, turn: int) -> Span:
        messages, tools, text = rendered.messages, rendered.tools, rendered.text
        before = self._template.try_render(messages[:turn], tools, generation=True)
        start = len(before) if before is not None and text.startswith(before) else None
        if start is not None:
            through = text if turn == len(messages) - 1 else self._template.try_render(messages[: turn + 1], tools)
            if through is not None and len(through) >= start and text.startswith(through):
                end = self._find_end_of(through)
                if end is not None and end >= start and visible(messages[turn]) in text[start:end]:
                    return start, end + self._ends.measure_next_header(rendered.messages, turn, text[end:])
        if not messages[turn].get("content") and not messages[turn].get("tool_calls"):
            span = self._find_span_by_neighbors(rendered, turn)
            if span is None:
                raise RowRefused(
                    f"message {turn + 1} is empty, and the chat template does not close it: give it a text, or "
                    f"leave it out"
                )
            return span
        try:
            return self._find_span_by_slot(rendered, turn, start)
        except RowRefused:
            span = self._find_span_by_neighbors(rendered, turn) if messages[turn].get("tool_calls") else None
            if span is None:
                raise
            return span

    def _find_end_of(self, through: str) -> int | None:
        """Where the last turn of a text ends: before the trailer, behind a marker."""
        ending = self._ends.find()
        end = len(through.removesuffix(ending.trailer)) if ending.trailer else len(through)
        if ending.trailer and end == len(through):
            return None
        closes = through.endswith(ending.marker, 0, end)
        return end if closes or len(self._markers.cut_behind_last(through[:end])) == end else None

    def _find_span_by_slot(self, rendered: RenderedText, turn: int, start: int | None) -> Span:
        message, text = rendered.messages[turn], rendered.text
        private = _choose_private(text)
        filled, head, tail = self._fill_slot(rendered, turn, private)
        if not text.endswith(tail) or len(tail) > len(text):
            raise RowRefused(
                f"the chat template renders what follows message {turn + 1} by its content: it cannot be masked"
            )
        behind = len(text) - len(tail)
        common = measure_common(head, text[:behind])
        if start is None:
            start = self._find_start(rendered, turn, filled, private, head, text[:behind])
        if start is None or start > behind:
            if filled["content"] != private:
                raise RowRefused(
                    f"the tool call of message {turn + 1} cannot be told from what stands before it: it cannot "
                    f"be masked"
                )
            # Without the prompt's end: a blank in front belongs to the answer's first token (`` Hello``).
            start = len(text[:common].rstrip(" "))
        if not text[start:behind].strip() and visible(message) and not message.get("tool_calls"):
            raise RowRefused(f"the chat template shows nothing of message {turn + 1}: it cannot be masked")
        end = behind + self._measure_closing(rendered, turn, filled, private, tail)
        if message.get("tool_calls") and self._holds_next(rendered, turn, private, end):
            raise RowRefused(
                f"the chat template writes the result of a tool before the text of message {turn + 1}, which calls it: "
                "leave out the text beside the call"
            )
        return start, end

    def _holds_next(self, rendered: RenderedText, turn: int, private: str, end: int) -> bool:
        """Whether the content of the message behind a turn stands before ``end``."""
        messages = list(rendered.messages)
        if turn + 1 == len(messages):
            return False
        messages[turn + 1] = {**messages[turn + 1], "content": private}
        return 0 <= (self._template.try_render(messages, rendered.tools) or "").find(private) < end

    def _fill_slot(self, rendered: RenderedText, turn: int, private: str) -> tuple[Message, str, str]:
        """(the turn with its content or its first call's name replaced, the text before, and after the replacement)."""
        times, refusal = 0, None
        for filled in fill(rendered.messages[turn], private):
            try:
                text = self._template.render(
                    [*rendered.messages[:turn], filled, *rendered.messages[turn + 1 :]], rendered.tools
                )
            except RowRefused as refused:
                refusal = refused
                continue
            times = text.count(private)
            if times == 1 or (times > 1 and filled.get("tool_calls") and filled.get("content") != private):
                head, _, tail = text.partition(private)  # a result may repeat the name of its call
                return filled, head, tail
            if times > 1:
                break
        if refusal is not None and not times:
            raise refusal
        raise RowRefused(
            f"the chat template shows the content of message {turn + 1} {times} times: it cannot be masked"
        )

    def _find_start(
        self, rendered: RenderedText, turn: int, filled: Message, private: str, head: str, shown: str
    ) -> int | None:
        """Where the turn begins in ``shown``, the text up to its end: where that first differs from the generation
        prompt.
        ``head``: the text up to the slot. None where that is not to be seen."""
        messages, tools, common = rendered.messages, rendered.tools, measure_common(head, shown)
        for gap, supplied in self._find_gaps(rendered, turn, [filled, *messages[turn + 1 :]], private):
            begin = len(head) - len(gap)
            if head.endswith(gap) and begin <= common:
                return begin + self._measure_supplied(shown[begin:], supplied, common - begin)
        opening = self._template.try_render([PROMPT], tools, generation=True) or ""
        for following in ([], [PROMPT]):
            alone = (self._template.try_render([PROMPT, filled, *following], tools) or "").partition(private)[0]
            own = alone[self._measure_supplied(alone, opening, len(alone)) :]
            if self._plain_header and head.endswith(self._plain_header + own):
                return min(len(head) - len(own), common)  # the turn itself may think where the filled one does not
        return None

    def _find_gaps(
        self, rendered: RenderedText, turn: int, rest: Sequence[Message], private: str
    ) -> Iterator[tuple[str, str]]:
        """(text between the previous message and ``private`` or the end, the generation prompt's text there)."""
        messages, mark = rendered.messages, chr(ord(private) + 1)
        for marked in fill(messages[turn - 1], mark) if turn else ():
            asked = self._template.try_render([*messages[: turn - 1], marked], rendered.tools, generation=True) or ""
            shown = self._template.try_render([*messages[: turn - 1], marked, *rest], rendered.tools) or ""
            shown = shown.partition(private)[0]
            if mark in asked and mark in shown:
                yield shown.rpartition(mark)[2], asked.rpartition(mark)[2]

    def _measure_supplied(self, shown: str, supplied: str, limit: int) -> int:
        """How much of ``shown`` the generation prompt supplies; a header that it lacks there counts too."""
        start = self._markers.measure_supplied(shown, supplied)
        header = self._plain_header
        repeated = shown.rfind(header, start, limit) if header else -1
        return start if repeated < 0 else repeated + len(header)

    @cached_property
    def _plain_header(self) -> str:
        """What the generation prompt supplies before a plain answer, without what closes the question."""
        private, mark = chr(PRIVATE_USE[0]), chr(PRIVATE_USE[1])
        asked: Message = {"role": "user", "content": mark}
        supplied = (self._template.try_render([asked], generation=True) or "").rpartition(mark)[2]
        shown = self._template.try_render([asked, {"role": "assistant", "content": private}]) or ""
        shown = shown.partition(private)[0].rpartition(mark)[2]
        header = shown[: self._markers.measure_supplied(shown, supplied)]
        tokens = list(self._markers.find_all(header))
        if not tokens:  # a question may be closed otherwise once an answer follows
            same = measure_common(shown[::-1], supplied[::-1])
            header = shown[len(shown) - same :]
            return header[next((found.start() for found in self._markers.find_all(header)), same) :]
        return header[tokens[0].end() :].lstrip() if len(tokens) > 1 else header[tokens[0].start() :]

    def _measure_closing(self, rendered: RenderedText, turn: int, filled: Message, private: str, tail: str) -> int:
        """How many characters of ``tail``, the text behind the slot, belong to the turn."""
        ending, is_last = self._ends.find(), turn + 1 == len(rendered.messages)
        other = [*rendered.messages[:turn], filled, *([PROMPT] if is_last else [])]
        behind = (self._template.try_render(other, rendered.tools) or "").partition(private)[2]
        closing = self._ends.cut_closing(tail, behind, is_last)
        marker = ending.marker if is_last else ending.inner
        if not marker and filled.get("content") != private:  # the slot is a call's name: the rest of the calls follows
            closing = tail[: measure_common(tail, behind)].removesuffix(ending.trailer)
        if not closing and marker:
            closing = tail[: self._markers.measure_first(tail) or (len(marker) if tail.startswith(marker) else 0)]
        if not closing and marker:
            raise RowRefused(f"no end-of-turn marker follows message {turn + 1}: the model would not learn to stop")
        return len(closing) + self._ends.measure_next_header(rendered.messages, turn, tail[len(closing) :])

    def _find_span_by_neighbors(self, rendered: RenderedText, turn: int) -> Span | None:
        """The span of a turn between the message before it and the one that follows, the turn itself as it is."""
        messages, text, private = rendered.messages, rendered.text, _choose_private(rendered.text)
        ending, is_last = self._ends.find(), turn + 1 == len(messages)
        follows = [] if is_last else [next(fill(messages[turn + 1], private)), *messages[turn + 2 :]]
        shown = self._template.try_render([*messages[: turn + 1], *follows], rendered.tools) or ""
        head = text if is_last else shown.partition(private)[0]
        if not text.startswith(head):
            return None
        marker = (ending.marker if is_last else ending.inner).strip()
        # a last turn alone may show its thinking
        plain = {key: value for key, value in messages[turn].items() if key not in THINKING}
        for gap, supplied in self._find_gaps(rendered, turn, [messages[turn], *follows], private):
            begin = len(head) - len(gap)
            if not head.endswith(gap):
                continue
            start = self._markers.measure_supplied(gap, supplied)
            own, closing = gap[start:], ""
            if messages[turn].get("tool_calls") or messages[turn].get("content"):
                hidden = [{**plain, "content": ""}] if visible(messages[turn]) not in text else []
                other_end = [PROMPT] if is_last else []  # a question behind the last turn, nothing behind others
                for alone in (messages[turn], plain, *hidden):
                    for other, _ in self._find_gaps(rendered, turn, [alone, *other_end], private):
                        rest = other[self._markers.measure_supplied(other, supplied) :]
                        closing = closing or self._ends.cut_closing(own, rest, is_last)
            if not closing and marker in own:
                speaks = visible(messages[turn]) or messages[turn].get("tool_calls")
                closing = own[: own.rindex(marker) if speaks else own.index(marker)] + marker
            if (closing or not marker) and (visible(messages[turn]) in closing or visible(messages[turn]) not in text):
                end = begin + start + len(closing)
                return begin + start, end + self._ends.measure_next_header(rendered.messages, turn, text[end:])
        return None


def _choose_private(text: str) -> str:
    """A private character that neither itself nor with the one behind it occurs in the text."""
    for code in PRIVATE_USE[:-1]:
        if chr(code) not in text and chr(code + 1) not in text:
            return chr(code)
    raise RowRefused("the row holds every private-use character: it cannot be masked")
