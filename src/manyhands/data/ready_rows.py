"""Rows that bring their own tokens or texts with what is trained of them: no chat template, no token before or behind.

| format | fields (optional) | a sample |
|---|---|---|
| tokens | input_ids: list of ids; (see below) | these ids |
| segments | segments: list of {text, label: whether it is trained} | the ids of each text by itself, joined |

What a row of tokens may have besides, an entry for each token. A token is trained if all of the first two say so.

| field | is |
|---|---|
| labels | the token, or -100 where it is not trained |
| completion_mask, assistant_masks, loss_mask | 1 where the token is trained, else 0 |
| loss_weights | what the token's loss is multiplied by |
| attention_mask, position_ids, token_type_ids | ones; 0, 1, 2, ...; zeros: anything else is refused |
| special_tokens_mask | 0 or 1: says nothing about training |

``seq_lengths`` and ``length`` are the number of tokens; more documents than one are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.data.messages import RowRefused, check_weight
from manyhands.data.rendered import MAX_WEIGHT
from manyhands.data.streams import IGNORED

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
A_PACK = "a row is one document: divide this pack, and data.packing packs them again"


@dataclass(frozen=True)
class ReadyTokens:
    """``ids`` int64, ``trained`` bool and, where they are not all 1, ``weights`` float32, all (T)."""

    ids: np.ndarray
    trained: np.ndarray
    weight: float
    weights: np.ndarray | None = None


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
    trained = np.ones(len(ids), dtype=np.bool_)

    def read(name: str, read_list: Callable[[Any, str], np.ndarray]) -> np.ndarray | None:
        if (value := get(name)) is None:
            return None
        entries = read_list(value, name)
        if len(entries) != len(ids):
            raise RowRefused(f"{name} has {len(entries):,} entries, input_ids {len(ids):,}")
        return entries

    if (targets := read("labels", _read_integers)) is not None:
        trained &= targets != IGNORED
        if (wrong := np.flatnonzero(trained & (targets != ids))).size:
            raise RowRefused(
                f"label {wrong[0]} is {targets[wrong[0]]}, neither {IGNORED} nor the token {ids[wrong[0]]}"
            )
    for name in MASKS:
        if (mask := read(name, _read_mask)) is not None:
            trained &= mask
    weights = read("loss_weights", _read_weights)
    if (attention := read("attention_mask", _read_flags)) is not None and (attention != 1).any():
        raise RowRefused("attention_mask is not 1 for every token: leave padding out of input_ids")
    positions = read("position_ids", _read_integers)
    if positions is not None and (positions != np.arange(len(ids))).any():
        raise RowRefused(f"position_ids are not 0, 1, 2, ... to the end: {A_PACK}")
    if (types := read("token_type_ids", _read_flags)) is not None and types.any():
        raise RowRefused("token_type_ids are not all 0, and they would not be used: leave them out (data.ignore)")
    read("special_tokens_mask", _read_mask)
    for name in ("seq_lengths", "length"):
        if (value := get(name)) not in (None, len(ids), [len(ids)]):
            raise RowRefused(f"{name} is {value!r:.40}, and input_ids has {len(ids):,} entries: {A_PACK}")
    return ReadyTokens(ids, trained, weight, weights)


def _read_integers(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) is int and abs(item) < 1 << 31 for item in value):
        raise RowRefused(f"{name} must be a list of integers of 32 bits")
    return np.array(value, dtype=np.int64)


def _read_flags(value: Any, name: str) -> np.ndarray:
    """Integers, of which 0 and 1 may be false and true."""
    if isinstance(value, list):
        value = [int(item) if isinstance(item, bool) else item for item in value]
    return _read_integers(value, name)


def _read_mask(value: Any, name: str) -> np.ndarray:
    flags = _read_flags(value, name)
    if not np.isin(flags, (0, 1)).all():
        raise RowRefused(f"{name} must be 0 or 1 for each token")
    return flags == 1


def _read_weights(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) in (int, float) for item in value):
        raise RowRefused(f"{name} must be a list of numbers")
    return np.array([check_weight(item, f"entry {index} of {name}") for index, item in enumerate(value)], np.float64)


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
        if more := [name for name, value in part.items() if name not in ("text", "label") and value is not None]:
            raise RowRefused(f"segment {number} has {', '.join(map(str, more))}, which would not be used")
        parts.append((part["text"], part["label"]))
    return Segments(tuple(parts), weight)


def take_ids(content: Ready, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32; what is trained: bool, or the weight of each as float32) of a row. Raises RowRefused for ids that the
    tokenizer does not have, and for weights that are too large.
    """
    if isinstance(content, ReadyTokens):
        ids, weights = content.ids, content.trained
        if (outside := np.flatnonzero((ids < 0) | (ids >= len(tokenizer)))).size:
            raise RowRefused(
                f"input_ids holds {ids[outside[0]]} at place {outside[0]}, outside of the tokenizer's "
                f"{len(tokenizer):,} tokens"
            )
        if content.weights is not None:
            weights = content.trained * content.weights
    else:
        encoded = [(tokenizer.encode(text, add_special_tokens=False), label) for text, label in content.parts]
        ids = np.array([number for numbers, _ in encoded for number in numbers])
        weights = np.repeat([label for _, label in encoded], [len(numbers) for numbers, _ in encoded]).astype(np.bool_)
    if content.weight != 1:
        weights = weights * content.weight
    if weights.max(initial=0) > MAX_WEIGHT:
        raise RowRefused(f"a weight is larger than {MAX_WEIGHT:.3g}")
    return ids.astype(np.int32), weights if weights.dtype == np.bool_ else weights.astype(np.float32)
