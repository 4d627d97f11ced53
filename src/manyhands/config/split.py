"""``Source.split``: names of splits and slices of their rows, as ``datasets`` spells them: ``train``, ``train[:20%]``,
``train[100:200]``, ``train[-5%:]``, ``train+test``. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOUND = r"-?\d+(?:\.\d+)?%|-?\d+"
_PIECE = re.compile(rf"([^\[\]+:]+?)\s*(?:\[\s*({_BOUND})?\s*:\s*({_BOUND})?\s*\])?")


@dataclass(frozen=True)
class SplitSlice:
    """Rows ``start`` to ``stop`` of a split, as written: a number, percents (``20%``), negative from the end, or
    empty."""

    name: str
    start: str = ""
    stop: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.start and not self.stop

    @property
    def needs_total(self) -> bool:
        """Whether the bounds follow from the number of rows."""
        return any(bound.endswith("%") or bound.startswith("-") for bound in (self.start, self.stop))

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """(first row, row behind the last one), counted from 0. Percents are rounded to the nearest row, as
        ``datasets`` does; what is beyond the end is cut."""
        start, stop = _place(self.start or "0", num_rows), _place(self.stop or str(num_rows), num_rows)
        return start, max(start, stop)


def parse_split(text: str) -> tuple[SplitSlice, ...]:
    """The slices of a split that are joined by ``+``, in their order. ValueError says what is wrong."""
    slices = []
    for piece in text.split("+"):
        match = _PIECE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(
                f"{piece.strip()!r} is no split: write a name, or a slice such as train[:20%], "
                "train[100:200] or train[-50:]"
            )
        slices.append(SplitSlice(match[1], match[2] or "", match[3] or ""))
    names = [part.name for part in slices]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ValueError(f"the split {twice} is named twice: write one slice of it, or two sources")
    return tuple(slices)


def _place(bound: str, num_rows: int) -> int:
    value = round(float(bound[:-1]) * num_rows / 100) if bound.endswith("%") else int(bound)
    return min(max(0, num_rows + value) if bound.startswith("-") else value, num_rows)
