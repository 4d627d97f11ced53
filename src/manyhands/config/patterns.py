"""Names of modules and weights by pattern, the same for the plan, which counts, and for the model, which is changed. Pure."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from manyhands.errors import UserError

REGEX = "re:"


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` means the module ``name``: its full name, the end of it after a dot, or a glob of either.

    After ``re:`` it is a regular expression for the full name from beginning to end, as PEFT reads a ``target_modules`` that
    is a string. UserError if that expression is broken.
    """
    if not pattern.startswith(REGEX):
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
    try:
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    except re.error as error:
        raise UserError(
            f"{pattern!r} is no regular expression", why=str(error), fix="mend it, or write a name or a glob pattern"
        ) from error


def reaches(parameter: str, pattern: str) -> bool:
    """Whether ``pattern`` means the parameter of that name, or a module that holds it: ``lm_head``, ``layers.0``, ``*_proj``."""
    parts = parameter.split(".")
    return any(matches(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
