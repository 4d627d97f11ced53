"""Who of several processes does what: parts one after the other, and batches of rows out of parts that are large.

A large part (``files.FilePart.large``) is read by one process, which hands its rows out in batches as long as others
keep up, and tokenizes a batch itself where enough of them wait: so all cores work, and memory holds no more than that.
Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from manyhands.data.files import Row

BATCH_CHARACTERS = 1 << 20  # a quarter of a second's work: much to a process, little to memory
MAX_HANDED_CHARACTERS = 4 << 20  # a batch is larger than asked where one row is: it stays with who read it


@dataclass(frozen=True)
class RowBatch:
    """Neighboring rows of a large part; ``part`` and ``number``, of the batch in it, count from 0."""

    part: int
    number: int
    rows: list[Row]
    num_characters: float


def cut_batches(part: int, rows: Iterable[Row], batch_characters: int) -> Iterator[RowBatch]:
    """All rows in order, in batches of at most so many characters or one row.

    A row whose text comes in pieces is a batch of its own, to be used up before the next is asked for.
    """
    batch: list[Row] = []
    number, characters = 0, 0.0
    for row in rows:
        size = count_characters(row.fields)
        if batch and characters + size > batch_characters:
            yield RowBatch(part, number, batch, characters)
            batch, number, characters = [], number + 1, 0.0
        batch.append(row)
        characters += size
        if characters >= batch_characters:
            yield RowBatch(part, number, batch, characters)
            batch, number, characters = [], number + 1, 0.0
    if batch:
        yield RowBatch(part, number, batch, characters)


def count_characters(value: Any) -> float:
    """Of all strings in a value of lists and objects, keys left out; a text that comes in pieces is as long as can
    be.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_characters, value.values()))
    if isinstance(value, list):
        return sum(map(count_characters, value))
    return float("inf") if isinstance(value, Iterator) else 8


class WorkList:
    """What is left to do, shared by forked processes. At most ``max_batches`` wait at a time."""

    def __init__(self, context: BaseContext, num_parts: int, max_batches: int) -> None:
        self._num_parts, self._max_batches = num_parts, max_batches
        self._changed = context.Condition()
        # guarded by the condition: the next part, processes that read one, batches that nobody has claimed
        self._next, self._reading, self._waiting = (context.Value("i", 0, lock=False) for _ in range(3))
        self._batches: Any = context.Queue()

    def take(self) -> int | RowBatch | None:
        """The number of the next part; else a batch; None once nobody reads a part that batches could come from."""
        with self._changed:
            while True:
                if self._next.value < self._num_parts:
                    self._next.value += 1
                    self._reading.value += 1
                    return self._next.value - 1
                if self._waiting.value:
                    self._waiting.value -= 1
                    break
                if not self._reading.value:
                    return None
                self._changed.wait()
        return self._batches.get()  # it was put there before it was counted, or is about to arrive

    def offer(self, batch: RowBatch) -> bool:
        """Hands a batch to whoever takes it; False where the caller is to do it himself."""
        if batch.num_characters > MAX_HANDED_CHARACTERS:
            return False
        with self._changed:
            if self._waiting.value >= self._max_batches:
                return False
            self._waiting.value += 1
            self._batches.put(batch)
            self._changed.notify()
        return True

    def finish_part(self) -> None:
        """The caller has handed out, or done, all of the part that he took."""
        with self._changed:
            self._reading.value -= 1
            if not self._reading.value:
                self._changed.notify_all()

    def abandon(self) -> None:
        """The caller ends, whatever he has handed out."""
        self._batches.cancel_join_thread()
