"""Packages that only some runs need."""

from __future__ import annotations

import importlib.util

from manyhands.core.errors import UserError


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed; it is not imported."""
    return importlib.util.find_spec("deepspeed") is not None


def missing_deepspeed(why: str = "the package deepspeed is not installed") -> UserError:
    """What is said where a strategy needs it and it is not there."""
    return UserError(
        "parallel.strategy: zero1, zero2 and zero3 need DeepSpeed",
        where="parallel.strategy",
        why=why,
        fix="pip install 'manyhands[deepspeed]', or use parallel.strategy=fsdp, which shards what zero3 shards",
    )


def require_extras(strategy: str) -> None:
    """UserError where a run's strategy needs a package that is not installed."""
    if strategy.startswith("zero") and not has_deepspeed():
        raise missing_deepspeed()
