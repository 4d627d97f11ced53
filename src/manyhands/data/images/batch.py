"""The images of a micro-batch: from what a store says of them to the inputs of the model's forward pass, or to the
features that are kept of them. Knows no torch but through the family's image processor, which loads once in a process
and where the first image is prepared, and no tower.

In a run with images every batch has (I: images of all documents, U: units, see ``families.images.ImageKind``):

| name | |
|---|---|
| pixel_values | uint8 (U, 3, H, W), squares or patches, all documents' end to end; (0, ...) without images |
| image_grid_thw, image_sizes | (I, 3), (I, 2) int64, where the family's forward pass takes them |
| batch_num_images | (documents) int64, likewise |
| cu_ENTRY | (documents + 1) int32, where each document's items begin, beside each entry of images or units |
| rope_positions | (3, B, L) int64 like position_ids, by time, row and column, where the family rotates by these |
| image_places, ... | see ``image_places.py`` |
| pixel_table, pixel_repeats | what turns bytes into floats: ``batches.scale_pixels`` takes them out |
| named_images | where features are kept: a ``NamedImage`` for each image whose features have to be computed, in order |
| kept_features | else bytes (n) uint8 of all arrays of features, each of all images end to end |
| kept_shapes, kept_rows | beside these: (dtype, shape) of each array; rows of the first that belong to each image |

Features are what a frozen vision tower makes of each image, computed once and kept on disk. An image's name is a digest
of its encoded bytes, of how pixels are prepared, and of the model that computes (``FeatureWork.model``). A file appears
by one rename and is checked as it is read: what is torn or damaged is computed again. All models share one folder and
its bound; what was not used for the longest time goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.images.cache import Entries, ImageCache
from manyhands.data.images.files import DECODING, BadImage, PixelBounds, content_of, decode, name_of, read_bytes
from manyhands.data.images.open import open_processor
from manyhands.data.images.places import PLACES, divide_places, place_images, read_tower_sizes
from manyhands.data.images.processor import PROCESSOR_FILES, family_of, processor_digest, update_by_files
from manyhands.data.store.streams import PACKED_BY, Sample, StoredImage, from_streams
from manyhands.families.images import PIXELS

PIXEL_TABLE, PIXEL_REPEATS = "pixel_table", "pixel_repeats"
Arrays = dict[str, Any]
NAMED, KEPT, KEPT_SHAPES, KEPT_ROWS = "named_images", "kept_features", "kept_shapes", "kept_rows"
FEATURE_ENTRIES = frozenset({NAMED, KEPT, KEPT_SHAPES, KEPT_ROWS})
_ARRAY, _SIZE = "array.", "size."  # prefixes of a file's entries: arrays of features in order, and what else is known
FEATURE_LAYOUT = b"1"  # of a file


@dataclass(frozen=True)
class ImageWork:
    """How images are prepared, for a process that collates: by the processor in ``model_folder``. ``cache``: the folder
    of prepared images, and how many bytes of them are kept on disk, by all processes, and in memory by each;
    ``num_units`` of all samples together. ``features``: where the features of images are kept, if they are.
    """

    model_folder: str
    bounds: PixelBounds
    cache: str = ""
    disk_bytes: int = 0
    memory_bytes: int = 0
    num_units: int = 0
    features: FeatureWork | None = None


def add_images(
    work: ImageWork,
    samples: Sequence[Sample],
    divided: Sequence[Sequence[Sample]],
    batch: Arrays,
    starts: Sequence[int],
    packed: bool,
) -> Arrays:
    """The entries of the images of ``samples``, once each. All documents of a sample, ``divided``, see its images; they
    begin at the flat positions ``starts`` of ``batch``. Raises UserError for an image that is not what it was when the
    samples were prepared."""
    batcher = open_batcher(work)
    entries = batcher.enter([from_streams(sample) for sample in samples])
    if batcher.layout.mrope:
        entries["rope_positions"] = batcher.place_documents(divided, entries, batch["input_ids"].shape, starts, packed)
    tower = batcher.tower if batcher.layout.grid_inputs else {}
    entries |= place_images(batch | entries, batcher.layout, batcher.config, tower)
    num_documents = max(map(len, divided), default=1)
    if num_documents > 1:
        entries[PLACES] = divide_places(entries[PLACES], starts, num_documents)
    return entries


@lru_cache(maxsize=2)
def open_batcher(work: ImageWork) -> ImageBatcher:
    """The batcher of this process for ``work``, made once."""
    return ImageBatcher(work)


def _name_preparation(work: ImageWork) -> str:
    """16 hex digits of all that decides what becomes of an image's content."""
    bounds = (work.bounds.shrink_above, work.bounds.enlarge_below)
    return hashlib.sha256(f"{processor_digest(work.model_folder)} {bounds}".encode()).hexdigest()[:16]


