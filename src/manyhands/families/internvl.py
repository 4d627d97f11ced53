"""InternVL 3: images around Qwen 2."""

from manyhands.families.family import SQUARES, Family, ImageLayout

INTERNVL = Family(
    name="InternVL",
    model_types=("internvl",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout("tiles", (SQUARES,)),
)

FAMILIES = (INTERNVL,)
