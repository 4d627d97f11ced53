"""LFM2, dense and with experts: most layers are short convolutions; and LFM2-VL with images around it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.families.family import CONVOLUTION, Config, Experts, Family, ImageLayout, Shapes
from manyhands.families.hybrids import attention, has_attention, mlp, norms
from manyhands.families.images import PIXELS, ImageEntry, ImageKind, ImageShape
from manyhands.families.images.kind import Processor


def _block(config: Config, index: int, dense: bool) -> Shapes:
    hidden = config["hidden_size"]
    dim = hidden // config["num_attention_heads"]
    mixer: Shapes
    if has_attention(config, index):
        own: Shapes = {f"self_attn.{name}.weight": (dim,) for name in ("q_layernorm", "k_layernorm")}
        mixer = attention(config, dim, out="out_proj") | own
    else:
        mixer = {"conv.conv.weight": (hidden, 1, config.get("conv_L_cache") or 3)}
        mixer |= {"conv.in_proj.weight": (3 * hidden, hidden), "conv.out_proj.weight": (hidden, hidden)}
        if config.get("conv_bias"):
            mixer |= {f"conv.{name}.bias": (hidden,) for name in ("conv", "out_proj")}
            mixer["conv.in_proj.bias"] = (3 * hidden,)
    feed = mlp(config, _inner(config), "feed_forward", ("w1", "w3", "w2")) if dense else {}
    return mixer | feed | norms(config, "operator_norm", "ffn_norm")


def _inner(config: Config) -> int:
    """Of the dense type two thirds of what config.json says, rounded up to a multiple."""
    inner: int = config["intermediate_size"]
    if config["model_type"] != "lfm2" or not config.get("block_auto_adjust_ff_dim", True):
        return inner
    multiple = config.get("block_multiple_of") or 256
    inner = int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
    return multiple * -(-inner // multiple)


class Crops(ImageKind):
    """Patches of an image's crops: of all tiles, each alike, and of the whole; or of the whole alone. The forward pass
    takes those of a crop row by row, padded to the largest; ``spatial_shapes`` are rows and columns of each crop.
    """

    entries = (*ImageKind.entries, ImageEntry("spatial_shapes", "image", (2,)))
    counts_patches = True
    reads_sizes = True

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        made, side = processor.run(pixels, alone), int(processor.values["encoder_patch_size"])
        shapes = np.asarray(made["spatial_shapes"], dtype=np.int64)
        crops = zip(made[PIXELS], shapes.prod(1), strict=True)
        patches = np.concatenate([np.asarray(crop)[:count] for crop, count in crops])
        squares = patches.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        return {PIXELS: np.ascontiguousarray(squares, dtype=np.uint8), "spatial_shapes": shapes}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        side, units = int(values["encoder_patch_size"]), int(np.asarray(made["spatial_shapes"]).prod(1).sum())
        return ImageShape(size, units, (side, side), (int(made["image_rows"][0]), int(made["image_cols"][0])), alone)

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        patches, shapes = entries[PIXELS].permute(0, 2, 3, 1).flatten(1), entries["spatial_shapes"]
        counts = [rows * columns for rows, columns in shapes.tolist()]
        pixels = patches.new_zeros(len(counts), max(counts, default=0), patches.shape[1])
        is_patch = patches.new_zeros(pixels.shape[:2], dtype=shapes.dtype)
        for crop, (count, part) in enumerate(zip(counts, patches.split(counts), strict=True)):
            pixels[crop, :count], is_patch[crop, :count] = part, 1
        return {PIXELS: pixels, "spatial_shapes": shapes, "pixel_attention_mask": is_patch}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        merged, side = config.downsample_factor, config.vision_config.patch_size
        return (merged**2, 3, side, side), {"spatial_shapes": [[merged, merged]]}


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    (rows, columns), merged = image.grid, processor["downsample_factor"] ** 2
    token, parts, left = processor["image_token"], [], image.units
    if rows * columns > 1:
        patches = (processor["tile_size"] // processor["encoder_patch_size"]) ** 2
        places = ((row + 1, column + 1) for row in range(rows) for column in range(columns))
        parts = [f"<|img_row_{row}_col_{column}|>{token * (patches // merged)}" for row, column in places]
        left -= rows * columns * patches
        parts += [processor["image_thumbnail_token"]] if left else []
    return "".join([processor["image_start_token"], *parts, token * (left // merged), processor["image_end_token"]])


LFM2 = Family(
    name="LFM2",
    model_types=("lfm2",),
    tied=True,
    block=_block,
    packs=True,
    mixers=("Lfm2ShortConv",),
    packages=("causal_conv1d",),
    kernels=(CONVOLUTION,),
)
LFM2_MOE = replace(
    LFM2,
    name="LFM2 MoE",
    model_types=("lfm2_moe",),
    mixers=("Lfm2MoeShortConv",),
    experts=Experts("feed_forward"),
)
LFM2_VL = Family(
    name="LFM2-VL",
    model_types=("lfm2_vl",),
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout(
        Crops(),
        _expand,
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        keeps_features=False,
        arguments=lambda _: {"return_row_col_info": True},
    ),
)

FAMILIES = (LFM2, LFM2_MOE, LFM2_VL)
