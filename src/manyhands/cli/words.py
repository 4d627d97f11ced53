"""Numbers and progress as a terminal should show them."""

from __future__ import annotations

import sys


def report_aside(text: str) -> None:
    """Progress goes to standard error, so that standard output holds the answer alone."""
    print(text, file=sys.stderr)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
