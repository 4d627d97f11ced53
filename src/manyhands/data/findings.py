"""Faults found in the data, gathered so that the user sees many of them at once. Knows nothing of files or formats."""

from __future__ import annotations

import re

from manyhands.core.errors import UserError

MAX_SHOWN = 20


class Findings:
    """Counts faults and keeps the first 20 as ``file:line: reason``, in the order found. Travels between processes."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[str] = []
        self.stopped = ""  # the place that nothing was read after

    def add(self, file: str, line: int, reason: str, *, stops: bool = False) -> None:
        """``stops``: nothing of the file was read after it."""
        self.count += 1
        if stops and not self.stopped:
            self.stopped = f"{file}:{line}"
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"{file}:{line}: {reason}")

    def extend(self, other: Findings) -> None:
        """Takes in what was found in the part that follows."""
        self.count += other.count
        self.shown += other.shown[: MAX_SHOWN - len(self.shown)]
        self.stopped = self.stopped or other.stopped

    def raise_if_any(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        """Raises a UserError with every kept finding; ``{n}`` in ``what`` becomes the count."""
        if not self.count:
            return
        details = list(self.shown)
        if self.count > len(details):
            details.append(f"and {self.count - len(details):,} more")
        if self.stopped:
            details.append(f"nothing after {self.stopped} was read: there may be more faults")
        raise UserError(_count(what, self.count), where=where, why=why, fix=fix, details=details)


def _count(what: str, count: int) -> str:
    """``{n} rows are ...`` with its number: ``1 row is ...``."""
    if count == 1:
        what = re.sub(r"\{n\} (\w+)s( are)?\b", lambda found: f"1 {found[1]}" + " is" * bool(found[2]), what)
    return what.replace("{n}", f"{count:,}")
