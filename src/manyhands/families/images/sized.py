"""Images that keep their own size: patches row by row in a batch, images again in the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from manyhands.families.images.kind import PIXELS, ImageEntry, ImageKind, ImageShape, Processor, stack_squares


class Sized(ImageKind):
    """The forward pass takes images, padded to the largest, and their sizes."""

    entries = (*ImageKind.entries, ImageEntry("image_sizes", "image", (2,)))
    counts_patches = True
    reads_sizes = True
    fails_on_one_token = True

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        (image,) = stack_squares(processor.run(pixels, alone))
        return {PIXELS: cut(image, int(processor.values["patch_size"])), "image_sizes": np.array([image.shape[1:]])}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        (image,), side = stack_squares(made), int(values["patch_size"])
        rows, columns = image.shape[1] // side, image.shape[2] // side
        return ImageShape(size, rows * columns, (side, side), (rows, columns), alone)

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        return entries | {PIXELS: join(entries[PIXELS], entries["image_sizes"])}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Two tokens wide: transformers' model drops the axis of an only one."""
        merge, patch = getattr(config, "spatial_merge_size", 1), config.vision_config.patch_size
        return (2 * merge**2, 3, patch, patch), {"image_sizes": [[merge * patch, 2 * merge * patch]]}


def cut(image: np.ndarray, side: int) -> np.ndarray:
    """Patches (patches, 3, side, side) of an image (3, H, W), row by row."""
    rows, columns = image.shape[1] // side, image.shape[2] // side
    parts = image.reshape(3, rows, side, columns, side)
    return np.ascontiguousarray(parts.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side))


def join(patches: Any, sizes: Any) -> Any:
    """Images (images, 3, H, W), padded with zeros to the largest, of their patches (n, 3, p, p), row by row, and
    their ``sizes`` (images, 2): tensors."""
    listed, side = sizes.tolist(), patches.shape[-1]
    joined = patches.new_zeros(len(listed), 3, max(height for height, _ in listed), max(width for _, width in listed))
    begin = 0
    for image, (height, width) in zip(joined, listed, strict=True):
        rows, columns = height // side, width // side
        part = patches[begin : begin + rows * columns].view(rows, columns, 3, side, side)
        image[:, :height, :width] = part.permute(2, 0, 3, 1, 4).reshape(3, height, width)
        begin += rows * columns
    return joined