class ImageBatcher:
    """Prepares images with the processor of one model."""

    def __init__(self, work: ImageWork) -> None:
        layout = family_of(work.model_folder).images
        assert layout is not None
        self._work, self.layout = work, layout
        self.processor = open_processor(work.model_folder, layout)
        self.config = read_object(self.processor.folder / "config.json")
        self.token_id = int(self.config[layout.token_field])
        self._blanks = {
            name: values[:0] for name, values in self.processor.prepare(np.zeros((64, 64, 3), np.uint8)).items()
        }

        pixels = self._blanks[PIXELS]
        self._cache = ImageCache(
            Path(work.cache),
            _name_preparation(work),
            work.memory_bytes,
            work.disk_bytes,
            work.num_units * int(np.prod(pixels.shape[1:])),
        )
        self._features = None if work.features is None else FeatureFiles(work.features)

    def enter(self, documents: Sequence[Sequence[StoredImage]]) -> Arrays:
        """Entries of all documents' images: kept features, if complete, in place of pixels; else their names."""
        any_number = not self.layout.kind.depends_on_others  # of images gives the same
        listed = [[(image, any_number or len(images) == 1) for image in images] for images in documents]
        flat = [pair for images in listed for pair in images]
        if self._features is None or not flat:
            return self.join([[self.prepare(*pair) for pair in images] for images in listed])
        names = [self._features.name_of(*pair) for pair in flat]
        found = self._features.find(names)
        if found is not None:
            sizes, features = found
            parts = iter(size | {PIXELS: self._blanks[PIXELS]} for size in sizes)
            return self.join([[next(parts) for _ in images] for images in listed]) | features
        prepared = [[self.prepare(*pair) for pair in images] for images in listed]
        made = (entries for images in prepared for entries in images)
        named = tuple(
            NamedImage(name, len(entries[PIXELS]), alone, {n: v for n, v in entries.items() if n != PIXELS})
            for name, (_, alone), entries in zip(names, flat, made, strict=True)
        )
        return self.join(prepared) | {NAMED: named}

    def prepare(self, image: StoredImage, alone: bool) -> dict[str, np.ndarray]:
        """The entries of one image, kept or made. Raises UserError where it is not what was stored."""
        alone = alone or not self.layout.kind.depends_on_others
        return self._cache.get(image.content + bytes([alone]), lambda: self._make(image, alone))

    def _make(self, image: StoredImage, alone: bool) -> dict[str, np.ndarray]:
        name = name_of(image.place)
        try:
            raw = read_bytes(image.place) if image.place else image.source
            if content_of(raw) != image.content:
                raise BadImage(f"{name} is not the one that was prepared")
            entries = self.processor.prepare(decode(raw, name, self._work.bounds), alone)
        except BadImage as bad:
            raise UserError(
                "an image has changed since the data was prepared",
                where=image.place,
                why=str(bad),
                fix="put the image back, or delete the folder of prepared data in data.cache: it is made again",
            ) from None
        return entries

    def join(self, documents: Sequence[Sequence[dict[str, np.ndarray]]]) -> Arrays:
        """The entries of all images of all documents."""
        batch: Arrays = {}
        for name, blank in self._blanks.items():
            parts = [image[name] for images in documents for image in images]
            batch[name] = np.concatenate([blank, *parts])
            counts = [sum(len(image[name]) for image in images) for images in documents]
            batch[f"cu_{name}"] = np.cumsum([0, *counts], dtype=np.int32)
        for entry in self.layout.entries:
            if entry.item == "document":
                batch[entry.name] = np.array([len(images) for images in documents], dtype=np.int64)
        repeats = self.layout.kind.repeats(self.processor.values)
        return batch | {PIXEL_TABLE: self.processor.table, PIXEL_REPEATS: repeats}

    @cached_property
    def tower(self) -> dict[str, int]:
        """What ``place_images`` needs to know of it."""
        return read_tower_sizes(self._work.model_folder)

    def place_documents(
        self,
        divided: Sequence[Sequence[Sample]],
        entries: Arrays,
        size: tuple[int, ...],
        starts: Sequence[int],
        packed: bool,
    ) -> np.ndarray:
        """``rope_positions (3, *size)``: those of each document, from 0; padding has those of ``position_ids``."""
        out = np.zeros((3, size[0] * size[1]), dtype=np.int64)
        if not packed:
            out[:] = np.tile(np.arange(size[1]), size[0])
        bounds, merge = entries["cu_image_grid_thw"], int(self.processor.values["merge_size"])
        places = iter(starts)
        for number, documents in enumerate(divided):
            grids = entries["image_grid_thw"][bounds[number] : bounds[number + 1], 1:] // merge
            for ids, start in zip([document[PACKED_BY] for document in documents], places, strict=False):
                out[:, start : start + len(ids)] = rotary_positions(ids == self.token_id, grids)
        return out.reshape(3, *size)


def rotary_positions(is_image: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Positions (3, T) int64 by time, row and column of a document whose tokens are of images where ``is_image``.

    ``grids`` (images, 2) are rows and columns of each image in tokens. Text counts up on all axes; an image has
    the next position in time, its rows and columns count from there, and text continues after the larger of the two.
    """
    positions = np.empty((3, len(is_image)), dtype=np.int64)
    first, place = 0, 0  # the next position, the next token
    begins = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
    bounds = iter(begins.tolist())
    for rows, columns in grids.tolist():
        begin = place if place < len(is_image) and is_image[place] else next(b for b in bounds if b >= place)
        positions[:, place:begin] = np.arange(first, first + begin - place)
        first += begin - place
        place = begin + rows * columns
        positions[0, begin:place] = first
        positions[1, begin:place] = first + np.repeat(np.arange(rows), columns)
        positions[2, begin:place] = first + np.tile(np.arange(columns), rows)
        first += max(rows, columns)
    positions[:, place:] = np.arange(first, first + len(is_image) - place)
    return positions


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
    """64 hex digits of all that decides an image's pixels; placeholders, as in ``processor_digest``, do not."""
    digest = hashlib.sha256(FEATURE_LAYOUT + f"{DECODING} {bounds.shrink_above} {bounds.enlarge_below}".encode())
    update_by_files(digest, Path(model_folder), PROCESSOR_FILES)
    return digest.hexdigest()


class FeatureFiles:
    """The features of a model's images, on disk alone: the system keeps in memory what there is room for."""

    def __init__(self, work: FeatureWork) -> None:
        self.work = work
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
