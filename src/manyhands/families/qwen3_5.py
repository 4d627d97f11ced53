"""Qwen3-Next and Qwen 3.5: most layers are linear attention."""

from dataclasses import replace

from manyhands.families.family import Family
from manyhands.families.qwen2 import QWEN_IMAGES

QWEN3_5_TEXT = Family(
    name="Qwen3.5",
    model_types=("qwen3_5_text", "qwen3_next"),
    head_dim=256,
    packs=True,
    mixers=("Qwen3_5GatedDeltaNet", "Qwen3NextGatedDeltaNet"),
)
QWEN3_5 = Family(
    name="Qwen3.5",
    model_types=("qwen3_5",),
    packs=True,
    text_model_type="qwen3_5_text",
    towers=("model.visual",),
    projectors=("model.visual.merger",),
    images=replace(QWEN_IMAGES, grid_inputs=("position_ids", "cu_seqlens", "interp_indices"), keeps_features=False),
)

FAMILIES = (QWEN3_5_TEXT, QWEN3_5)
