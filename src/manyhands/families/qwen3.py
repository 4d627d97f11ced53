"""Qwen 3, and Qwen3-VL with images and video (positions of three axes in the text)."""

from dataclasses import replace

from manyhands.families.family import Experts, Family, KnownModule
from manyhands.families.qwen2 import QWEN_IMAGES

QWEN3 = Family(
    name="Qwen3",
    model_types=("qwen3",),
    head_dim=128,
    qk_norm="shared",
    mlp_bias=False,
    known_modules=(KnownModule("attention", "Qwen3Attention"), KnownModule("mlp", "Qwen3MLP")),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    head_dim=None,
    known_modules=(KnownModule("attention", "Qwen3MoeAttention"), KnownModule("mlp", "Qwen3MoeMLP")),
    peft_targets=(),
    packs=None,
    experts=Experts(),
)
QWEN3_VL_TEXT = Family(
    name="Qwen3-VL",
    model_types=("qwen3_vl_text",),
    head_dim=128,
    qk_norm="shared",
    mlp_bias=False,
    known_modules=(KnownModule("attention", "Qwen3VLTextAttention"), KnownModule("mlp", "Qwen3VLTextMLP")),
)
QWEN3_VL = Family(
    name="Qwen3-VL",
    model_types=("qwen3_vl",),
    text_model_type="qwen3_vl_text",
    towers=("model.visual",),
    projectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
    images=replace(QWEN_IMAGES, grid_inputs=("position_ids", "cu_seqlens", "interp_indices")),
)

QWEN3_VL_MOE_TEXT = replace(
    QWEN3_VL_TEXT,
    name="Qwen3-VL-MoE",
    model_types=("qwen3_vl_moe_text",),
    tied=True,
    head_dim=None,
    known_modules=(),
    experts=Experts(),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL, name="Qwen3-VL-MoE", model_types=("qwen3_vl_moe",), text_model_type="qwen3_vl_moe_text"
)

FAMILIES = (QWEN3, QWEN3_MOE, QWEN3_VL_TEXT, QWEN3_VL, QWEN3_VL_MOE_TEXT, QWEN3_VL_MOE)
