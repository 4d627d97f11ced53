"""Rows that bring their own tokens or texts with what is trained of them: no chat template, no token before or behind.

| format | fields (optional) | a sample |
|---|---|---|
| tokens | input_ids: list of ids; (labels: -100 where not trained, attention_mask: ones) | these ids |
| segments | segments: list of {text, label: whether it is trained} | the ids of each text by itself, joined |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.data.messages import RowRefused
from manyhands.data.streams import IGNORED


@dataclass(frozen=True)
class ReadyTokens:
    """``ids`` int64 and ``trained`` bool, both (T)."""

    ids: np.ndarray
    trained: np.ndarray
    weight: float


@dataclass(frozen=True)
class Segments:
    """(text, whether it is trained) of each."""

    parts: tuple[tuple[str, bool], ...]
    weight: float


Ready = ReadyTokens | Segments


def read_ready(format: str, get: Callable[[str], Any], weight: float) -> Ready:
    """A row of the format ``tokens`` or ``segments``; ``get`` gives its fields. Raises RowRefused."""
    return _read_tokens(get, weight) if format == "tokens" else _read_segments(get("segments"), weight)


def _read_tokens(get: Callable[[str], Any], weight: float) -> ReadyTokens:
    ids = _read_integers(get("input_ids"), "input_ids")
    labels, attention = get("labels"), get("attention_mask")
    trained = np.ones(len(ids), dtype=np.bool_)
    if labels is not None:
        targets = _read_integers(labels, "labels")
        if len(targets) != len(ids):
            raise RowRefused(f"labels has {len(targets):,} entries, input_ids {len(ids):,}")
        trained = targets != IGNORED
        if (wrong := np.flatnonzero(trained & (targets != ids))).size:
            raise RowRefused(
                f"label {wrong[0]} is {targets[wrong[0]]}, neither {IGNORED} nor the token {ids[wrong[0]]}"
            )
    if isinstance(attention, list):
        attention = [int(item) if isinstance(item, bool) else item for item in attention]
    if attention is not None and _read_integers(attention, "attention_mask").tolist() != [1] * len(ids):
        raise RowRefused("attention_mask is not 1 for every token: leave padding out of input_ids")
    return ReadyTokens(ids, trained, weight)


def _read_integers(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) is int and abs(item) < 1 << 31 for item in value):
        raise RowRefused(f"{name} must be a list of integers of 32 bits")
    return np.array(value, dtype=np.int64)


def _read_segments(value: Any, weight: float) -> Segments:
    parts = []
    for number, part in enumerate(value if isinstance(value, list) else [None], start=1):
        if (
            not isinstance(part, Mapping)
            or not isinstance(part.get("text"), str)
            or not isinstance(part.get("label"), bool)
        ):
            raise RowRefused(
                f"segments must be a list of {{text: string, label: true or false}}, not so number {number}"
            )
        parts.append((part["text"], part["label"]))
    return Segments(tuple(parts), weight)


def take_ids(content: Ready, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, trained bool) of a row. Raises RowRefused for ids that the tokenizer does not have."""
    if isinstance(content, ReadyTokens):
        if len(content.ids) and not 0 <= content.ids.min() <= content.ids.max() < len(tokenizer):
            raise RowRefused(f"input_ids holds ids outside of the tokenizer's {len(tokenizer):,} tokens")
        return content.ids.astype(np.int32), content.trained
    encoded = [(tokenizer.encode(text, add_special_tokens=False), label) for text, label in content.parts]
    ids = np.array([number for numbers, _ in encoded for number in numbers], dtype=np.int32)
    return ids, np.repeat([label for _, label in encoded], [len(numbers) for numbers, _ in encoded]).astype(np.bool_)
