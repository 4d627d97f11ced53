"""Where tokens lie in a text, and where turns do: the tools that ``spans.py`` and ``render.py`` share. Knows no
template.

``ByteBounds`` tells from ids alone which bytes each token stands for; ``Markers`` tells the markers of a template apart
from contents; conversations of the same roles have one ``TurnShape``: where the turns of one lie, they lie in all.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

SPACE = "Ġ"  # how byte-level vocabularies spell a blank
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
UNKNOWN = 1 << 30  # the length of a token of which none is known: longer than any text, so that no sum fits


class TokenRun(NamedTuple):
    """Tokens [first, behind) that lie inside a span, or across its beginning with visible characters of it; whether
    they reach its end."""

    first: int
    behind: int
    is_whole: bool


class ByteBounds:
    """Bounds of tokens by a table of ``lengths``, int64, one for each id, in bytes.

    ``leading`` and ``trailing`` are the blanks at both ends of each token, where the tokenizer leaves these out of its
    offsets (``trim_offsets``), else None; ``keeps_first``: not a single one that the first token begins with.
    """

    def __init__(
        self,
        normalizer: Any,
        lengths: np.ndarray,
        leading: np.ndarray | None,
        trailing: np.ndarray | None,
        keeps_first: bool,
    ) -> None:
        self._normalizer, self._lengths = normalizer, lengths
        self._leading, self._trailing, self._keeps_first = leading, trailing, keeps_first

    def cover(self, ids: np.ndarray, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[TokenRun], int] | None:
        """The tokens inside each span of characters of ``text``, whose ids are ``ids``, and how many lie across the
        beginning of one. None where that does not follow from the ids."""
        bounds = self._find(ids, text)
        if bounds is None:
            return None
        starts, ends = bounds
        borders = np.array(spans, dtype=np.int64)
        lasts = borders[:, 1] - 1  # the last character of each span
        if not text.isascii():
            places = _place_characters(text)
            borders, lasts = places[borders], places[lasts]
        firsts = starts.searchsorted(borders[:, 0]).tolist()  # how many tokens begin before a span
        upto = ends.searchsorted(borders, side="right").tolist()  # how many end before its border, or there
        num_straddling = 0
        for number, ((start, _), (before, _)) in enumerate(zip(spans, upto, strict=True)):
            across, first = firsts[number] - before, firsts[number]
            num_straddling += max(0, across)
            if across > 0 and not _is_blank(text, start, ends[first - 1] - borders[number, 0]):
                firsts[number] -= 1  # `` Hello`` behind a prompt that ends in a blank
        nothing = int(ends[0] == 0)  # a first token whose blanks were all taken off stands for nothing
        runs = []
        for (start, end), last, first, (_, behind) in zip(borders.tolist(), lasts.tolist(), firsts, upto, strict=True):
            first = max(first, nothing)
            behind = max(first, behind)
            runs.append(TokenRun(first, behind, end <= start or (behind > first and ends[behind - 1] > last)))
        return runs, num_straddling

    def _find(self, ids: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(starts, ends) int64 of tokens in bytes of the UTF-8 of ``text``, both ascending, where a blank that belongs
        to no token belongs to the next one. None where they do not follow from the ids."""
        if self._normalizer is not None and not text.isascii() and self._normalizer.normalize_str(text) != text:
            return None
        ends = np.cumsum(self._lengths[ids])
        if not len(ends) or ends[-1] != count_bytes(text):
            return None
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1]
        if self._leading is not None and self._trailing is not None:
            # As process_offsets in pre_tokenizers/byte_level.rs of the library.
            leading = self._leading[ids]
            if self._keeps_first and leading[0] == 1:  # of one blank it takes none off, of more it takes all
                leading[0] = 0
            ends = np.maximum(ends - self._trailing[ids], np.minimum(starts + leading, ends))
            starts[1:] = ends[:-1]
        return starts, ends


def _is_blank(text: str, start: int, num_bytes: int) -> bool:
    """Whether the ``num_bytes`` of a text from the character ``start`` on are white space. Parts of a character are
    not.
    """
    return not text[start : start + num_bytes].encode()[:num_bytes].decode(errors="replace").strip()


def count_bytes(text: str) -> int:
    """Length of the UTF-8 of a text."""
    return len(text) if text.isascii() else len(text.encode())


