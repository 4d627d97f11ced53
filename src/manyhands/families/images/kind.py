"""What a kind of images decides, and the kind that most families have: squares of one size.

Preparation works with numpy arrays, the model with tensors, of which a kind uses methods alone: no torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

PIXELS = "pixel_values"  # the entry whose values are pixels


@dataclass(frozen=True)
class ImageEntry:
    """An input of the model's forward pass that images become. In a batch the items of all images of all documents are
    end to end: ``(items, *item_shape)``, None where checkpoint or image decide.
    """

    name: str  # the forward pass's own, unless a kind makes inputs of it (``ImageKind.inputs``)
    item: Literal["image", "unit", "document"]  # what one item is; a unit is a patch or a square (see ``ImageKind``)
    item_shape: tuple[int | None, ...] = ()
    dtype: str = "int64"


@dataclass(frozen=True)
class ImageShape:
    """What a family's image processor makes of an image; (height, width) throughout."""

    size: tuple[int, int]  # of the image
    units: int
    unit_size: tuple[int, int]
    grid: tuple[int, int] = (0, 0)  # of patches, or of tiles beside the whole image
    alone: bool = True  # no other image is in the sample


class Processor(Protocol):
    """What a kind uses of ``data.image_processor.ImageProcessor``."""

    own: Any  # transformers' image processor
    values: dict[str, Any]  # of the processors' files, by name

    def run(self, pixels: np.ndarray, alone: bool) -> dict[str, Any]:
        """The entries that ``own`` makes of one image (height, width, 3) uint8; pixels are whole numbers up to 255."""
        ...


@dataclass(frozen=True)
class ImageKind:
    """How images reach a model: as squares of one size, each an image, a crop or a tile, unless a subclass differs.

    A unit, in which the work of a tower is counted, is a square, or a patch where ``counts_patches``.
    """

    entries: ClassVar[tuple[ImageEntry, ...]] = (ImageEntry(PIXELS, "unit", (3, None, None), "float32"),)
    counts_patches = False
    depends_on_others = False  # an image is prepared in another way where its sample has several
    reads_sizes = False  # the forward pass reads sizes on the host, where their entries stay
    reorders_patches = False  # a tower may compute patches in an order of its own, and restores it at its end
    merges_before_tower = False  # a unit is a square of patches (``pooling_kernel_size``), which becomes one feature
    pools_in_tower = False  # what leaves a tower is as many rows as there are placeholders
    fails_on_one_token = False  # transformers' models drop the axis of an only token

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        """The entries of one image ``pixels (height, width, 3)`` uint8, by name; ``pixel_values`` uint8, (units, 3,
        H, W). ``alone``: no other image is in its sample.
        """
        return {PIXELS: stack_squares(processor.run(pixels, alone))}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        """The shape of an image of ``size``, of which ``Processor.run`` has ``made`` these entries."""
        squares = stack_squares(made)
        grid = (int(made["rows"][0][0]), int(made["cols"][0][0])) if "rows" in made else (0, 0)
        return ImageShape(size, len(squares), (squares.shape[-2], squares.shape[-1]), grid, alone)

    def repeats(self, values: Mapping[str, Any]) -> int:
        """How often each patch is repeated in time, as a vector; 0 where units stay (3, H, W)."""
        return 0

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What the forward pass takes, of a batch's ``entries`` as tensors."""
        return entries

    def encode(self, base: Any, inputs: Mapping[str, Any]) -> Any:
        """What ``get_image_features`` of the model ``base`` gives: its ``pooler_output`` is the features, end to end or
        one tensor an image.
        """
        return base.get_image_features(**inputs, return_dict=True)

    def decoder_inputs(self, decoder: Any, ids: Any, is_image: Any) -> dict[str, Any]:
        """What a text decoder computes of token ids (b, t) beside their embeddings; ``is_image`` (b, t): where features
        stand.
        """
        return {}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Of one small image: the shape of ``pixel_values``, and the values of other entries."""
        side = config.vision_config.image_size
        side = side[0] if isinstance(side, list | tuple) else side
        return (1, 3, side, side), {}

    def merge(self, base: Any, features: Any, rows: Sequence[int], entries: Mapping[str, Any]) -> Sequence[Any]:
        """Parts that end to end are the features (n, e) which the text gets, of those that leave the projector of the
        model ``base``: ``rows`` of them are of each image.
        """
        return [features.flatten(0, -2)]


def stack_squares(made: Mapping[str, Any]) -> np.ndarray:
    """The squares (n, 3, H, W) uint8 of the first sample, or image, of a processor's entries."""
    squares = made[PIXELS]
    squares = squares[0] if np.ndim(squares[0]) == 4 else squares
    return np.stack(list(squares)).astype(np.uint8)
