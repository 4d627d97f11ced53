"""Idefics 3 and SmolVLM: images around Llama."""

from manyhands.families.family import Family

IDEFICS3 = Family(
    name="Idefics 3",
    model_types=("idefics3", "smolvlm"),
    packs=True,
    towers=("model.vision_model",),
    projectors=("model.connector",),
)

FAMILIES = (IDEFICS3,)
