"""What of a rendered conversation the model must write itself, told without the code that makes masks.

Every word of a conversation is given a tag of its own that tells who says it (``tag``). In the text of the template the
tags show where each turn lies, and two renderings beside it show its borders: the one that ends in the generation
prompt (what stands in it is supplied, what stands in its place and differs is written by the model) and the one in
which the conversation goes on, or ends, behind the turn (what closes the turn in both is the model's; a token that only
opens the next message is the model's where nothing else tells that the turn is over). Knows templates, no spans and no
tokens' masks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

Message = dict[str, Any]
Render = Callable[..., "str | None"]  # (messages, tools, generation) -> the template's text, None where it refuses

OWN, OTHER, THOUGHT = (
    "Qj",
    "Vx",
    "Zk",
)  # what tags begin with: words of an assistant, of anybody else, an assistant's thinking
TAG = re.compile(f"(?:{OWN}|{OTHER}|{THOUGHT})[a-z]{{3}}")
WORD = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|(?:^|(?<=\n))assistant\b|(\w+)")
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


def tag(messages: Sequence[Message], tools: list[Any] | None) -> tuple[list[Message], list[Any] | None]:
    """The conversation with a tag before each word; markers and blanks stay as they are."""
    numbers = count()

    def mark(text: str, kind: str) -> str:
        def put(found: re.Match[str]) -> str:
            if found.group(1) is None:
                return found.group(0)
            number = next(numbers)
            return kind + "".join(chr(97 + number // 26**place % 26) for place in (2, 1, 0)) + found.group(1)

        return WORD.sub(put, text)

    def mark_content(content: Any, kind: str) -> Any:
        if not isinstance(content, str):
            return content
        thoughts = THINKING.findall(content) if kind == OWN else []
        parts = THINKING.split(content) if kind == OWN else [content]
        marked = [mark(parts[0], kind)]
        for thought, part in zip(thoughts, parts[1:], strict=True):
            marked += [mark(thought, THOUGHT), mark(part, kind)]
        return "".join(marked)

    def mark_call(call: Any) -> Any:
        function = call["function"]
        arguments = {name: mark(value, OWN) for name, value in function["arguments"].items()}
        return {**call, "function": {"name": mark(function["name"], OWN), "arguments": arguments}}

    tagged = []
    for message in messages:
        kind = OWN if message["role"] == "assistant" else OTHER
        new = {**message, "content": mark_content(message["content"], kind)}
        if "reasoning_content" in message:
            new["reasoning_content"] = mark(message["reasoning_content"], THOUGHT)
        if "tool_calls" in message:
            new["tool_calls"] = [mark_call(call) for call in message["tool_calls"]]
        tagged.append(new)
    return tagged, [
        {**tool, "function": {**tool["function"], "name": mark(tool["function"]["name"], OTHER)}}
        for tool in tools or []
    ] or None


def tags_of(value: Any) -> list[str]:
    """The tags in a message, content before calls."""
    return TAG.findall(str(value))


@dataclass(frozen=True)
class Verdict:
    """``spans``: what the model writes, characters of ``text``. ``open``: headers of answers in places where the
    generation prompt has none, of which either may be said. ``hidden``: words of calls, and of answers without, that
    the template does not show. ``unsure``: why the spans cannot be told, if so."""

    text: str
    spans: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]
    hidden: tuple[str, ...]
    unsure: str = ""


def judge(
    messages: Sequence[Message], tools: list[Any] | None, render: Render, added_tokens: Sequence[str], eos: str | None
) -> Verdict | None:
    """The verdict on tagged messages; None where the template refuses them."""
    text = render(messages, tools, False)
    if text is None:
        return None
    hidden = tuple(
        word
        for message in messages
        if message["role"] == "assistant"
        for word in tags_of(message.get("tool_calls") or message["content"])
        if word.startswith(OWN) and word not in text
    )
    try:
        turns = [Turn(messages, tools, render, Tokens(added_tokens), text, turn, eos) for turn in _turns(messages)]
        return Verdict(
            text,
            tuple(turn.span() for turn in turns),
            tuple(part for turn in turns for part in (turn.header(), turn.next_opener())),
            hidden,
        )
    except LookupError as unsure:
        return Verdict(text, (), (), hidden, str(unsure))


def _turns(messages: Sequence[Message]) -> Iterator[int]:
    return (index for index, message in enumerate(messages) if message["role"] == "assistant")


class Tokens:
    """The spelling of added tokens."""

    def __init__(self, added: Sequence[str]) -> None:
        self._any = re.compile(
            "|".join(map(re.escape, sorted(filter(str.strip, added), key=len, reverse=True))) or r"(?!)"
        )

    def first(self, text: str) -> int:
        """How far the first token of a text reaches, blanks before it included; 0 where something else comes first."""
        found = self._any.match(text, len(text) - len(text.lstrip()))
        return found.end() if found else 0

    def any_in(self, text: str) -> bool:
        return self._any.search(text) is not None

    def all(self, text: str) -> list[str]:
        return self._any.findall(text)

    def starts(self, text: str) -> list[int]:
        return [found.start() for found in self._any.finditer(text)]

    def last(self, text: str) -> str:
        """A text up to its last token."""
        ends = [found.end() for found in self._any.finditer(text)]
        return text[: ends[-1]] if ends else ""

    def common_start(self, text: str, other: str) -> int:
        """How much of ``text`` stands in the other one, too, in whole tokens, whatever the blanks."""
        places = [place for place, letter in enumerate(text) if not letter.isspace()]
        length = self.common("".join(text.split()), "".join(other.split()))
        inside = places[length] if length < len(places) else len(text)
        return next(
            (found.start() for found in self._any.finditer(text) if found.start() < inside < found.end()), inside
        )

    def common(self, one: str, other: str) -> int:
        """How much two texts have in common at their beginning, in whole tokens."""
        length = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            length += 1
        for text in (one, other):
            for found in self._any.finditer(text):
                if found.start() < length < found.end():
                    length = found.start()
        return length


@dataclass(frozen=True)
class Turn:
    """One assistant turn in the text of a conversation."""

    messages: Sequence[Message]
    tools: list[Any] | None
    render: Render
    tokens: Tokens
    text: str
    turn: int
    eos: str | None

    def span(self) -> tuple[int, int]:
        start, last = self._place(self.text)
        return start, self._end(last)

    def _place(self, text: str) -> tuple[int, int]:
        """(where the turn begins in a text, where its last word ends: where it begins if it has none)."""
        own = self._own_words(text)
        if own:
            return self._start(text, own[0].start()), _end_of_word(text, own[-1].end())
        asked = (
            [found for found in TAG.finditer(text) if found.group() in tags_of(self.messages[self.turn - 1])]
            if self.turn
            else []
        )
        if not asked:
            raise LookupError(f"message {self.turn + 1} and the one before it show no word")
        following = TAG.search(text, asked[-1].end())
        start = self._start(text, following.start() if following else len(text))
        return start, start

    def _own_words(self, text: str) -> list[re.Match[str]]:
        """The turn's words that stand before those of a later message: results repeat the names of their calls."""
        found = list(TAG.finditer(text))
        asked = tags_of(self.messages[self.turn - 1]["content"]) if self.turn else []
        behind = next((word.start() for word in found if word.group() in asked), 0)  # a result may name calls to come
        own = [word for word in found if word.start() >= behind and word.group() in tags_of(self.messages[self.turn])]
        if not own:
            return []
        later = {word for message in self.messages[self.turn + 1 :] for word in tags_of(message)}
        others = [word.start() for word in found if word.start() > own[0].start() and word.group() in later]
        upto = self._header_of(text, min(others, default=len(text)), own)
        return [word for word in own if word.start() < upto]

    def _header_of(self, text: str, upto: int, own: Sequence[re.Match[str]]) -> int:
        """Where, before ``upto``, words of the turn stop being its own: at the first that stood there already."""
        seen: set[str] = set()
        for word in own:
            if word.start() < upto and word.group() in seen:
                return word.start()
            seen.add(word.group())
        return upto

    def header(self) -> tuple[int, int]:
        """From the turn's beginning to the end of a plain answer's header, if that stands before its first word; also
        all that stands before an answer that nothing was asked for."""
        own = self._own_words(self.text)
        start, first = self._place(self.text)[0], own[0].start() if own else 0
        header = self._plain_header()
        found = self.text.rfind(header, start, first) if header else -1
        return (0 if not self.turn else start), (
            first if not self.turn else max(start, found + len(header) if found >= 0 else start)
        )

    def next_opener(self) -> tuple[int, int]:
        """What opens a further answer, where only that tells that the turn is over."""
        end = self.span()[1]
        following = self.messages[self.turn + 1 : self.turn + 2]
        is_open = bool(following) and following[0]["role"] == "assistant" and not self._plain_closing(False)
        return end, end + (self.tokens.first(self._behind(self.text, end)) if is_open else 0)

    def _start(self, text: str, first: int) -> int:
        """Behind what the generation prompt supplies of the stretch between the word before the turn and ``first``."""
        before = list(self.messages[: self.turn])
        prompt = self.render(before, self.tools, True) if before else None
        if prompt is None:
            return first
        start, shown = _gap(text, first)
        return start + self.tokens.common_start(shown, _gap(prompt, len(prompt))[1])

    def _plain_header(self) -> str:
        """What opens a plain answer, from the last token on that the generation prompt supplies."""
        asked, word = [{"role": "user", "content": OTHER + "zzz"}], OWN + "zzz"
        prompt, text = (
            self.render(asked, None, True),
            self.render([*asked, {"role": "assistant", "content": word}], None, False),
        )
        if prompt is None or text is None or word not in text:
            return ""
        supplied, shown = _gap(prompt, len(prompt))[1], _gap(text, text.index(word))[1]
        common = shown[: self.tokens.common_start(shown, supplied)]
        places = self.tokens.starts(common)
        return common[places[len(places) > 1] :] if places else ""

    def _end(self, last: int) -> int:
        behind = self._behind(self.text, last)
        is_last = self.turn + 1 == len(self.messages)
        follows = [{"role": "user", "content": OTHER + "zzy"}] if is_last else []
        other = self.render([*self.messages[: self.turn + 1], *follows], self.tools, False)
        rest = None if other is None else self._behind(other, self._place(other)[1])
        marker = self._plain_closing(is_last)
        common = "" if rest is None else behind[: self.tokens.common(behind, rest)]
        closing = self.tokens.last(common) or common.rstrip()
        if not is_last and not closing and self._plain_closing(True) and not self._inner():
            return last  # only the last turn is closed
        if not marker and self._inner():
            end = behind.find(self._inner())
            return last + (len(closing) if end < 0 else end + len(self._inner()))
        if not marker:  # only what opens the next message ends a turn
            next_is_own = not is_last and self.messages[self.turn + 1]["role"] == "assistant"
            return last + len(closing) + (0 if is_last or next_is_own else self.tokens.first(behind[len(closing) :]))
        if self.eos and self.eos in closing:
            closing = closing[: closing.rindex(self.eos) + len(self.eos)]
        marker, calls = marker.strip(), self.messages[self.turn].get("tool_calls")
        if marker in behind:
            return last + behind.index(marker) + len(marker)
        if calls and self.tokens.last(closing) == closing != "":  # calls may be closed by another token than answers
            return last + len(closing)
        if (
            not is_last and self.messages[self.turn + 1]["role"] == "assistant"
        ):  # some close a turn only before a question
            return last + len(closing)
        raise LookupError(f"message {self.turn + 1} is not closed as a plain answer is")

    def _behind(self, text: str, last: int) -> str:
        """What stands between ``last`` and the next word."""
        following = TAG.search(text, last)
        return text[last : following.start() if following else len(text)]

    def _inner(self) -> str:
        """The token that closes an answer before whatever follows, where none does at the end."""
        asked, word = [{"role": "user", "content": OTHER + "zzz"}], OWN + "zzz"
        told = [*asked, {"role": "assistant", "content": word}]
        texts = [
            self.render([*told, *more], None, False)
            for more in (asked, [{"role": "assistant", "content": OWN + "zzy"}])
        ]
        tails = [self._behind(text, text.index(word) + len(word)) if text and word in text else "" for text in texts]
        common = tails[0][: self.tokens.common(*tails)]
        return common[: self.tokens.first(common)].strip()

    def _plain_closing(self, is_last: bool) -> str:
        """What closes a plain answer, last or before another message; "" where only the next message does."""
        asked, word = [{"role": "user", "content": OTHER + "zzz"}], OWN + "zzz"
        told = [*asked, {"role": "assistant", "content": word}]
        tails = []
        for messages in (told, [*told, *asked]):
            text = self.render(messages, None, False)
            if text is None or word not in text:
                raise LookupError("a plain answer is not shown")
            tails.append(self._behind(text, text.rindex(word) + len(word)))
        common = self.tokens.last(tails[0][: self.tokens.common(*tails)])
        if self.eos and self.eos in common:  # behind it stands what opens an answer in any case
            return common[: common.rindex(self.eos) + len(self.eos)]
        if self.tokens.any_in(common) or not tails[0].strip():
            return common
        return tails[not is_last][: self.tokens.first(tails[not is_last])].rstrip()


def _end_of_word(text: str, end: int) -> int:
    found = re.compile(rf"(?:(?!{TAG.pattern})\w)*").match(text, end)
    return found.end() if found else end


def _gap(text: str, upto: int) -> tuple[int, str]:
    """What stands between the last word before ``upto`` and it, with its beginning."""
    words = list(TAG.finditer(text, 0, upto))
    start = _end_of_word(text, words[-1].end()) if words else 0
    return start, text[start:upto]
