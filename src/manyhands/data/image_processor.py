"""What a model's processor does with images: how many tokens each takes, and its pixels. Knows no rows and no store.

Sizes and pixels are those of the family's own image processor in transformers, by its PIL backend. It is asked for
whole numbers from 0 to 255 and does neither rescale nor normalize: prepared images are bytes, a quarter of the floats,
and ``table`` turns each byte into the float that the processor would have made of it, where the batch is used. Imports
transformers (which imports torch) only when an ``ImageProcessor`` is made.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.image_files import DECODING
from manyhands.families import Family, ImageLayout, ImageShape, find

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_SHAPES = 4096  # sizes of images that are remembered
NOT_ARGUMENTS = ("image_processor_type", "processor_class", "auto_map", "feature_extractor_type")
PIXELS = "pixel_values"  # the entry whose values are pixels
TRIED_SIZE = (336, 448)  # height and width in pixels of an image that every processor takes
NO_FLOATS = {"do_rescale": False, "do_normalize": False, "return_tensors": None}


def family_of(model_folder: str | Path) -> Family:
    """The family of the model in a folder, of a multimodal one that around its text."""
    return find(read_object(Path(model_folder) / "config.json"))


def processor_digest(model_folder: str | Path) -> str:
    """64 hex digits of all that decides about pixels and placeholders: the processor's files, backend and versions."""
    folder, digest = Path(model_folder), hashlib.sha256(f"pil {DECODING}".encode())
    for name in (*PROCESSOR_FILES, "config.json"):
        path = folder / name
        digest.update(f"\0{name}\0".encode() + (path.read_bytes() if path.is_file() else b""))
    digest.update(" ".join(f"{name} {version(name)}" for name in ("transformers", "pillow", "numpy")).encode())
    return digest.hexdigest()


def open_processor(model_folder: str | Path, layout: ImageLayout) -> ImageProcessor:
    """The processor of the model in a folder. Raises UserError where it cannot be used."""
    try:
        if layout.inferred:
            from manyhands.data.image_inferred import InferredProcessor

            processor: ImageProcessor = InferredProcessor(model_folder, layout)
        else:
            processor = ImageProcessor(model_folder, layout)
        processor.shape_of(TRIED_SIZE)
        return processor
    except UserError:
        raise
    except Exception as error:  # values that its class has taken as they are
        raise UserError(
            "the image processor cannot be used",
            where=str(model_folder),
            why=f"an image of {TRIED_SIZE[1]} x {TRIED_SIZE[0]} pixels ends in {type(error).__name__}: {error}",
            fix="compare the values of preprocessor_config.json with those of the original model",
        ) from error


