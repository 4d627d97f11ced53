"""From conversations and texts to token ids and a mask of what is trained. Knows no files and no policy on length.

The ids are the tokenizer's own: those of ``apply_chat_template`` for a conversation, those of ``tokenizer(text)`` for a
text. Only the mask is ours. It comes from spans of characters that are found while rendering, never by searching text:

- *prefix*: rendering the turns before an assistant turn (with the generation prompt), and the turns up to and with it,
  gives two nested prefixes of the whole; the turn lies between them.
- *sentinel*: where a template renders a turn otherwise once more turns follow, the whole is rendered with the turn's
  content replaced by a character that occurs nowhere else; what stands before and after it bounds the content.

Either span ends with the end-of-turn marker, which is trained; white space that follows the marker is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from manyhands.data.formats import Message, RowRefused
from manyhands.errors import UserError

PRIVATE_USE = range(0xE000, 0xF8FF)  # code points that belong to no character


@dataclass(frozen=True)
class Rendered:
    """One row: ``ids`` int32 and ``trained`` bool of the same length.

    ``num_straddling`` counts tokens that lie across the border of a trained span (untrained in conversations).
    """

    ids: np.ndarray
    trained: np.ndarray
    num_straddling: int = 0


@dataclass(frozen=True)
class Text:
    """A row as text, with the spans of characters [start, end) that are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(conversation: Sequence[Message] | str, tokenizer: Any) -> Rendered:
    """One conversation or text; see ``Renderer``. Raises RowRefused with the reason where it cannot be masked."""
    rendered = Renderer(tokenizer).render_many([conversation])[0]
    if isinstance(rendered, RowRefused):
        raise rendered
    return rendered


