"""Qwen 2 and 2.5, and their models of images and video (positions of three axes in the text)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyhands.families.family import Experts, Family, ImageLayout, KnownModule
from manyhands.families.images import ImageShape, Patches


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    return processor["image_token"] * (image.units // processor["merge_size"] ** 2)


QWEN_IMAGES = ImageLayout(
    Patches(),
    _expand,
    {"image_token": "<|image_pad|>"},
    mrope=True,
    grid_inputs=("position_ids", "cu_seqlens", "window_index"),
)
QWEN2 = Family(
    name="Qwen2",
    model_types=("qwen2",),
    sizes={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    known_modules=(KnownModule("attention", "Qwen2Attention"), KnownModule("mlp", "Qwen2MLP")),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
QWEN2_MOE = Family(
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    known_modules=(KnownModule("attention", "Qwen2MoeAttention"), KnownModule("mlp", "Qwen2MoeMLP")),
    experts=Experts(
        shared="shared_expert", shared_inner="shared_expert_intermediate_size", shared_gate="shared_expert_gate"
    ),
)
QWEN2_VL_TEXT = Family(
    name="Qwen2-VL",
    model_types=("qwen2_vl_text",),
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    known_modules=(KnownModule("attention", "Qwen2VLAttention"), KnownModule("mlp", "Qwen2MLP")),
)
QWEN2_5_VL_TEXT = replace(
    QWEN2_VL_TEXT,
    name="Qwen2.5-VL",
    model_types=("qwen2_5_vl_text",),
    known_modules=(KnownModule("attention", "Qwen2_5_VLAttention"), KnownModule("mlp", "Qwen2MLP")),
)
QWEN2_VL = Family(
    name="Qwen2-VL",
    model_types=("qwen2_vl",),
    text_model_type="qwen2_vl_text",
    towers=("model.visual",),
    projectors=("model.visual.merger",),
    images=replace(QWEN_IMAGES, grid_inputs=("position_ids", "cu_seqlens")),
)
QWEN2_5_VL = Family(
    name="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    text_model_type="qwen2_5_vl_text",
    towers=("model.visual",),
    projectors=("model.visual.merger",),
    images=QWEN_IMAGES,
)

FAMILIES = (QWEN2, QWEN2_MOE, QWEN2_VL_TEXT, QWEN2_5_VL_TEXT, QWEN2_VL, QWEN2_5_VL)
