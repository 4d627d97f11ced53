"""How a chat template ends an assistant turn, and what of a text closes one. Knows no tokens, only their spelling."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.core.errors import UserError
from manyhands.data.bounds import Ending, Markers
from manyhands.data.messages import Message, RowRefused
from manyhands.data.template import ChatTemplate

PRIVATE_USE = range(0xE000, 0xF8FF)  # code points that belong to no character
PROMPT: Message = {"role": "user", "content": "a"}
ANSWER: Message = {"role": "assistant", "content": "a"}


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
        """Without what follows the end-of-text token, as where a template opens an answer whether it is asked to or
        not.
        """
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
