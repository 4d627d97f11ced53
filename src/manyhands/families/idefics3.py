"""Idefics 3 and SmolVLM: images around Llama."""

from manyhands.families.family import SQUARES, Family, ImageLayout

IDEFICS3 = Family(
    name="Idefics 3",
    model_types=("idefics3", "smolvlm"),
    packs=True,
    towers=("model.vision_model",),
    projectors=("model.connector",),
    images=ImageLayout("tiles", (SQUARES,)),  # the forward pass wants one more axis before: (1, tiles, 3, H, W)
)

FAMILIES = (IDEFICS3,)
