"""InternVL 3: images around Qwen 2."""

from manyhands.families.family import Family

INTERNVL = Family(
    name="InternVL",
    model_types=("internvl",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
)

FAMILIES = (INTERNVL,)
