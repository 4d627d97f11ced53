"""EXAONE 4: norms behind attention and MLP, windows in most layers; and EXAONE 4.5 with images around it."""

from dataclasses import replace

from manyhands.families.family import Family
from manyhands.families.qwen2 import QWEN_IMAGES

EXAONE4 = Family(
    name="EXAONE 4",
    model_types=("exaone4",),
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm="shared",
)
EXAONE4_5 = Family(
    name="EXAONE 4.5",
    model_types=("exaone4_5",),
    text_model_type="exaone4",  # published as exaone4_5_text, which transformers takes for it
    towers=("model.visual",),
    projectors=("model.visual.merger",),
    images=replace(QWEN_IMAGES, mrope=False),
)

FAMILIES = (EXAONE4, EXAONE4_5)
