"""How a chat template ends an assistant turn, and what of a text closes one. Knows no tokens, only their spelling."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands.core.errors import UserError
from manyhands.data.chat.template import ChatTemplate
from manyhands.data.read.messages import Message, RowRefused

PRIVATE_USE = range(0xE000, 0xF8FF)  # code points that belong to no character
PROMPT: Message = {"role": "user", "content": "a"}
ANSWER: Message = {"role": "assistant", "content": "a"}


def compile_any(words: Sequence[str], before: str = "") -> re.Pattern[str] | None:
    """A pattern of any of the words, the longest that fits; None without words."""
    longest_first = sorted({word for word in words if word.strip()}, key=lambda word: (-len(word), word))
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, longest_first))})") if longest_first else None


def measure_common(one: str, other: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass(frozen=True)
class Ending:
    """What a template writes after an assistant's words.

    ``marker`` closes a turn at the end of a conversation, and ``trailer`` follows it there; ``inner`` closes a turn
    before another message. Without either only what opens the next message tells that a turn is over.
    """

    marker: str
    trailer: str
    inner: str


class Markers:
    """Finds the spelling of ``added`` tokens in texts."""

    def __init__(self, added: Sequence[str]) -> None:
        self.added = tuple(added)
        self._leading = compile_any(added, before=r"\s*")
        self._token = compile_any(added)

    def measure_first(self, text: str) -> int:
        """Length of the first token of a text with the white space before it; 0 where something else comes first."""
        found = self._leading.match(text) if self._leading is not None else None
        return found.end() if found is not None else 0

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        return self._token.finditer(text) if self._token is not None else iter(())

    def are_all(self, text: str) -> bool:
        """Whether a text is one or more tokens and nothing else."""
        return bool(text) and sum(len(found.group()) for found in self.find_all(text)) == len(text)

    def cut_behind_last(self, text: str) -> str:
        """A text up to its last token; "" without one."""
        ends = [found.end() for found in self.find_all(text)]
        return text[: ends[-1]] if ends else ""

    def measure_common(self, one: str, other: str) -> int:
        """Length of the common beginning, no token of either text divided."""
        common = measure_common(one, other)
        for text in (one, other):
            for found in self.find_all(text):
                if found.start() >= common:
                    break
                if found.end() > common:
                    common = found.start()
        return common

    def measure_supplied(self, shown: str, supplied: str) -> int:
        """How much of ``shown`` stands in ``supplied``, too, from the beginning and in whole tokens; white space that
        only one of them has makes no difference."""
        matched = index = other = 0
        ours = self._cut(shown[: 2 * len(supplied) + 100])
        theirs = self._cut(supplied)
        while index < len(ours) and other < len(theirs):
            if ours[index] == theirs[other]:
                index, other = index + 1, other + 1
                matched = index
            elif ours[index].isspace():
                index += 1
            elif theirs[other].isspace():
                other += 1
            else:
                break
        return sum(map(len, ours[:matched]))

    def _cut(self, text: str) -> list[str]:
        """A text as its tokens and the single characters between them."""
        pieces: list[str] = []
        reached = 0
        for found in self.find_all(text):
            pieces += [*text[reached : found.start()], found.group()]
            reached = found.end()
        return [*pieces, *text[reached:]]

    def make_ending(self, last: str, asked: str, answered: str) -> Ending | None:
        """From what stands behind an answer at the end, before a question, and before another answer ("" if refused).
        None where nothing but white space does."""
        if asked:
            closing = self.cut_behind_last(last[: self.measure_common(last, asked)])
            if closing:
                return Ending(closing, last[len(closing) :], closing)
        marker = last[: self.measure_first(last)]
        if marker:
            inner = asked[: self.measure_common(asked, answered)] if answered else asked
            return Ending(marker, last[len(marker) :], inner[: self.measure_first(inner)] if asked else marker)
        if asked and not last.strip() and self.measure_first(asked):
            inner = asked[: self.measure_common(asked, answered)]
            return Ending("", last, inner[: self.measure_first(inner)])
        if not asked or asked.startswith(last):
            return Ending(last, "", last) if last.strip() else None
        closing = last[: measure_common(last, asked)].rstrip()
        return Ending(closing, last[len(closing) :], closing) if closing else None


class TurnEnds:
    """Of one template. ``eos``: the spelling of the tokenizer's end-of-text token."""

    def __init__(self, template: ChatTemplate, markers: Markers, eos: str | None) -> None:
        self._template, self._markers, self._eos = template, markers, eos
        self.known: Ending | None = None  # once it was asked for
        self._openers: set[str] = set()  # what follows the end of an answer in any case

    def cut_closing(self, tail: str, other: str, is_last: bool) -> str:
        """What of ``tail`` closes a turn: what stands there in any case, whether the conversation ends with the turn or
        goes on (``other``), up to the last token, or what closes an answer there."""
        ending = self.find()
        common = self._markers.measure_common(tail, other)
        closing = self._markers.cut_behind_last(tail[:common])
        # No more than that: the arguments of calls may hold the end-of-text token, too.
        openers = (opener for opener in self._openers if closing.endswith(opener))
        closing = closing.removesuffix(max(openers, key=len, default=""))
        behind = (tail if is_last else other)[common:]  # as the last turn
        if not ending.trailer.strip().endswith(behind.strip()) and not self._markers.measure_first(behind):
            return ""  # the turn itself is written otherwise
        marker = ending.marker if is_last else ending.inner
        if (
            marker.strip()
            and not closing.endswith(marker.strip())
            and tail[len(closing) :].lstrip().startswith(marker.strip())
        ):
            return tail[: tail.index(marker.strip(), len(closing)) + len(marker.strip())]
        return closing

    def cut_opener(self, closing: str) -> str:
        """Without what follows the end-of-text token, as where a template always opens the next answer."""
        if not self._eos or self._eos not in closing:  # a tokenizer may name "" as its token
            return closing
        before, another, between = closing[: closing.rindex(self._eos)].rpartition(self._eos)
        if another and self._markers.are_all(between):  # behind the first of two is no word
            return before + self._eos
        return closing[: closing.rindex(self._eos) + len(self._eos)]

    def measure_next_header(self, messages: Sequence[Message], turn: int, rest: str) -> int:
        """Length of the next turn's first token, where that alone ends a turn: the model stops by writing it."""
        ending = self.find()
        if ending.marker or turn + 1 == len(messages):
            return 0
        if ending.inner:
            return len(ending.inner) if rest.startswith(ending.inner) else 0
        return 0 if messages[turn + 1]["role"] == "assistant" else self._markers.measure_first(rest)

    def find(self) -> Ending:
        """How the template ends a turn. Raises RowRefused, and UserError for a template that ends none."""
        if self.known is None:
            private = chr(PRIVATE_USE[0])
            answer = {"role": "assistant", "content": private}
            _, shown, last = self._template.render([PROMPT, answer]).rpartition(private)
            if not shown:
                raise RowRefused("the chat template does not show an assistant's content: it cannot be masked")
            follow = [
                (self._template.try_render([PROMPT, answer, more]) or "").rpartition(private)[2]
                for more in (PROMPT, ANSWER)
            ]
            ending = self._markers.make_ending(last, *follow)
            if ending is None:
                raise _no_ending(last)
            marker, inner = self.cut_opener(ending.marker), self.cut_opener(ending.inner)
            self._openers = {ending.marker.removeprefix(marker), ending.inner.removeprefix(inner)}
            self.known = Ending(marker, ending.marker[len(marker) :] + ending.trailer, inner)
        return self.known


def _no_ending(written: str) -> UserError:
    return UserError(
        f"the chat template writes nothing {'but white space ' if written else ''}after an assistant turn",
        why="there is no end-of-turn token to train, so the model would not learn to stop",
        fix="set model.chat_template to one that ends assistant turns: a name such as chatml or alpaca, or this one's "
        "text with eos_token behind the content of an assistant",
    )
