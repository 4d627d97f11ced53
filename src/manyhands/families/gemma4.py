"""Gemma 4: the text model, dense or with experts beside each MLP, and images and sound around it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.families.family import Config, Experts, Family, ImageLayout, Shapes, config_of_block
from manyhands.families.gemma2 import NORMS
from manyhands.families.hybrids import attention, mlp, norms
from manyhands.families.images import PIXELS, ImageShape, Sized
from manyhands.families.images.kind import Processor


def _block(config: Config, index: int, dense: bool) -> Shapes:
    """Layers of full attention have other heads. The last ones may take keys and values from those before."""
    last, kinds = config["num_hidden_layers"] - 1, config.get("layer_types")
    is_full = index == last or (kinds[index] == "full_attention" if kinds else (index + 1) % 6 == 0)
    own = dict(config) | {"attention_bias": config.get("attention_bias", False)}
    dim = config.get("head_dim") or 256
    if is_full:
        dim = config.get("global_head_dim") or 512
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    if config.get("per_layer_config") is not None:
        own |= config_of_block(config, index)
        dim = own.get("head_dim") or 256
    shapes = attention(own, dim)
    shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    shares = index >= config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    if shares:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("self_attn.k", "self_attn.v"))}
    elif is_full and config.get("attention_k_eq_v"):
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.v")}
    shapes |= mlp(
        config, config["intermediate_size"] * (1 + (shares and config.get("use_double_wide_mlp", False))), "mlp"
    )
    shapes |= norms(config, *NORMS)
    if width := config.get("hidden_size_per_layer_input", 256):
        hidden = config["hidden_size"]
        shapes |= {"per_layer_input_gate.weight": (width, hidden), "per_layer_projection.weight": (hidden, width)}
        shapes |= norms(config, "post_per_layer_input_norm")
    if not dense:
        more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        shapes |= norms(config, *more) | {"router.scale": (config["hidden_size"],)}
        shapes["router.per_expert_scale"] = (config["num_experts"],)
    return shapes


class Pooled(Sized):
    """Patches, of which squares of neighbors become one feature. The forward pass takes them row by row with their
    (column, row), images padded to the longest; ``image_sizes`` are in patches.
    """

    pools_in_tower = True
    fails_on_one_token = False

    def side(self, values: Mapping[str, Any]) -> int:
        """Pixels of a unit's side."""
        return int(values["patch_size"])

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        (patches, grid), side = _cut_off_padding(processor.run(pixels, alone)), self.side(processor.values)
        squares = patches.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        return {PIXELS: np.ascontiguousarray(squares, dtype=np.uint8), "image_sizes": np.array([grid])}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        (patches, grid), side = _cut_off_padding(made), self.side(values)
        return ImageShape(size, len(patches), (side, side), grid, alone)

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        patches, sizes = entries[PIXELS].permute(0, 2, 3, 1).flatten(1), entries["image_sizes"].tolist()
        longest = max((rows * columns for rows, columns in sizes), default=0)
        pixels = patches.new_zeros(len(sizes), longest, patches.shape[1])
        places = np.full((len(sizes), longest, 2), -1)
        begin = 0
        for image, (rows, columns) in enumerate(sizes):
            length = rows * columns
            pixels[image, :length] = patches[begin : begin + length]
            places[image, :length] = np.stack([np.tile(np.arange(columns), rows), np.arange(rows).repeat(columns)], 1)
            begin += length
        return {PIXELS: pixels, "image_position_ids": entries["image_sizes"].new_tensor(places).to(pixels.device)}

    def decoder_inputs(self, decoder: Any, ids: Any, is_image: Any) -> dict[str, Any]:
        """Embeddings of each layer's own, by ids; of images, those of padding."""
        if not decoder.config.hidden_size_per_layer_input:
            return {}
        ids = ids.masked_fill(is_image, decoder.config.pad_token_id)
        return {"per_layer_inputs": decoder.get_per_layer_inputs(ids, None)}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        pooled, side = config.vision_config.pooling_kernel_size, config.vision_config.patch_size
        return (pooled**2, 3, side, side), {"image_sizes": [[pooled, pooled]]}


class Merged(Pooled):
    """Squares of neighbors as one unit each, of which the tower makes one feature."""

    merges_before_tower = True

    def side(self, values: Mapping[str, Any]) -> int:
        return int(values["patch_size"] * values["pooling_kernel_size"])

    def decoder_inputs(self, decoder: Any, ids: Any, is_image: Any) -> dict[str, Any]:
        return {}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        side = config.vision_config.model_patch_size
        return (1, 3, side, side), {"image_sizes": [[1, 1]]}


def _cut_off_padding(made: Mapping[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    """Patches (n, values) of an only image, and their rows and columns."""
    (patches,), (places,) = made[PIXELS], np.asarray(made["image_position_ids"])
    patches, (columns, rows) = np.asarray(patches), (int(count) + 1 for count in places.max(0))
    return patches[: rows * columns], (rows, columns)


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    return _enclose(image.units // processor["pooling_kernel_size"] ** 2, processor)


def _enclose(num_features: int, processor: Mapping[str, Any]) -> str:
    return f"{processor['boi_token']}{processor['image_token'] * num_features}{processor['eoi_token']}"


GEMMA4_TEXT = Family(
    name="Gemma 4",
    model_types=("gemma4_text",),
    tied=True,
    head_dim=256,
    norms=NORMS,
    experts=Experts(parent="", router="router.proj.weight"),
    block=_block,
)
GEMMA4_IMAGES = ImageLayout(
    Pooled(),
    _expand,
    {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    bidirectional="use_bidirectional_attention",
    in_windows_alone=True,
)
GEMMA4 = Family(
    name="Gemma 4",
    model_types=("gemma4",),
    towers=("model.vision_tower", "model.audio_tower"),
    projectors=("model.embed_vision", "model.embed_audio"),
    images=GEMMA4_IMAGES,
)
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_types=("gemma4_unified_text",),
    experts=None,
    block=lambda config, index, dense: _block({**config, "hidden_size_per_layer_input": 0}, index, dense),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="Gemma 4 12B",
    model_types=("gemma4_unified",),
    towers=("model.embed_vision", "model.embed_audio"),
    projectors=("model.embed_vision.multimodal_embedder", "model.embed_audio"),
    images=replace(
        GEMMA4_IMAGES,
        kind=Merged(),
        expand=lambda image, processor: _enclose(image.units, processor),
        keeps_features=False,
    ),
)

FAMILIES = (GEMMA4_TEXT, GEMMA4, GEMMA4_UNIFIED_TEXT, GEMMA4_UNIFIED)
