"""LLaVA 1.5, NeXT and OneVision: images around Llama, Mistral or Qwen 2."""

import math
from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout
from manyhands.families.images import AnyRes, ImageEntry, ImageKind, ImageShape


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    height, width = image.unit_size
    patch_size = processor["patch_size"]
    features = (height // patch_size) * (width // patch_size) + processor["num_additional_image_tokens"]
    return processor["image_token"] * (features - _first_left_out(processor))


def _first_left_out(processor: Mapping[str, Any]) -> int:
    """1 where the model takes no feature of the tower's first position."""
    return int(processor["vision_feature_select_strategy"] == "default")


def _expand_onevision(image: ImageShape, processor: Mapping[str, Any]) -> str:
    features = processor["num_image_tokens"]
    features += _count_onevision_tiles(image, processor) if image.alone else 1
    return processor["image_token"] * (features - _first_left_out(processor))


def _expand_next(image: ImageShape, processor: Mapping[str, Any]) -> str:
    height, width = (whole // processor["patch_size"] for whole in image.unit_size)
    rows, columns = _unpadded(image, (height, width), processor)
    features = height * width + processor["num_additional_image_tokens"] + rows * columns + rows
    return processor["image_token"] * (features - _first_left_out(processor))


def _unpadded(image: ImageShape, unit: tuple[int, int], processor: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the tiles' features together, of ``unit`` each, without the padding of the canvas."""
    (height, width), canvas = image.size, _choose_canvas(image.size, processor["image_grid_pinpoints"])
    rows, columns = (side * (whole // tile) for side, whole, tile in zip(unit, canvas, image.unit_size, strict=True))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def _count_onevision_tiles(image: ImageShape, processor: Mapping[str, Any]) -> int:
    """Features of the tiles, as ``LlavaOnevisionModel.pack_image_features`` leaves them: without the padding of the
    canvas, pooled where they are too many, and one more at the end of each row."""
    side = math.isqrt(processor["num_image_tokens"])
    rows, columns = _unpadded(image, (side, side), processor)
    max_tiles = int(processor["vision_aspect_ratio"].removeprefix("anyres_max_"))
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return rows * columns + rows


def _choose_canvas(size: tuple[int, int], canvases: list[list[int]]) -> tuple[int, int]:
    """The (height, width) that shows most of an image, and of those the smallest."""

    def rate(canvas: list[int]) -> tuple[int, int]:
        scale = min(canvas[1] / size[1], canvas[0] / size[0])
        shown = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return shown, shown - canvas[0] * canvas[1]

    best = max(canvases, key=rate)
    return best[0], best[1]


class CountedAnyRes(AnyRes):
    """The forward pass takes the number of images of each document: of several each is one square."""

    entries = (*AnyRes.entries, ImageEntry("batch_num_images", "document"))

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        shape, _ = ImageKind.smallest(self, config)
        return shape, {"image_sizes": [shape[-2:]], "batch_num_images": [2]}


LLAVA = Family(
    name="LLaVA",
    model_types=("llava",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        ImageKind(),
        _expand,
        {"image_token": "<image>"},
        token_field="image_token_index",
        fields={"patch_size": None, "num_additional_image_tokens": 0, "vision_feature_select_strategy": None},
    ),
)
LLAVA_NEXT = Family(
    name="LLaVA-NeXT",
    model_types=("llava_next", "llava_next_video"),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        AnyRes(),
        _expand_next,
        {"image_token": "<image>"},
        token_field="image_token_index",
        fields={"patch_size": None, "num_additional_image_tokens": 0, "vision_feature_select_strategy": None},
    ),
)
LLAVA_ONEVISION = Family(
    name="LLaVA-OneVision",
    model_types=("llava_onevision",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        CountedAnyRes(),
        _expand_onevision,
        {"image_token": "<image>"},
        token_field="image_token_index",
        fields={
            "num_image_tokens": None,
            "vision_feature_select_strategy": None,
            "vision_aspect_ratio": "anyres_max_9",
        },
    ),
)

FAMILIES = (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION)
