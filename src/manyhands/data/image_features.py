"""Features of images on disk: what a frozen vision tower makes of each, computed once. Pure numpy: knows no tower.

An image's name is a digest of its encoded bytes, of how pixels are prepared, and of the model that computes
(``FeatureWork.model``). A file appears by one rename and is checked as it is read: what is torn or damaged is computed
again. All models share one folder and its bound; what was not used for the longest time goes first. In a batch:

| name | |
|---|---|
| named_images | a ``NamedImage`` for each image, in order, where features have to be computed, and then kept |
| kept_features | else bytes (n) uint8 of all arrays of features, each of all images end to end |
| kept_shapes, kept_rows | beside these: (dtype, shape) of each array; rows of the first that belong to each image |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.image_cache import Entries, ImageCache
from manyhands.data.image_files import PixelBounds
from manyhands.data.image_processor import PROCESSOR_FILES
from manyhands.data.image_streams import StoredImage

NAMED, KEPT, KEPT_SHAPES, KEPT_ROWS = "named_images", "kept_features", "kept_shapes", "kept_rows"
ENTRIES = frozenset({NAMED, KEPT, KEPT_SHAPES, KEPT_ROWS})
_ARRAY, _SIZE = "array.", "size."  # prefixes of a file's entries: arrays of features in order, and what else is known
LAYOUT = b"1"  # of a file


@dataclass(frozen=True)
class FeatureWork:
    """``folder`` and how many bytes are kept there; ``model`` names all that makes features of pixels."""

    folder: str
    model: str
    disk_bytes: int


@dataclass(frozen=True)
class NamedImage:
    """An image of a batch. ``sizes``: its entries beside pixels; ``alone``: as ``ImageProcessor.prepare`` has it."""

    name: bytes
    num_units: int
    alone: bool
    sizes: Mapping[str, np.ndarray]


def digest_of_pixels(model_folder: str | Path, bounds: PixelBounds) -> str:
    """64 hex digits of all that decides what an image's pixels become. Of a model that was trained on, the same: unlike
    ``processor_digest``, which knows placeholders too.
    """
    digest = hashlib.sha256(LAYOUT + f"{bounds.shrink_above} {bounds.enlarge_below}".encode())
    for name in PROCESSOR_FILES:
        path = Path(model_folder) / name
        digest.update(f"\0{name}\0".encode() + (path.read_bytes() if path.is_file() else b""))
    digest.update(" ".join(f"{name} {version(name)}" for name in ("transformers", "pillow", "numpy")).encode())
    return digest.hexdigest()


class FeatureFiles:
    """The features of a model's images, on disk alone: the system keeps in memory what there is room for."""

    def __init__(self, work: FeatureWork) -> None:
        self._model = bytes.fromhex(work.model)
        preparation = hashlib.sha256(self._model).hexdigest()[:16]
        self._cache = ImageCache(Path(work.folder), preparation, 0, work.disk_bytes)

    def name_of(self, image: StoredImage, alone: bool) -> bytes:
        return hashlib.sha256(self._model + image.content + bytes([alone])).digest()

    def find(self, names: Sequence[bytes]) -> tuple[list[Entries], dict[str, Any]] | None:
        """(sizes of each image, the batch's entries) where all of them are kept, else None."""
        found: list[Entries] = []
        for name in names:
            entries = self._cache.find(name)
            if entries is None:
                return None
            found.append(entries)
        count = sum(key.startswith(_ARRAY) for key in found[0])
        arrays = [[entries[f"{_ARRAY}{number}"] for entries in found] for number in range(count)]
        shapes = tuple((parts[0].dtype.name, (sum(map(len, parts)), *parts[0].shape[1:])) for parts in arrays)
        raw = np.concatenate([part.reshape(-1).view(np.uint8) for parts in arrays for part in parts])
        sizes = [
            {key.removeprefix(_SIZE): value for key, value in entries.items() if key.startswith(_SIZE)}
            for entries in found
        ]
        return sizes, {KEPT: raw, KEPT_SHAPES: shapes, KEPT_ROWS: tuple(map(len, arrays[0]))}

    def put(self, image: NamedImage, arrays: Sequence[np.ndarray]) -> None:
        """Keeps the features of an image: arrays whose first dimension counts its rows."""
        entries = {f"{_ARRAY}{number}": values for number, values in enumerate(arrays)}
        self._cache.put(image.name, entries | {f"{_SIZE}{key}": value for key, value in image.sizes.items()})