def _place_characters(text: str) -> np.ndarray:
    """Where each character of a text, and its end, lies in its UTF-8; int64."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(raw))  # all but continuation bytes begin a character


def make_byte_bounds(tokenizer: Any) -> ByteBounds | None:
    """Bounds for a tokenizer of transformers that is backed by ``tokenizers``; None where ids do not tell them."""
    from tokenizers import models, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    model, letters = backend.model, frozenset(pre_tokenizers.ByteLevel.alphabet())
    if type(model) is not models.BPE or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    trims = _trimmers(backend.post_processor)
    if not (_keeps_all(backend.pre_tokenizer) and _is_nfc(backend.normalizer)) or trims is None or len(trims) > 1:
        return None
    added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
    lengths, leading, trailing = (np.zeros(max([*vocabulary.values(), *added]) + 1, dtype=np.int64) for _ in range(3))
    lengths[:] = UNKNOWN
    for token, id in vocabulary.items():
        if letters.issuperset(token):
            lengths[id] = len(token)
            leading[id], trailing[id] = len(token) - len(token.lstrip(SPACE)), len(token) - len(token.rstrip(SPACE))
    for id, token in added.items():
        is_blank = token != token.strip() or token != token.strip(
            SPACE
        )  # the library trims these, too, each in its way
        is_told = lengths[id] in (UNKNOWN, count_bytes(token))  # whether it came by merges or was found as a whole
        lengths[id] = UNKNOWN if is_blank or not is_told else count_bytes(token)
    if (
        not vocabulary.keys() >= letters
    ):  # a byte that is no token is the unknown one, alone or with its neighbors, or tokens <0xC3>
        lengths[[id for token, id in vocabulary.items() if token == model.unk_token or BYTE_TOKEN.fullmatch(token)]] = (
            UNKNOWN
        )
    normalizer = backend.normalizer if _parts(backend.normalizer, "normalizers") else None
    if not trims:
        return ByteBounds(normalizer, lengths, None, None, keeps_first=False)
    return ByteBounds(normalizer, lengths, leading, trailing, keeps_first=trims[0])


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """A component of a tokenizer as tokenizer.json describes it; the parts of one that is a sequence of them."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    listed, parts = [described], []
    while listed:
        first = listed.pop(0)
        if first["type"] == "Sequence":
            listed = [*first[name], *listed]
        else:
            parts.append(first)
    return parts


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether every character stays, and each is spelled as its bytes once."""
    parts = _parts(pre_tokenizer, "pretokenizers")
    by_bytes = [part for part in parts if part["type"] == "ByteLevel"]
    others = [part for part in parts if part["type"] != "ByteLevel"]
    return (
        len(by_bytes) == 1
        and not by_bytes[0]["add_prefix_space"]
        and all(
            part["type"] == "Digits" or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
            for part in others
        )
    )


def _is_nfc(normalizer: Any) -> bool:
    """Whether the normalizer leaves a text alone, or composes characters, which can be asked of each text."""
    return all(part["type"] == "NFC" for part in _parts(normalizer, "normalizers"))


def _trimmers(post_processor: Any) -> list[bool] | None:
    """``add_prefix_space`` of each part that takes blanks off the offsets; None where a part may do anything else to
    them.
    """
    parts = _parts(post_processor, "processors")
    if any(part["type"] not in ("ByteLevel", "TemplateProcessing") for part in parts):
        return None
    return [part["add_prefix_space"] for part in parts if part["type"] == "ByteLevel" and part["trim_offsets"]]


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
        """The spans in ``text`` if it is the shape's literals around the contents, as they are or stripped; else
        None.
        """
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
    """The shape of a text in which each message's content is its own single character of ``slots``, and of its
    turns.
    """
    places = sorted((text.index(slot), index) for index, slot in enumerate(slots))
    positions = [position for position, _ in places]
    edges = [-1, *positions, len(text)]
    literals = tuple(text[left + 1 : right] for left, right in pairwise(edges))
    borders = tuple(
        ((start, bisect_left(positions, start)), (end, bisect_left(positions, end))) for start, end in spans
    )
    return TurnShape(literals, tuple(index for _, index in places), borders)


def widen(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of tokens in characters, where a blank that belongs to no token belongs to the next one.

    Byte-level tokenizers with ``trim_offsets`` leave the blanks of `` word`` out of the offsets, and give a token of
    blanks alone the empty offset behind them: taken as they are, blanks before a span would count as inside it.
    """
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    if len(ends) == 0:
        return starts, ends
    reached = np.maximum.accumulate(ends)
    return np.minimum(starts, np.concatenate([[0], reached[:-1]])), ends
