"""Images as squares of one size, the text part taking the size of the image before it was divided into them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manyhands.families.images.kind import ImageEntry, ImageKind, Processor


class AnyRes(ImageKind):
    """The image as one square, then its tiles; the text part drops what tiles are padded with, by the image's size."""

    entries = (*ImageKind.entries, ImageEntry("image_sizes", "image", (2,)))
    depends_on_others = True
    reads_sizes = True

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        sizes = np.array([pixels.shape[:2]], dtype=np.int64)
        return super().prepare(processor, pixels, alone) | {"image_sizes": sizes}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        """As large as the smallest canvas: one square and its tiles."""
        (_, _, side, _), _ = super().smallest(config)
        height, width = min(config.image_grid_pinpoints, key=math.prod)
        return (1 + (height // side) * (width // side), 3, side, side), {"image_sizes": [[height, width]]}

    def merge(self, base: Any, features: Any, rows: Sequence[int], entries: Mapping[str, Any]) -> Sequence[Any]:
        pack, config = base.pack_image_features, base.config
        ways = ("vision_aspect_ratio", "vision_feature_select_strategy")  # of which a family takes one
        chosen = {name: getattr(config, name) for name in ways if name in inspect.signature(pack).parameters}
        squares = features.split(list(rows))
        packed, _ = pack(squares, entries["image_sizes"], image_newline=base.image_newline, **chosen)
        return list(packed)