class Renderer:
    """Renders and masks rows with one tokenizer.

    ``plain_prompts`` renders a user and an assistant turn as prompt + completion + eos where the tokenizer has no chat
    template. ``template_arguments`` are handed to the template. Raises UserError where the tokenizer cannot give
    character offsets.
    """

    def __init__(self, tokenizer: Any, *, plain_prompts: bool = False, template_arguments: dict[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer gives no character offsets",
                why=f"{type(tokenizer).__name__} is not backed by tokenizer.json, and masks are made from offsets",
                fix="use a model folder with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        self.plain_prompts = plain_prompts and not tokenizer.chat_template
        self._arguments = template_arguments or {}
        added = tokenizer.added_tokens_decoder.values()
        self._leading_marker = _compile_any([token.content for token in added], r"\s*")
        self._special = _compile_any([token.content for token in added if token.special])
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._ending: tuple[str, str] | None = None

    def render_many(self, conversations: Sequence[Sequence[Message] | str]) -> list[Rendered | RowRefused]:
        """One result for each conversation, in order; rows that cannot be masked come back as the reason."""
        results: list[Rendered | RowRefused | None] = [None] * len(conversations)
        chats: dict[int, Text] = {}
        plain: dict[int, Text] = {}
        for index, conversation in enumerate(conversations):
            try:
                if isinstance(conversation, str):
                    plain[index] = Text(conversation, ((0, len(conversation)),))
                elif self.plain_prompts:
                    plain[index] = _join_prompt(conversation)
                else:
                    chats[index] = self.find_spans(conversation)
            except RowRefused as refused:
                results[index] = refused
        for texts, finish, special in ((chats, self._mask_chat, False), (plain, self._mask_plain, True)):
            if not texts:
                continue
            encoded = self.tokenizer([text.text for text in texts.values()], add_special_tokens=special, verbose=False)
            for (index, text), encoding in zip(texts.items(), encoded.encodings, strict=True):
                try:
                    ids = np.array(encoding.ids, dtype=np.int32)
                    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
                    results[index] = finish(text, ids, offsets)
                except RowRefused as refused:
                    results[index] = refused
        return [result for result in results if result is not None]

    def has_markers(self, text: str) -> bool:
        """Whether a text holds the spelling of a special token, which the tokenizer will take for the token itself."""
        return self._special is not None and self._special.search(text) is not None

    def find_spans(self, messages: Sequence[Message]) -> Text:
        """The rendered conversation with the span of every assistant turn. Raises RowRefused."""
        whole = self._apply(messages)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = tuple(self._find_span(messages, turn, whole) for turn in turns)
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise RowRefused("the spans of two assistant turns overlap: the chat template cannot be masked for this row")
        return Text(whole, spans)

    def _find_span(self, messages: Sequence[Message], turn: int, whole: str) -> tuple[int, int]:
        suffix, marker = self._find_ending()
        before = self._apply_or_none(messages[:turn], add_generation_prompt=True)
        start = len(before) if before is not None and whole.startswith(before) else None
        span: tuple[int, int] | None = None
        if start is not None:
            through = whole if turn == len(messages) - 1 else self._apply_or_none(messages[: turn + 1])
            if through is not None and whole.startswith(through) and through.endswith(suffix):
                end = len(through) - len(suffix)
                span = (start, end + len(marker)) if end >= start else None
        if span is None or messages[turn]["content"].strip() not in whole[span[0] : span[1]]:
            by_sentinel = self._find_span_by_sentinel(messages, turn, whole, start)
            span = span or by_sentinel
        return span

    def _find_span_by_sentinel(self, messages: Sequence[Message], turn: int, whole: str, start: int | None) -> tuple[int, int]:
        """The span from one more rendering; ``start`` is where the generation prompt ends, if that is known."""
        sentinel = next(chr(code) for code in PRIVATE_USE if chr(code) not in whole)
        replaced = self._apply([*messages[:turn], {**messages[turn], "content": sentinel}, *messages[turn + 1 :]])
        if (times := replaced.count(sentinel)) != 1:
            raise RowRefused(f"the chat template shows the content of message {turn + 1} {times} times: it cannot be masked")
        before, _, after = replaced.partition(sentinel)
        if not whole.endswith(after) or len(after) > len(whole):
            raise RowRefused(f"the chat template renders what follows message {turn + 1} by its content: it cannot be masked")
        end = len(whole) - len(after)
        common = next((index for index, (a, b) in enumerate(zip(before, whole[:end], strict=False)) if a != b), min(len(before), end))
        if common == end and messages[turn]["content"].strip():
            raise RowRefused(f"the chat template shows nothing of message {turn + 1}: it cannot be masked")
        # Without the prompt's end: a blank in front belongs to the answer's first token (`` Hello``).
        first = start if start is not None and start <= common else len(whole[:common].rstrip(" "))
        marker = self._find_ending()[1]
        if not after.startswith(marker):
            found = self._match_marker(after)
            if found is None:
                raise RowRefused(f"no end-of-turn marker follows message {turn + 1}: the model would not learn to stop")
            marker = found
        return first, end + len(marker)

    def _find_ending(self) -> tuple[str, str]:
        """(what the template writes after the last assistant turn, the part of it that ends the turn), found once."""
        if self._ending is None:
            sentinel = chr(PRIVATE_USE[0])
            probe = self._apply([{"role": "user", "content": "a"}, {"role": "assistant", "content": sentinel}])
            suffix = probe.rpartition(sentinel)[2]
            marker = self._match_marker(suffix)
            marker = suffix if marker is None else marker
            if not marker:
                raise UserError(
                    "the chat template writes nothing after an assistant turn",
                    why="there is no end-of-turn token to train, so the model would not learn to stop",
                    fix="give model.chat_template one that ends assistant turns",
                )
            self._ending = (suffix, marker)
        return self._ending

    def _match_marker(self, text: str) -> str | None:
        """The first added token of a text, with the white space before it, if nothing else stands before it."""
        found = self._leading_marker.match(text) if self._leading_marker is not None else None
        return found.group() if found is not None else None

    def _apply(self, messages: Sequence[Message], **arguments: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments, **self._arguments)
        except Exception as error:  # a template is a program from outside: whatever it raises concerns this row
            raise RowRefused(f"the chat template refuses this conversation: {error}") from error

    def _apply_or_none(self, messages: Sequence[Message], **arguments: Any) -> str | None:
        try:
            return self._apply(messages, **arguments) if messages else None
        except RowRefused:
            return None

    def _mask_chat(self, text: Text, ids: np.ndarray, offsets: np.ndarray) -> Rendered:
        starts, ends = _widen(offsets)
        if self._bos is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos:
            raise RowRefused("the chat template writes the begin-of-text token twice")
        trained = np.zeros(len(ids), dtype=bool)
        num_straddling = 0
        for start, end in text.spans:
            inside = (starts >= start) & (ends <= end) & (ends > starts)
            if not inside.any() or ends[inside].max() != end:
                raise RowRefused("a token lies across the end of an assistant turn: the chat template cannot be masked for this row")
            trained |= inside
            num_straddling += int(((starts < start) & (ends > start)).sum())
        return Rendered(ids, trained, num_straddling)

    def _mask_plain(self, text: Text, ids: np.ndarray, offsets: np.ndarray) -> Rendered:
        """A text or prompt + completion, with eos at the end. A token across the border carries the first trained
        characters (``A: `` + ``42`` is often one token `` 42``), so here it is trained."""
        starts, ends = _widen(offsets)
        first = text.spans[0][0]
        trained = (ends > first) & (ends > starts) if first else np.ones(len(ids), dtype=bool)
        num_straddling = int(((starts < first) & (ends > first)).sum())
        if self._eos is None:
            raise UserError("the tokenizer has no end-of-text token", fix="set eos_token in the model folder's tokenizer_config.json")
        if len(ids) == 0 or ids[-1] != self._eos:
            ids, trained = np.append(ids, np.int32(self._eos)), np.append(trained, True)
        trained[-1] = True
        return Rendered(ids.astype(np.int32, copy=False), trained, num_straddling)


def _widen(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of tokens in characters, where a blank that belongs to no token belongs to the next one.

    Byte-level tokenizers with ``trim_offsets`` leave the blanks of `` word`` out of the offsets, and give a token of
    blanks alone the empty offset behind them: taken as they are, blanks before a span would count as inside it.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    if len(ends) == 0:
        return starts, ends
    reached = np.maximum.accumulate(ends)
    return np.minimum(starts, np.concatenate([[0], reached[:-1]])), ends


def _compile_any(words: Sequence[str], before: str = "") -> re.Pattern[str] | None:
    """A pattern of any of the words, the longest that fits; None without words."""
    longest_first = sorted({word for word in words if word.strip()}, key=lambda word: (-len(word), word))
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _join_prompt(messages: Sequence[Message]) -> Text:
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise RowRefused("without a chat template a row must be one prompt and one completion (give model.chat_template)")
    prompt, completion = messages[0]["content"], messages[1]["content"]
    return Text(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
