"""What a model's processor does with images: how many tokens each takes, and its pixels. Knows no rows and no store.

Sizes and pixels are those of the family's own image processor in transformers, by its PIL backend, or by torchvision
where it has no other. It is asked for whole numbers from 0 to 255 and does neither rescale nor normalize: prepared
images are bytes, a quarter of the floats, and ``table`` turns each byte into the float that the processor would have
made of it, where the batch is used. Imports transformers (which imports torch) only when an ``ImageProcessor`` is made.
"""

import hashlib
import importlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.images.files import DECODING
from manyhands.families import Family, ImageLayout, find, installed_version
from manyhands.families.images import ImageShape, stack_squares

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_SHAPES = 4096  # sizes of images that are remembered
NOT_ARGUMENTS = ("image_processor_type", "processor_class", "auto_map", "feature_extractor_type")
NO_FLOATS = {"do_rescale": False, "do_normalize": False, "return_tensors": None}


def family_of(model_folder: str | Path) -> Family:
    """The family of the model in a folder, of a multimodal one that around its text."""
    return find(read_object(Path(model_folder) / "config.json"))


def processor_digest(model_folder: str | Path) -> str:
    """64 hex digits of all that decides about pixels and placeholders: the processor's files, backend and versions."""
    digest = hashlib.sha256(f"pil {DECODING}".encode())
    update_by_files(digest, Path(model_folder), (*PROCESSOR_FILES, "config.json"))
    return digest.hexdigest()


def update_by_files(digest: Any, folder: Path, names: Iterable[str]) -> None:
    """Hashes files of a folder, one that is not there as empty, and the versions of the libraries that read them."""
    for name in names:
        path = folder / name
        digest.update(f"\0{name}\0".encode() + (path.read_bytes() if path.is_file() else b""))
    libraries = ("transformers", "pillow", "numpy", *(["torchvision"] if installed_version("torchvision") else []))
    digest.update(" ".join(f"{name} {version(name)}" for name in libraries).encode())


class ImageProcessor:
    """The image processor of a model folder for ``layout``. UserError where it does not load or lacks something."""

    def __init__(self, model_folder: str | Path, layout: ImageLayout) -> None:
        self.folder, self.layout = Path(model_folder), layout
        self.own = _load(self.folder)
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
        own = (
            *("merge_size", "patch_size", "temporal_patch_size", "image_grid_pinpoints", "pooling_kernel_size"),
            *("encoder_patch_size", "downsample_factor", "tile_size"),
        )
        self.values = {name: getattr(self.own, name) for name in own if hasattr(self.own, name)} | values
        if not layout.inferred and not layout.kind.counts_patches:
            blanks = (np.zeros((*size, 3), np.uint8) for size in ((48, 64), (64, 48)))
            shapes = {stack_squares(self.run(blank, True)).shape[-2:] for blank in blanks}
            if len(shapes) > 1:
                config = read_object(self.folder / "config.json")
                raise UserError(
                    "the model's processor keeps the shape of each image, and its family takes squares of one size",
                    where=str(self.folder),
                    why=f"its tower is {config.get('vision_config', {}).get('model_type')}",
                    fix="use a model of the family with a tower that takes squares, or set data.images: false",
                )

    def shape_of(self, size: tuple[int, int], alone: bool = True) -> ImageShape:
        """What becomes of an image of ``size`` (height, width). ValueError where the processor takes none such."""
        key = (*size, alone)
        shape = self._shapes.get(key)
        if shape is None:
            blank = np.zeros((*size, 3), dtype=np.uint8)
            shape = self.layout.kind.measure(self.run(blank, alone), size, self.values, alone)
            self._shapes[key] = shape
            if len(self._shapes) > MAX_SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return shape

    def prepare(self, pixels: np.ndarray, alone: bool = True) -> dict[str, np.ndarray]:
        """The entries of one image, as ``families.images.ImageKind.prepare`` describes them."""
        return self.layout.kind.prepare(self, pixels, alone)

    @cached_property
    def table(self) -> np.ndarray:
        """float32 (3, 256): what the processor makes of each value of each channel."""
        image, of = np.tile(np.arange(256, dtype=np.uint8), (3, 1)).reshape(3, 1, 256), self.own
        if hasattr(of, "rescale_and_normalize"):  # torchvision's rounds both as one
            import torch

            how = (
                of.do_rescale,
                of.rescale_factor,
                of.do_normalize,
                tuple(of.image_mean or ()),
                tuple(of.image_std or ()),
            )
            image = of.rescale_and_normalize(torch.from_numpy(image), *how).float().numpy()
            return np.ascontiguousarray(image.reshape(3, 256))
        if of.do_rescale:
            image = of.rescale(image, of.rescale_factor)
        if of.do_normalize:
            image = of.normalize(image, of.image_mean, of.image_std)
        return np.ascontiguousarray(image.reshape(3, 256), dtype=np.float32)

    def words(self, tokenizer: Any) -> dict[str, str]:
        """The tokens of ``layout.words`` as the tokenizer has them."""
        return {name: getattr(tokenizer, name, None) or usual for name, usual in self.layout.words.items()}

    def expand(self, shape: ImageShape, words: Mapping[str, str]) -> str:
        """What stands in place of an image's placeholder; ``words`` are the tokens of ``layout.words``."""
        return self.layout.expand(shape, {**self.values, **words})

    def run(self, pixels: np.ndarray, alone: bool) -> dict[str, Any]:
        """The processor's entries of one image ``pixels (height, width, 3)`` uint8, by whole numbers up to 255."""
        from PIL import Image

        image = Image.fromarray(pixels)
        images = [[image]] if alone or not self.layout.kind.depends_on_others else [[image, image]]
        return dict(self.own(images, **NO_FLOATS, **self.layout.arguments(self.values)))


