"""Small drawn images for the check of a loaded model: opened, expanded and collated as those of rows. They are as small
as the model's processor allows, which enlarges most to the size that its tower wants.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.data.batches import Batch, collate
from manyhands.data.collate import BatchShape
from manyhands.data.image_batch import ImageWork
from manyhands.data.image_open import ImageOpener, OpenedImage
from manyhands.data.image_rows import ImageRef
from manyhands.data.image_streams import IMAGE_SOURCES, IMAGES, to_streams
from manyhands.data.streams import MASK, TOKENS, Sample, Stream, make_sample

SIDE = 32  # pixels of a drawn image
NUM_BEFORE = 5  # tokens of a document that stand before its image


class ProbeImages:
    """Documents of text around one drawn image each, as batches. Raises UserError where the processor takes none."""

    def __init__(self, config: RunConfig, work: ImageWork, tokenizer: Any) -> None:
        self._opener = ImageOpener(config, work.model_folder, tokenizer)
        self._work, self._tokenizer = replace(work, cache="", disk_bytes=0, memory_bytes=0, features=None), tokenizer
        self._drawn: dict[int, OpenedImage] = {}

    @property
    def num_tokens(self) -> int:
        """Placeholders that stand for one image."""
        return self._draw(0).stored.num_tokens

    def batch(self, documents: Sequence[tuple[np.ndarray, int]], packed: bool) -> tuple[Batch, list[int]]:
        """A micro-batch of documents, each its text's token ids and the number of the image in it; and their
        lengths."""
        samples = [self._sample(*document) for document in documents]
        shape = BatchShape(packed, images=self._work)
        lengths = [len(sample[TOKENS.name]) for sample in samples]
        return collate(HeldSamples(samples), np.arange(len(samples)), shape), lengths

    def _sample(self, text: np.ndarray, number: int) -> Sample:
        image = self._draw(number)
        shown = self._tokenizer.encode(image.text, add_special_tokens=False)
        ids = np.concatenate([text[:NUM_BEFORE], shown, text[NUM_BEFORE:]]).astype(np.int32)
        return {**make_sample(ids, np.ones(len(ids), np.bool_)), **to_streams([image.stored])}

    def _draw(self, number: int) -> OpenedImage:
        """An image of random pixels, another for each number."""
        if number not in self._drawn:
            from PIL import Image

            pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")
            self._drawn[number] = self._opener.open_ref(ImageRef(data=file.getvalue()))
        return self._drawn[number]


class HeldSamples:
    """Samples in memory, where ``collate`` looks for those of a store."""

    streams: tuple[Stream, ...] = (TOKENS, MASK, IMAGES, IMAGE_SOURCES)

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.sample = samples.__getitem__
