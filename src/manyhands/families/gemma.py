"""Gemma 1, and PaliGemma around it, which reads its prompt in both directions."""

from manyhands.families.family import Family

GEMMA = Family(
    name="Gemma",
    model_types=("gemma",),
    tied=True,
    head_dim=256,
    mlp_bias=False,
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
PALIGEMMA = Family(
    name="PaliGemma",
    model_types=("paligemma",),
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
)

FAMILIES = (GEMMA, PALIGEMMA)
