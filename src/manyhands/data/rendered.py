"""What becomes of a row: a text with weighted spans, in which images are put in place of their placeholders; then token
ids and what is trained of them. Pure: knows no template and no tokenizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from manyhands.data.bounds import Span
from manyhands.data.messages import RowRefused

MAX_WEIGHT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rendered:
    """One row of T tokens: ``ids`` int32 (T), ``trained`` bool (T), ``weights`` float32 (T).

    ``weights`` are 0 where nothing is trained, and None where every trained token weighs 1. ``num_straddling`` counts
    tokens that lie across the border of a trained span (untrained in conversations).
    """

    ids: np.ndarray
    trained: np.ndarray
    weights: np.ndarray | None = None
    num_straddling: int = 0


@dataclass(frozen=True)
class Text:
    """A row as text; ``spans`` of characters and the weight of each; ``rest`` is the weight of everything else but the
    spans ``images``, which are never trained."""

    text: str
    spans: tuple[Span, ...]
    weights: tuple[float, ...]
    rest: float = 0.0
    images: tuple[Span, ...] = ()


def put_images(text: Text, placeholder: str, images: Sequence[str]) -> Text:
    """The text with ``images[i]`` in place of its i-th ``placeholder``. Raises RowRefused where there are not as many
    of them."""
    parts = text.text.split(placeholder)
    if len(parts) != len(images) + 1:
        raise RowRefused(
            f"the chat template writes {len(parts) - 1} placeholders ({placeholder}) for {len(images)} images: it "
            "leaves some out, or the row's text holds the placeholder itself"
        )
    if not images:
        return text
    ends = list(accumulate(len(part) + len(placeholder) for part in parts[:-1]))  # of each placeholder
    grown = [0, *accumulate(len(image) - len(placeholder) for image in images)]

    def move(place: int) -> int:
        return place + grown[bisect_right(ends, place)]

    spans = tuple((move(start), move(end)) for start, end in text.spans)
    shown = tuple((move(end) - len(image), move(end)) for end, image in zip(ends, images, strict=True))
    joined = "".join(piece for pair in zip(parts, [*images, ""], strict=True) for piece in pair)
    return Text(joined, spans, text.weights, text.rest, shown)


def finish(ids: np.ndarray, weights: np.ndarray, num_straddling: int) -> Rendered:
    """``weights`` float32, or bool where all are 0 or 1. Raises RowRefused where no token is trained; the first one has
    nothing to be predicted from."""
    trained = weights if weights.dtype == np.bool_ else weights > 0
    if not trained[1:].any():
        raise RowRefused("no loss token")
    return Rendered(
        ids, trained, None if weights is trained or (weights[trained] == 1).all() else weights, num_straddling
    )
