"""What the host knows of a batch with images, worked out where it is collated, so that nobody asks the device for it:
where images stand among the tokens, and what a tower takes that follows from the grids of patches alone.

| name | |
|---|---|
| image_places | (n) int64: flat positions of the tokens that features take the place of; of samples of several \
documents (documents of each, n), where each document's are |
| image_rows_FIELD | where the tokens of an image see all of it: the fields of ``model/attention.py``'s ``ImageRows`` |
| image_position_ids, ... | inputs of the tower under transformers' own names (``transformers.vision_utils``) |

Pure numpy, but for the grids, which are handed to transformers' own functions.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.families import FAMILIES, ImageLayout

PLACES, ROWS = "image_places", "image_rows_"
# sizes and counts of images, which the host reads: they stay with it, while all other entries go to the device
HOST_ENTRIES = frozenset(
    entry.name
    for family in FAMILIES
    if family.images is not None
    for entry in family.images.entries
    if entry.item != "unit"
)
MAX_GRIDS = 64  # whose inputs are remembered, by each process: some hundred bytes a patch
# bounds that count up, from 0 for each image, and what the longest stretch between two is called
LONGEST = {"image_cu_seqlens": "image_max_seqlen", "image_cu_window_seqlens": "image_max_window_seqlen"}
GRID_ENTRIES = frozenset(
    f"image_{name}"
    for name in (
        *("position_ids", "interp_indices", "interp_weights", "window_index"),
        *("cu_seqlens", "max_seqlen", "cu_window_seqlens", "max_window_seqlen"),
    )
)
Arrays = dict[str, Any]


def place_images(
    batch: Mapping[str, Any], layout: ImageLayout, config: Mapping[str, Any], tower: Mapping[str, int]
) -> Arrays:
    """The entries of the table for a batch that has its tokens and images, of a model with this config.json.
    ``tower``: see ``tower_sizes``.
    """
    ids = batch["input_ids"]
    is_image, (num_rows, length) = ids == int(config[layout.token_field]), ids.shape
    placed: Arrays = {PLACES: np.flatnonzero(is_image)}
    if len(placed[PLACES]) and layout.attends_both_ways(config):
        bounds = batch.get("cu_seq_lens", np.arange(0, num_rows * length + 1, length))
        placed |= {f"{ROWS}{name}": value for name, value in find_rows(is_image, bounds).items()}
    if layout.grid_inputs:
        placed |= grid_inputs(layout.grid_inputs, batch["image_grid_thw"], tower)
    return placed


def divide_places(places: np.ndarray, starts: Sequence[int], num_documents: int) -> np.ndarray:
    """Flat places in documents that begin at ``starts``, ``num_documents`` of each sample with the same images, as
    (num_documents, n): those of all first documents, of all second ones, ...
    """
    documents = np.searchsorted(np.asarray(starts), places, side="right") - 1
    return np.stack([places[documents % num_documents == number] for number in range(num_documents)])


def find_rows(is_image: np.ndarray, bounds: np.ndarray) -> Arrays:
    """Runs of image tokens (positions) in documents that begin at ``bounds``, by the names of ``ImageRows``."""
    flat = is_image.reshape(-1)
    bounds = np.unique(bounds.astype(np.int64))
    begins = np.zeros(len(flat) + 1, dtype=bool)
    begins[bounds] = True
    before, after = np.append(False, flat[:-1]), np.append(flat[1:], False) & ~begins[1:]
    starts = np.flatnonzero(flat & (~before | begins[:-1]))  # (images)
    ends = np.flatnonzero(flat & ~after) + 1
    documents = bounds[np.searchsorted(bounds, starts, side="right") - 1]  # where the image's document begins
    num_queries, num_keys = ends - starts, ends - documents
    queries, ids = np.flatnonzero(flat), np.full(len(flat), -1, dtype=np.int64)
    ids[queries] = np.repeat(np.arange(len(starts)), num_queries)
    cu_queries, cu_keys = (np.append(0, np.cumsum(count)) for count in (num_queries, num_keys))
    keys = np.arange(cu_keys[-1]) + np.repeat(documents - cu_keys[:-1], num_keys)
    return {
        "ids": ids,
        "longest": int(num_queries.max(initial=0)),
        "queries": queries,
        "keys": keys,
        "cu_queries": cu_queries.astype(np.int32),
        "cu_keys": cu_keys.astype(np.int32),
    }


def grid_inputs(names: Sequence[str], grids: np.ndarray, tower: Mapping[str, int]) -> Arrays:
    """What a tower takes under ``names`` of ``families.ImageLayout.grid_inputs`` for images of ``grids`` (images, 3):
    patches in time, rows and columns. ``tower``: of its configuration, see ``_inputs_of_grid``. {} without images.
    """
    known = tuple(sorted(tower.items()))
    each = [_inputs_of_grid(tuple(names), tuple(grid), known) for grid in grids.tolist()]
    if not each:
        return {}
    joined: Arrays = {}
    for name in each[0]:
        parts = [inputs[name] for inputs in each]
        if name in LONGEST:
            before = np.cumsum([0, *(part[-1] for part in parts)])
            parts = [np.zeros(1, np.int64), *(part[1:] + begin for part, begin in zip(parts, before, strict=False))]
            joined[name] = np.concatenate(parts).astype(np.int32)
            joined[LONGEST[name]] = int(np.diff(joined[name]).max())
            continue
        if name == "image_window_index":  # of merged patches
            before = np.cumsum([0, *map(len, parts)])
            parts = [part + begin for part, begin in zip(parts, before, strict=False)]
        joined[name] = np.concatenate(parts)
    return joined


@lru_cache(maxsize=MAX_GRIDS)
def _inputs_of_grid(
    names: tuple[str, ...], grid: tuple[int, ...], known: tuple[tuple[str, int], ...]
) -> dict[str, np.ndarray]:
    """Of one image. ``known``: ``spatial_merge_size``, ``patch_size``, ``window_size``, ``num_position_embeddings``."""
    import torch
    from transformers import vision_utils

    tower, thw = dict(known), torch.tensor([grid])
    merge, found = tower["spatial_merge_size"], {}
    if "position_ids" in names:
        found["image_position_ids"] = vision_utils.get_vision_position_ids(thw, merge)
    if "cu_seqlens" in names:
        found["image_cu_seqlens"] = vision_utils.get_vision_cu_seqlens(thw)
    if "window_index" in names:
        found["image_window_index"], found["image_cu_window_seqlens"] = vision_utils.get_vision_window_index(
            thw, merge, tower["window_size"], tower["patch_size"]
        )
    if "interp_indices" in names:
        found["image_interp_indices"], found["image_interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                thw, int(tower["num_position_embeddings"] ** 0.5), align_corners=True, spatial_merge_size=merge
            )
        )
    return {name: values.numpy() for name, values in found.items()}


def read_tower_sizes(model_folder: str | Path) -> dict[str, int]:
    """Whole numbers of the tower's configuration, with what config.json leaves out."""
    from transformers import AutoConfig

    return tower_sizes(AutoConfig.from_pretrained(model_folder, local_files_only=True).vision_config)


def tower_sizes(vision: Any) -> dict[str, int]:
    """Of the vision configuration, as ``grid_inputs`` takes them."""
    sizes = ("spatial_merge_size", "patch_size", "window_size", "num_position_embeddings")
    return {name: getattr(vision, name) for name in sizes if type(getattr(vision, name, None)) is int}
