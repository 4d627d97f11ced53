"""Images as patches: as many as the size of the image gives, each a vector, in a grid of (1, rows, columns)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from manyhands.families.images.kind import PIXELS, ImageEntry, ImageKind, ImageShape, Processor


class Patches(ImageKind):
    """A patch is one vector, in the order (channel, time, row, column)."""

    entries = (ImageEntry(PIXELS, "unit", (None,), "float32"), ImageEntry("image_grid_thw", "image", (3,)))
    counts_patches = True
    reorders_patches = True

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        """As the tower reads them: squares of ``merge_size`` x ``merge_size`` neighbors one after the other."""
        of = processor.own
        side, merge = of.patch_size, of.merge_size
        image = np.ascontiguousarray(pixels.transpose(2, 0, 1))
        if of.do_resize:
            size = of._standardize_kwargs(size=of.size, default_to_square=of.default_to_square)["size"]
            frames = {"temporal_factor": of.temporal_patch_size}  # of families that bound the pixels of all frames
            takes = inspect.signature(of.resize).parameters
            frames = {name: count for name, count in frames.items() if name in takes}
            image = of.resize(image, size=size, resample=of.resample, factor=side * merge, **frames)
        rows, columns = image.shape[1] // side, image.shape[2] // side
        parts = image.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        patches = parts.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, side, side)
        grid = np.array([[1, rows, columns]], dtype=np.int64)
        return {PIXELS: patches.astype(np.uint8, copy=False), "image_grid_thw": grid}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        rows, columns = (int(count) for count in made["image_grid_thw"][0][1:])
        side = int(values["patch_size"])
        return ImageShape(size, rows * columns, (side, side), (rows, columns), alone)

    def repeats(self, values: Mapping[str, Any]) -> int:
        """An image is a video of so many equal frames."""
        return int(values.get("temporal_patch_size", 1))

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        vision = config.vision_config
        merge = vision.spatial_merge_size
        size = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        return (merge**2, size), {"image_grid_thw": [[1, merge, merge]]}


class PatchRows(Patches):
    """A patch is (3, side, side), and patches lie row by row; the tower merges neighbors at its end."""

    entries = (ImageEntry(PIXELS, "unit", (3, None, None), "float32"), *Patches.entries[1:])

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        made, side = processor.run(pixels, alone), int(processor.values["patch_size"])
        grid, patches = (np.asarray(made[name]) for name in ("image_grid_thw", PIXELS))
        squares = patches.reshape(len(patches), -1, 3, side, side)[:, 0]  # where there are frames, they are alike
        return {PIXELS: np.ascontiguousarray(squares, dtype=np.uint8), "image_grid_thw": grid.astype(np.int64)}

    def repeats(self, values: Mapping[str, Any]) -> int:
        return 0

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        vision = config.vision_config
        merge = getattr(vision, "merge_size", None) or vision.merge_kernel_size[0]
        return (merge**2, 3, vision.patch_size, vision.patch_size), {"image_grid_thw": [[1, merge, merge]]}
