"""Conversations of the same roles are rendered alike: where the turns of one lie, they lie in all, contents aside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Span = tuple[int, int]  # characters [start, end)


@dataclass(frozen=True)
class Shape:
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


def make_shape(text: str, slots: Sequence[str], spans: Sequence[Span]) -> Shape:
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
    return Shape(literals, tuple(index for _, index in places), borders)
