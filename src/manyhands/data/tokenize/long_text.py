"""Tokenizes a text of any length in windows, so that memory holds one window, to the ids that the whole text has.

Neighboring windows overlap. Both are tokenized alone, and joined in the overlap where they agree on several tokens in
a row: there, the tokens no longer depend on where a window begins or ends. Knows no store and no length policy.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.data.read.files import FilePart, Findings, Row, read_lines
from manyhands.data.read.messages import RowRefused

LONG_CHARACTERS = 1 << 20  # shorter texts are tokenized whole
WINDOW_CHARACTERS = 1 << 18
OVERLAP_CHARACTERS = 1 << 12
NUM_WINDOWS = 8  # tokenized at once, by as many threads as the tokenizer has
NUM_AGREEING = 8  # tokens in a row


class LongText:
    """``window`` and ``overlap`` are in characters."""

    def __init__(self, tokenizer: Any, window: int = WINDOW_CHARACTERS, overlap: int = OVERLAP_CHARACTERS) -> None:
        self._backend, self._eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._window, self._overlap = window, min(overlap, window // 2)

    def encode(self, pieces: str | Iterable[str]) -> Iterator[np.ndarray]:
        """Stretches of the ids of ``tokenizer(text)`` with eos behind, int32; all together at least two tokens.

        Raises RowRefused where two windows agree nowhere, UserError where the tokenizer has no end-of-text token.
        """
        if self._eos is None:
            raise UserError(
                "the tokenizer has no end-of-text token",
                fix="set eos_token in the model folder's tokenizer_config.json",
            )
        self._backend.encode_special_tokens = self._tokenizer.split_special_tokens
        # The ids that the tokenizer puts before and behind a text.
        encoding = self._backend.encode("a", add_special_tokens=True)
        inside = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        before, behind = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
        ids, ends, offset, begin = np.empty(0, np.int32), np.empty(0, np.int64), 0, 0
        for next_ids, next_ends, start in self._encode_windows(self._cut(pieces)):
            if not start:  # a text may bring the tokens that the tokenizer puts around it
                yield np.array(before[:-1] if before[-1:] == next_ids[:1].tolist() else before, dtype=np.int32)
                before = []
            else:
                kept, begin = self._join(ids, ends, next_ids, next_ends, start)
                yield ids[offset:kept]
            ids, ends, offset = next_ids, next_ends, begin
        yield np.concatenate([np.array(before, dtype=np.int32), ids[offset:]])
        behind = behind[1:] if behind[:1] == ids[-1:].tolist() else behind
        last = behind[-1] if behind else ids[-1] if len(ids) else None
        yield np.array(behind if last == self._eos else [*behind, self._eos], dtype=np.int32)

    def _cut(self, pieces: str | Iterable[str]) -> Iterator[tuple[str, int]]:
        """(window, where it begins), each beginning ``overlap`` characters before the end of the one before."""
        text, start = "", 0
        for piece in [pieces] if isinstance(pieces, str) else pieces:
            position = 0
            while position < len(piece):
                room = self._window - len(text)
                text, position = text + piece[position : position + room], position + room
                if len(text) >= self._window:
                    yield text, start
                    start += len(text) - self._overlap
                    text = text[-self._overlap :]
        if text and (not start or len(text) > self._overlap):
            yield text, start

    def _encode_windows(self, windows: Iterator[tuple[str, int]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """(ids int32, where each token ends in the whole text, where the window begins)."""
        while group := list(islice(windows, NUM_WINDOWS)):
            try:
                encodings = self._backend.encode_batch([text for text, _ in group], add_special_tokens=False)
            except Exception as error:
                raise RowRefused(f"the tokenizer refuses this text: {error}") from error
            for encoding, (_, start) in zip(encodings, group, strict=True):
                ends = np.fromiter((end for _, end in encoding.offsets), dtype=np.int64, count=len(encoding.ids))
                yield np.array(encoding.ids, dtype=np.int32), ends + start, start

    def _join(
        self, ids: np.ndarray, ends: np.ndarray, next_ids: np.ndarray, next_ends: np.ndarray, start: int
    ) -> tuple[int, int]:
        """(tokens taken of a window, left out of the next): they meet mid-overlap if they agree there."""
        first = int(np.searchsorted(ends, start))
        left = list(zip(ids[first:].tolist(), ends[first:].tolist(), strict=True))
        limit = int(np.searchsorted(next_ends, ends[-1], side="right")) if len(ends) else 0
        right = list(zip(next_ids[:limit].tolist(), next_ends[:limit].tolist(), strict=True))
        places = {
            tuple(left[index : index + NUM_AGREEING]): first + index for index in range(len(left) - NUM_AGREEING + 1)
        }
        middle = start + self._overlap // 2
        met = [
            (abs(right[index][1] - middle), places[run], index)
            for index in range(len(right) - NUM_AGREEING + 1)
            if (run := tuple(right[index : index + NUM_AGREEING])) in places
        ]
        if not met:
            raise RowRefused(
                "the text is too long to be tokenized whole, and its parts give other tokens: divide it by blank lines"
            )
        _, taken, left_out = min(met)
        return taken + NUM_AGREEING // 2, left_out + NUM_AGREEING // 2


def read_documents(part: FilePart, findings: Findings) -> Iterator[Row]:
    """The documents of a part of a text file, separated by blank lines. The text of a long one is an iterator over its
    pieces, to be used up before the next row is asked for. No row follows the first fault."""
    lines = read_lines(Path(part.file), findings, part.start, part.stop, part.first_line)
    for is_text, document in groupby(lines, lambda numbered: bool(numbered[1].strip())):
        if not is_text:
            continue
        number, first = next(document)
        rest = ("\n" + line.rstrip("\r\n") for _, line in document)  # noqa: B031  # behind the first
        pieces = chain([first.rstrip("\r\n")], rest)
        text, num_characters = [], 0
        for piece in pieces:
            text.append(piece)
            num_characters += len(piece)
            if num_characters > LONG_CHARACTERS:
                break
        if not findings.count:
            joined = "".join(text)
            yield Row(
                {"text": joined if num_characters <= LONG_CHARACTERS else chain([joined], pieces)}, part.file, number
            )