class ImageProcessor:
    """The image processor of the model in a folder, whose family has the layout ``layout``.

    Raises UserError where it cannot be loaded, or does not say what ``layout`` needs.
    """

    def __init__(self, model_folder: str | Path, layout: ImageLayout) -> None:
        self.folder, self.layout = Path(model_folder), layout
        self._processor = _load(self.folder)
        self._shapes: OrderedDict[tuple[int, int, bool], ImageShape] = OrderedDict()
        told = read_object(self.folder / "processor_config.json")
        values = {name: told.get(name, default) for name, default in layout.fields.items()}
        if missing := [name for name, value in values.items() if value is None]:
            raise UserError(
                f"the model's processor does not say {' and '.join(missing)}",
                where=str(self.folder / "processor_config.json"),
                why="the number of tokens that an image takes follows from it",
                fix="add it to processor_config.json, as newer versions of the model have it",
            )
        own = ("merge_size", "patch_size", "temporal_patch_size", "image_grid_pinpoints")
        self.values = {name: getattr(self._processor, name) for name in own if hasattr(self._processor, name)} | values
        if not layout.inferred and not layout.counts_patches:
            self._refuse_own_sizes()

    def shape_of(self, size: tuple[int, int], alone: bool = True) -> ImageShape:
        """What becomes of an image of ``size`` (height, width). ValueError where the processor takes none such."""
        key = (*size, alone)
        shape = self._shapes.get(key)
        if shape is None:
            blank = np.zeros((*size, 3), dtype=np.uint8)
            shape = self._measure(size, alone, self._run(blank, alone))
            self._shapes[key] = shape
            if len(self._shapes) > MAX_SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return shape

    def prepare(self, pixels: np.ndarray, alone: bool = True) -> dict[str, np.ndarray]:
        """The entries of one image ``pixels (height, width, 3)`` uint8, by name; ``pixel_values`` uint8: patches
        ``(patches, 3, p, p)``, else squares ``(squares, 3, H, W)``. ``alone``: no other image is in its sample.
        """
        height, width = pixels.shape[:2]
        if self.layout.layout == "patches":
            patches, grid = self._cut_patches(pixels)
            return {PIXELS: patches, "image_grid_thw": np.array([[1, *grid]], dtype=np.int64)}
        entries = {PIXELS: self._run(pixels, alone)[PIXELS]}
        if self.layout.layout == "sizes":
            (whole,) = entries[PIXELS]
            return {PIXELS: cut(whole, int(self.values["patch_size"])), "image_sizes": np.array([whole.shape[1:]])}
        if self.layout.layout == "anyres":
            entries["image_sizes"] = np.array([[height, width]], dtype=np.int64)
        return entries

    @cached_property
    def table(self) -> np.ndarray:
        """float32 (3, 256): what the processor makes of each value of each channel."""
        image, of = np.tile(np.arange(256, dtype=np.uint8), (3, 1)).reshape(3, 1, 256), self._processor
        if of.do_rescale:
            image = of.rescale(image, of.rescale_factor)
        if of.do_normalize:
            image = of.normalize(image, of.image_mean, of.image_std)
        return np.ascontiguousarray(image.reshape(3, 256), dtype=np.float32)

    @property
    def repeats(self) -> int:
        """How often a patch is repeated in time: an image is a video of so many equal frames."""
        return int(self.values.get("temporal_patch_size", 1)) if self.layout.layout == "patches" else 1

    def words(self, tokenizer: Any) -> dict[str, str]:
        """The tokens of ``layout.words`` as the tokenizer has them."""
        return {name: getattr(tokenizer, name, None) or usual for name, usual in self.layout.words.items()}

    def expand(self, shape: ImageShape, words: Mapping[str, str]) -> str:
        """What stands in place of an image's placeholder; ``words`` are the tokens of ``layout.words``."""
        return self.layout.expand(shape, {**self.values, **words})

    def _refuse_own_sizes(self) -> None:
        """UserError where squares have the shape of their image: towers of one family may be of several kinds."""
        shapes = {self._run(np.zeros((*size, 3), np.uint8), True)[PIXELS].shape[-2:] for size in ((48, 64), (64, 48))}
        if len(shapes) > 1:
            config = read_object(self.folder / "config.json")
            raise UserError(
                "the model's processor keeps the shape of each image, and its family takes squares of one size",
                where=str(self.folder),
                why=f"its tower is {config.get('vision_config', {}).get('model_type')}",
                fix="use a model of the family with a tower that takes squares, or set data.images: false",
            )

    def _measure(self, size: tuple[int, int], alone: bool, made: Mapping[str, Any]) -> ImageShape:
        if self.layout.layout == "patches":
            rows, columns = (int(count) for count in made["image_grid_thw"][0][1:])
            side = int(self.values["patch_size"])
            return ImageShape(size, rows * columns, (side, side), (rows, columns), alone)
        squares = made[PIXELS]
        if self.layout.layout == "sizes":
            side = int(self.values["patch_size"])
            rows, columns = squares.shape[-2] // side, squares.shape[-1] // side
            return ImageShape(size, rows * columns, (side, side), (rows, columns), alone)
        grid = (int(made["rows"][0][0]), int(made["cols"][0][0])) if "rows" in made else (0, 0)
        return ImageShape(size, len(squares), (squares.shape[-2], squares.shape[-1]), grid, alone)

    def _run(self, pixels: np.ndarray, alone: bool) -> dict[str, Any]:
        """The processor's entries of one image; ``pixel_values`` are uint8 squares end to end."""
        from PIL import Image

        image = Image.fromarray(pixels)
        images: Any = [[image]] if self.layout.layout != "anyres" or alone else [[image, image]]
        made = dict(self._processor(images, **NO_FLOATS, **self.layout.arguments(self.values)))
        if self.layout.layout != "patches":
            squares = made[PIXELS]
            squares = squares[0] if np.ndim(squares[0]) == 4 else squares
            made[PIXELS] = np.stack(list(squares)).astype(np.uint8)
        return made

    def _cut_patches(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Patches (patches, 3, p, p) uint8 of an image as the tower reads them, squares of ``merge_size`` x
        ``merge_size`` neighbors one after the other; and the (rows, columns) of the grid."""
        of = self._processor
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
        return patches.astype(np.uint8, copy=False), (rows, columns)


def cut(image: np.ndarray, side: int) -> np.ndarray:
    """Patches (patches, 3, side, side) of an image (3, H, W), row by row."""
    rows, columns = image.shape[1] // side, image.shape[2] // side
    parts = image.reshape(3, rows, side, columns, side)
    return np.ascontiguousarray(parts.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side))


def _load(folder: Path) -> Any:
    from transformers.image_processing_base import ImageProcessingMixin

    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            "the model folder has no image processor",
            where=str(folder),
            why=f"neither {' nor '.join(PROCESSOR_FILES)} is there",
            fix="copy the processor's files into the model folder",
        )
    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(str(folder), local_files_only=True)
        return _find_class(
            values.get("image_processor_type"), str(read_object(folder / "config.json").get("model_type"))
        )(**{name: value for name, value in values.items() if name not in NOT_ARGUMENTS})
    except Exception as error:  # whatever the files hold: transformers raises many kinds
        raise UserError(
            "the image processor cannot be loaded", where=str(folder), why=f"{type(error).__name__}: {error}"
        ) from error


def _find_class(name: str | None, model_type: str) -> Any:
    """The image processor ``name``, or that of a model type, by its PIL backend. By its own module: where torchvision
    is not installed, ``AutoImageProcessor`` of transformers finds only some of those that do not need it."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as BY_TYPE

    wanted = f"{name.removesuffix('Fast')}Pil" if name else BY_TYPE[model_type]["pil"]
    for kind in (kind for kind, classes in BY_TYPE.items() if classes.get("pil") == wanted):
        home = kind.replace("-", "_")
        try:
            module = import_module(f"transformers.models.{home}.image_processing_pil_{home}")
        except ModuleNotFoundError:  # a model type that uses another's
            continue
        if hasattr(module, wanted):
            return getattr(module, wanted)
    raise ValueError(f"transformers has no {wanted}")
