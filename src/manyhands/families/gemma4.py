"""Gemma 4, with images and sound around it."""

from manyhands.families.family import Family

GEMMA4 = Family(
    name="Gemma 4",
    model_types=("gemma4",),
    towers=("model.vision_tower", "model.audio_tower"),
    projectors=("model.embed_vision", "model.embed_audio"),
)

FAMILIES = (GEMMA4,)
