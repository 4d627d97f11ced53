"""The added tokens of a tokenizer as they are spelled in a text, and what a chat template makes of them at the end of a
turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def compile_any(words: Sequence[str], before: str = "") -> re.Pattern[str] | None:
    """A pattern of any of the words, the longest that fits; None without words."""
    longest_first = sorted({word for word in words if word.strip()}, key=lambda word: (-len(word), word))
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, longest_first))})") if longest_first else None


def measure_common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass(frozen=True)
class Ending:
    """What a template writes after an assistant's words.

    ``marker`` closes a turn at the end of a conversation, and ``trailer`` follows it there; ``inner`` closes a turn
    before another message. Without either only what opens the next message tells that a turn is over, as in GLM's
    templates.
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
        None where nothing does."""
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
            return Ending(last, "", last) if last else None
        closing = last[: measure_common(last, asked)].rstrip()
        return Ending(closing, last[len(closing) :], closing) if closing else None
