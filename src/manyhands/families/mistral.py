"""Mistral, Mistral 3 with images around it, and LightOnOCR, which has its tower around Qwen 3."""

from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout, KnownModule
from manyhands.families.images import ImageShape, Sized


def _count_merged(image: ImageShape, processor: Mapping[str, Any]) -> tuple[int, int]:
    merge = processor["spatial_merge_size"]
    return image.grid[0] // merge, image.grid[1] // merge


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    rows, columns = _count_merged(image, processor)
    row = processor["image_token"] * columns
    return processor["image_break_token"].join([row] * rows) + processor["image_end_token"]


def _expand_plainly(image: ImageShape, processor: Mapping[str, Any]) -> str:
    rows, columns = _count_merged(image, processor)
    return processor["image_token"] * (rows * columns)


MISTRAL = Family(
    name="Mistral",
    model_types=("mistral",),
    sizes={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    known_modules=(
        KnownModule("attention", "MistralAttention", window_in_config=True),
        KnownModule("mlp", "MistralMLP"),
    ),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
MISTRAL3 = Family(
    name="Mistral 3",
    model_types=("mistral3",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        Sized(),
        _expand,
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        token_field="image_token_index",
        fields={"patch_size": 16, "spatial_merge_size": 1},
        keeps_features=False,
        arguments=lambda values: {"patch_size": values["patch_size"] * values["spatial_merge_size"]},
    ),
)
LIGHTON_OCR = Family(
    name="LightOnOCR",
    model_types=("lighton_ocr",),
    towers=("model.vision_encoder",),
    projectors=("model.vision_projection",),
    images=ImageLayout(
        Sized(),
        _expand_plainly,
        {"image_token": "<|image_pad|>"},
        fields={"patch_size": 14, "spatial_merge_size": 2},
        keeps_features=False,
    ),
)

FAMILIES = (MISTRAL, MISTRAL3, LIGHTON_OCR)
