"""Dimensions of vision tower and projector, from config.json and headers. No torch, no weight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from manyhands.facts.types import TowerFacts
from manyhands.families import Family, find

Shapes = Mapping[str, tuple[int, ...]]
TOWER_BLOCK = re.compile(r"\.(?:layers|layer|blocks|h)\.(\d+)\.(.+)$")
AUDIO = re.compile(r"(?:^|\.|_)audio")
# of families without a file: how projectors are usually called
USUAL_PROJECTOR = re.compile(r"(?:^|[._])(?:projector|connector|merger|aligner|embed_vision)(?:[._]|$)")
OWN_OF_MODEL = re.compile(r"^(?:model\.)?[a-z_]+$")  # a parameter of the whole, such as the end of an image's row


def part_of(name: str, family: Family) -> str:
    """``vision``, ``projector`` or ``audio``: where a tensor that is not the text's belongs, by its name."""
    if AUDIO.search(name):
        return "audio"
    if OWN_OF_MODEL.match(name):
        return "projector"
    bare = name.removeprefix("model.")
    for module in family.projectors:
        inner = module.removeprefix("model.")
        if bare == inner or bare.startswith(f"{inner}."):
            return "projector"
    return "projector" if not family.projectors and USUAL_PROJECTOR.search(name) else "vision"


def read_tower(config: Mapping[str, Any], shapes: Shapes) -> TowerFacts | None:
    """Vision tower and projector of a multimodal model, None where its files or its config.json have none.

    ``shapes`` are those of all tensors that are not the text's. What tensors show is taken from them, as many published
    vision configurations leave out what is their class's default.
    """
    family, vision = find(config), config.get("vision_config")
    parts: dict[str, dict[str, tuple[int, ...]]] = {"vision": {}, "projector": {}, "audio": {}}
    for name, shape in shapes.items():
        parts[part_of(name, family)][name] = shape
    if not isinstance(vision, dict) or not parts["vision"]:
        return None
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in parts["vision"].items():
        if found := TOWER_BLOCK.search(name):
            blocks.setdefault(f"{name[: found.start()]}.{found[1]}", {})[found[2]] = shape
    block = max(blocks.values(), key=lambda block: sum(map(math.prod, block.values())), default={})
    linears = {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in block.items() if len(shape) == 2}
    hidden = min(
        (min(shape) for shape in linears.values()), default=_size(vision, "embed_dim", "mm_embed_dim", "hidden_size")
    )
    patches = family.images is None or not family.images.kind.counts_patches
    side = _first(vision.get("image_size")) or 0
    patch = _first(vision.get("patch_size")) or _patch_in_files(parts["vision"]) or 14
    num_patches = max(1, side // patch) ** 2 if patches else 1
    tokens_per_unit = _tokens_per_unit(config, vision, num_patches, patches)
    if family.images is not None and family.images.kind.merges_before_tower:
        patch, tokens_per_unit = patch * (_size(vision, "pooling_kernel_size") or 3), 1.0
    further = _count_further(parts["projector"], family)
    return TowerFacts(
        num_parameters=sum(map(math.prod, parts["vision"].values())),
        num_projector_parameters=sum(map(math.prod, parts["projector"].values())),
        hidden_size=hidden,
        num_layers=len(blocks),
        num_heads=_size(vision, "num_attention_heads", "num_heads") or max(1, hidden // 64),
        num_block_parameters=sum(map(math.prod, block.values())),
        block_linear_shapes=linears,
        patches_per_unit=num_patches,
        unit_values=3 * side * side
        if patches
        else 3 * patch * patch * (_size(vision, "temporal_patch_size", "patch_temporal") or 1),
        tokens_per_unit=tokens_per_unit,
        bidirectional=family.images is not None and family.images.attends_both_ways(config),
        num_further=further,
        projector_values=_projector_values(config, family, hidden, num_patches, tokens_per_unit) * (1 + further),
        modules={
            part: _modules(parts[part], known)
            for part, known in {"vision": family.towers, "projector": family.projectors}.items()
        },
        shapes=parts["vision"] | parts["projector"],
    )


def _modules(shapes: Shapes, known: tuple[str, ...]) -> tuple[str, ...]:
    """The family's modules that hold these tensors, and parameters of the model; outermost ones if unknown."""
    bare = [name.removeprefix("model.") for name in shapes]
    own = tuple(f"model.{name}" for name in bare if "." not in name)
    found = tuple(
        module for module in known if any(f"{name}.".startswith(module.removeprefix("model.") + ".") for name in bare)
    )
    return (found or tuple(dict.fromkeys(f"model.{name.partition('.')[0]}" for name in bare if "." in name))) + own


def _tokens_per_unit(config: Mapping[str, Any], vision: Mapping[str, Any], patches: int, squares: bool) -> float:
    """Placeholders in the text for each unit, that is patch or square."""
    if not squares:
        merged = _size(vision, "spatial_merge_size", "pooling_kernel_size")
        return 1 / (merged or _size(config, "spatial_merge_size", "downsample_factor") or 2) ** 2
    if config.get("mm_tokens_per_image"):
        return float(config["mm_tokens_per_image"])
    for factor in ("scale_factor", "downsample_factor"):
        if config.get(factor):
            return float(patches / config[factor] ** 2)
    return patches * float(config.get("downsample_ratio") or vision.get("pixel_shuffle_ratio") or 1.0) ** 2


def _projector_values(
    config: Mapping[str, Any], family: Family, hidden: int, patches: int, tokens_per_unit: float
) -> float:
    """Of a unit: of each patch the tower's result, or those of several layers; averages where patches are averaged."""
    if family.images is None or family.images.inferred or not family.images.keeps_features:
        return 0.0
    layers = config.get("vision_feature_layer")
    pools = family.images.after_pooling or family.images.kind.pools_in_tower
    rows = tokens_per_unit if pools else patches
    return float(rows * hidden * (len(layers) if isinstance(layers, list) else 1))


def _count_further(shapes: Shapes, family: Family) -> int:
    """Projectors that stand in a list: each gives features for a further layer of the decoder."""
    modules = "|".join(re.escape(module.removeprefix("model.")) for module in family.projectors)
    found = (re.match(rf"(?:model\.)?((?:{modules})\.\d+)\.", name) for name in shapes) if modules else ()
    return len({match[1] for match in found if match})


def _patch_in_files(shapes: Shapes) -> int | None:
    """Side of a patch by the shape of the convolution that embeds it, (hidden, 3, [frames,] p, p)."""
    return next((shape[-1] for name, shape in shapes.items() if "patch" in name and len(shape) >= 4), None)


def _size(fields: Mapping[str, Any], *names: str) -> int:
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _first(value: Any) -> int | None:
    """A size given once, or for height and width."""
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int and value > 0 else None
