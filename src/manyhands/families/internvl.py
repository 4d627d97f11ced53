"""InternVL 3: images around Qwen 2."""

from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout
from manyhands.families.images import ImageKind, ImageShape


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    features = processor["context_image_token"] * (processor["image_seq_length"] * image.units)
    return f"{processor['start_image_token']}{features}{processor['end_image_token']}"


INTERNVL = Family(
    name="InternVL",
    model_types=("internvl",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        ImageKind(),
        _expand,
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
        placeholder="context_image_token",
        token="context_image_token",
        fields={"image_seq_length": 256},
        arguments=lambda _: {"crop_to_patches": True},
    ),
)

FAMILIES = (INTERNVL,)
