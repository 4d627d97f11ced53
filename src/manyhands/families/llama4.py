"""Llama 4: blocks of experts beside a shared one, attention within chunks, and layers without positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyhands.families.family import Config, Experts, Family, ImageLayout, Shapes
from manyhands.families.hybrids import attention, mlp, norms
from manyhands.families.images import ImageKind, ImageShape


def _block(config: Config, index: int, dense: bool) -> Shapes:
    width = config.get("intermediate_size_mlp") or 16_384
    feed = mlp(config, width, "feed_forward") if dense else {}
    outer = norms(config, "input_layernorm", "post_attention_layernorm")
    return attention(config, config.get("head_dim") or 128) | feed | outer


class Tiles(ImageKind):
    """The tiles of a grid, then the whole image where there are several. The model projects features in its own forward
    pass.
    """

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        rows, columns = (int(count) for count in made["aspect_ratios"][0])
        return replace(super().measure(made, size, values, alone), grid=(rows, columns))

    def encode(self, base: Any, inputs: Mapping[str, Any]) -> Any:
        found = base.get_image_features(**inputs, vision_feature_select_strategy=None, return_dict=True)
        found.pooler_output = base.multi_modal_projector(found.last_hidden_state)
        return found


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    rows, columns = image.grid
    patches = (side // processor["patch_size"] for side in image.unit_size)
    merged = round(1 / processor["pixel_shuffle_ratio"] ** 2)
    features = processor["patch"] * (next(patches) * next(patches) // merged)
    row = "<|tile_x_separator|>".join([features] * columns) + "<|tile_y_separator|>"
    tiles = row * rows if rows * columns > 1 else ""
    return f"<|image_start|>{tiles}{processor['placeholder']}{features}<|image_end|>"


LLAMA4_TEXT = Family(
    name="Llama 4",
    model_types=("llama4_text",),
    head_dim=128,
    block=_block,
    experts=Experts(
        "feed_forward",
        router="router.weight",
        inner="intermediate_size",
        shared="shared_expert",
        shared_inner="intermediate_size",
        transposed=True,
        weighs_inputs="Llama4TextExperts",
    ),
    why_unpacked="its chunks of attention, and the temperature of layers without positions, count tokens from the "
    "beginning of a row and not of a document",
)
LLAMA4 = Family(
    name="Llama 4",
    model_types=("llama4",),
    decoder="language_model.model",
    towers=("vision_model",),
    projectors=("multi_modal_projector",),
    images=ImageLayout(
        Tiles(),
        _expand,
        {"placeholder": "<|image|>", "patch": "<|patch|>"},
        placeholder="placeholder",
        token="patch",
        token_field="image_token_index",
        fields={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        keeps_features=False,
    ),
    packs=False,
)

FAMILIES = (LLAMA4_TEXT, LLAMA4)
