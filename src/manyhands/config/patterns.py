"""Selects modules and weights by name pattern; the plan counts with it and the converters apply it. Pure.

A regular expression may take exponential time or memory, and may come from somebody else's run file or adapter: both
are limited. The limit is CPU time, so that a busy machine refuses no pattern that an idle one accepts.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

import regex

from manyhands.core.errors import UserError

REGEX = "re:"
MAX_CHARACTERS = 10_000
MAX_REPEATS = 10_000  # the product of all counts: compiling expands {1000}{1000}
MAX_CPU_S = 5.0  # of one expression in one process, over all names
COUNTED_FROM_S = 0.01  # shorter matches are free
SLICE = re.compile(r"(?P<list>[\w.*]*\w)\[(?P<start>-?\d*):(?P<stop>-?\d*)\](?P<rest>(?:\..+)?)")


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module ``name``: its full name, the end of it after a dot, or a glob of either.

    After ``re:`` it is a regular expression for the full name, as PEFT reads a ``target_modules`` that is a string.
    UserError if that expression is invalid or takes too long.
    """
    if not pattern.startswith(REGEX):
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
    return _compile(pattern).matches(name)


# Embeddings and head, as models call them; in files, and in releases of transformers, the same ones have other names.
EMBEDDING_NAMES = ("embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings")
HEAD_NAMES = ("lm_head", "embed_out")


def reaches(parameter: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the parameter or a module that contains it: ``lm_head``, ``layers.0``, ``*_proj``."""
    parts = parameter.split(".")
    return any(matches(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def expand(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """The patterns that a slice of a list of modules stands for, as in Python: of ``names`` with 32 layers
    ``layers[-2:].mlp`` is ``model.layers.30.mlp`` and ``model.layers.31.mlp``. Any other pattern is itself.
    """
    found = SLICE.fullmatch(pattern)
    if found is None:
        return (pattern,)
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            if parts[end].isdecimal():
                holder = ".".join(parts[:end])
                counts[holder] = max(counts.get(holder, 0), int(parts[end]) + 1)
    start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    return tuple(
        f"{holder}.{index}{found['rest']}"
        for holder, count in counts.items()
        if matches(holder, found["list"])
        for index in range(count)[start:stop]
    )


class _Expression:
    """A regular expression and its remaining CPU time."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._left_s = pattern, MAX_CPU_S
        text = pattern.removeprefix(REGEX)
        try:
            re.compile(text)
            repeats = math.prod(
                max([1, *map(int, filter(None, counts))]) for counts in re.findall(r"\{(\d*),?(\d*)\}", text)
            )
            if len(text) > MAX_CHARACTERS or repeats > MAX_REPEATS:
                raise ValueError(f"it has {len(text):,} characters and repeats up to {repeats:,} times")
            self._compiled = regex.compile(text)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{_show(pattern)} is not a valid regular expression",
                why=str(error) or type(error).__name__,
                fix="correct it, or use a name or a glob pattern",
            ) from error

    def matches(self, name: str) -> bool:
        start = time.thread_time()
        try:
            found = self._compiled.fullmatch(name, timeout=self._left_s) if self._left_s > 0 else None
        except TimeoutError:
            found, self._left_s = None, 0.0
        spent = time.thread_time() - start
        if spent >= COUNTED_FROM_S:
            self._left_s -= spent
        if self._left_s <= 0:
            raise UserError(
                f"matching {_show(self._pattern)} takes too long",
                where=f"at the name {name}",
                why=(f"it has taken more than {MAX_CPU_S:g} s: nested repeats such as (a+)+ take exponential time"),
                fix="write it without nested repeats, or use names or a glob pattern",
            )
        return found is not None


def _show(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else pattern[:197] + "...")


_compile = lru_cache(maxsize=256)(_Expression)
