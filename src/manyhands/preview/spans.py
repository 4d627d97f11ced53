"""Tokens back to text that a terminal and a page may show. Knows no store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from manyhands.preview.types import Span


def decode_spans(tokenizer: Any, ids: np.ndarray, weights: np.ndarray) -> Iterator[Span]:
    """Stretches of one weight of ``ids (T)`` int32, ``weights (T)`` float32, decoded each for itself, special tokens as
    they are spelt.
    """
    position = 0
    for weight, group in groupby(weights.tolist()):
        end = position + len(list(group))
        text = tokenizer.decode(
            ids[position:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield Span(harmless(text), weight)
        position = end


def harmless(text: str) -> str:
    """Text from data files with control characters made visible, so that none reaches the terminal (no escape
    codes).
    """
    return "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text.replace("\t", "    "))
