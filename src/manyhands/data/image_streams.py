"""The images of a sample as streams of the store: what they are called, and what one item holds. Pure numpy.

A store holds no pixels. Of each image it has the place of its file, or its encoded bytes where the row held these; a
hash of the encoded bytes; its size; and how many units and tokens it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.data.streams import TEXT, Sample, Stream, check_streams

# is held by the row, bytes of its place or of itself, hash (16 bytes as 2), height, width, units, tokens
NUM_FIELDS = 8
UNITS, TOKENS_OF_IMAGE = 6, 7

IMAGES = Stream("images", "<i8", (NUM_FIELDS,))
IMAGE_SOURCES = Stream("image_sources", "u1", identifies=False)  # places and encoded images of a sample, end to end
WITH_IMAGES = check_streams((*TEXT, IMAGES, IMAGE_SOURCES))


@dataclass(frozen=True)
class StoredImage:
    """One image of a sample. ``source`` are its encoded bytes where ``held``, else its place (UTF-8); ``content`` 16
    bytes; ``size`` (height, width), turned as EXIF says."""

    held: bool
    source: bytes
    content: bytes
    size: tuple[int, int]
    num_units: int
    num_tokens: int

    @property
    def place(self) -> str:
        """A path or an address; "" where the row held the image."""
        return "" if self.held else self.source.decode()


def to_streams(images: Sequence[StoredImage]) -> dict[str, np.ndarray]:
    """The streams of a sample with these images."""
    items = np.zeros((len(images), NUM_FIELDS), dtype=np.int64)
    for item, image in zip(items, images, strict=True):
        item[2:4] = np.frombuffer(image.content, dtype="<i8")
        item[[0, 1]] = image.held, len(image.source)
        item[4:] = *image.size, image.num_units, image.num_tokens
    joined = b"".join(image.source for image in images)
    return {IMAGES.name: items, IMAGE_SOURCES.name: np.frombuffer(joined, dtype=np.uint8)}


def from_streams(sample: Sample) -> list[StoredImage]:
    """The reverse; [] for a sample of a store without images."""
    if IMAGES.name not in sample:
        return []
    images, raw, start = [], sample[IMAGE_SOURCES.name].tobytes(), 0
    for item in sample[IMAGES.name]:
        held, length, _, _, height, width, units, tokens = item.tolist()
        content = item[2:4].astype("<i8").tobytes()
        images.append(StoredImage(bool(held), raw[start : start + length], content, (height, width), units, tokens))
        start += length
    return images
