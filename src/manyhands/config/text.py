"""Values and names as messages show them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def show(value: Any) -> str:
    """A value in the run file's syntax, cut after 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    if isinstance(value, str) and text == f'"{value}"' and value:
        text = value
    return text if len(text) <= 60 else text[:57] + "..."


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelled one most likely means; None if none is similar."""
    close = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def names(text: str) -> frozenset[str]:
    """The words of ``text``: a set of keys."""
    return frozenset(text.split())


def at_line(key: str, origins: Mapping[str, str]) -> str:
    """Prefix of a finding that gives a key's line, such as ``line 3: ``; empty if the line is unknown."""
    return f"{origins[key]}: " if key in origins else ""