def _load(folder: Path) -> Any:
    _check_torchvision()
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as BY_TYPE

    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            "the model folder has no image processor",
            where=str(folder),
            why=f"neither {' nor '.join(PROCESSOR_FILES)} is there",
            fix="copy the processor's files into the model folder",
        )
    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(str(folder), local_files_only=True)
        model_type = str(read_object(folder / "config.json").get("model_type"))
        name = values.get("image_processor_type")
        usual = BY_TYPE.get(model_type, {})
        wanted = f"{name.removesuffix('Fast')}Pil" if name else usual.get("pil") or f"{usual['torchvision']}Pil"
        model_types = [each for each, classes in BY_TYPE.items() if classes.get("pil") == wanted]
        file, alone = "image_processing_pil", wanted.removesuffix("Pil")
        if not model_types and any(classes.get("torchvision") == alone for classes in BY_TYPE.values()):
            _check_torchvision(model_type)
            model_types = [each for each, classes in BY_TYPE.items() if classes.get("torchvision") == alone]
            wanted, file = alone, "image_processing"
        kind = find_class(wanted, model_types, file)
        return kind(**{name: value for name, value in values.items() if name not in NOT_ARGUMENTS})
    except UserError:
        raise
    except Exception as error:  # whatever the files hold: transformers raises many kinds
        raise UserError(
            "the image processor cannot be loaded", where=str(folder), why=f"{type(error).__name__}: {error}"
        ) from error


def _check_torchvision(needed_by: str = "") -> None:
    """UserError where torchvision is installed and cannot be imported, or missing and models of this type need it."""
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch raises what its operators do
        install = f"pip install torchvision torch=={version('torch')}"
        if not (isinstance(error, ModuleNotFoundError) and error.name == "torchvision"):
            raise UserError(
                "the installed torchvision cannot be imported",
                where="torchvision",
                why=f"{type(error).__name__}: {error}; it may be a build for another torch than {version('torch')}",
                fix=f"install its build for this torch ({install}), or uninstall it",
            ) from error
        if needed_by:
            raise UserError(
                f"images of models of type {needed_by} need torchvision, which is not installed",
                where="data.images",
                why="transformers prepares them by torchvision alone",
                fix=f"{install}, or set data.images: false",
            ) from error


def find_class(name: str, model_types: Iterable[str], file: str) -> Any:
    """The class ``name`` of transformers, from ``file`` of one of these model types, by its own module: attributes of
    packages are lazy and need not exist, and where torchvision is not installed, ``AutoImageProcessor`` finds only some
    of the classes that do not need it.
    """
    for model_type in model_types:
        home = model_type.replace("-", "_")
        try:
            module = importlib.import_module(f"transformers.models.{home}.{file}_{home}")
        except ModuleNotFoundError:  # a model type that uses another's
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ValueError(f"transformers has no {name}")
