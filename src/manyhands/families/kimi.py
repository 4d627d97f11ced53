"""Kimi K2.5: images around DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from manyhands.families.family import Family, ImageLayout
from manyhands.families.images import PIXELS, ImageEntry, ImageShape, Patches
from manyhands.families.images.kind import Processor


class Rows(Patches):
    """Patches row by row, as squares (3, side, side); the tower merges neighbors at its end."""

    entries = (ImageEntry(PIXELS, "unit", (3, None, None), "float32"), *Patches.entries[1:])

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        made = processor.run(pixels, alone)
        grid = np.asarray(made["image_grid_thw"], dtype=np.int64)
        return {PIXELS: np.asarray(made[PIXELS]).astype(np.uint8), "image_grid_thw": grid}

    def repeats(self, values: Mapping[str, Any]) -> int:
        return 0

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        (rows, columns), side = config.vision_config.merge_kernel_size, config.vision_config.patch_size
        return (rows * columns, 3, side, side), {"image_grid_thw": [[1, rows, columns]]}


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    return processor["image_token"] * (image.units // processor["merge_size"] ** 2)


KIMI_K25 = Family(
    name="Kimi K2.5",
    model_types=("kimi_k25",),
    text_model_type="deepseek_v3",  # published as kimi_k2, which transformers takes for it
    towers=("model.vision_tower",),
    projectors=("model.mm_projector",),
    images=ImageLayout(Rows(), _expand, {"image_token": "<|media_pad|>"}, keeps_features=False),
)

FAMILIES = (KIMI_K25,)
