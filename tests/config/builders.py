"""The smallest run, for tests that are about one key."""

from __future__ import annotations

from typing import Any

from manyhands.config.schema import RunConfig


def minimal(**keys: Any) -> dict[str, Any]:
    """A valid nested mapping; ``batch__samples=3`` sets ``batch.samples``."""
    mapping: dict[str, Any] = {"name": "r", "model": {"name": "org/model"}, "data": {"train": "rows.jsonl"}}
    for path, value in keys.items():
        section, _, leaf = path.rpartition("__")
        (mapping.setdefault(section, {}) if section else mapping)[leaf] = value
    return mapping


def config(**keys: Any) -> RunConfig:
    return RunConfig.model_validate(minimal(**keys))
