"""Idefics 3 and SmolVLM: images around Llama."""

from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout
from manyhands.families.images import PIXELS, ImageKind, ImageShape


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    features = processor["image_token"] * processor["image_seq_len"]
    around, (rows, columns) = processor["fake_image_token"], image.grid
    tiles = "".join(
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    newline = "\n" if rows or columns else ""
    return f"{tiles}{newline}{around}{processor['global_image_token']}{features}{around}"


class TilesOfOneSample(ImageKind):
    """Tiles are (1, tiles, 3, H, W) in the forward pass."""

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        return entries | {PIXELS: entries[PIXELS][None]}


IDEFICS3 = Family(
    name="Idefics 3",
    model_types=("idefics3", "smolvlm"),
    packs=True,
    towers=("model.vision_model",),
    projectors=("model.connector",),
    images=ImageLayout(
        TilesOfOneSample(),
        _expand,
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
        fields={"image_seq_len": 169},
        arguments=lambda _: {"return_row_col_info": True},
    ),
)

FAMILIES = (IDEFICS3,)
