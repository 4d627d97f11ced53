"""Do images reach the loaded model as its own forward pass takes them? Asked before the first step, of two short
documents around one drawn image each, as the run's own processor and collation make them.

1. *features*: tower and projector make as many features of an image as the processor writes placeholders for it;
2. *own forward pass*: the logits of a document are those of the model's forward pass as transformers has it, with
   attention written out in plain torch;
3. *packing*: documents side by side (or in rows of one length) have the logits of each alone;
4. *leak*: another image changes the logits of its document, and of a pack none beside it.

Every rank runs the same probes in the same order, so they work where weights are sharded. Must not know how. The drawn
images are opened, expanded and collated as those of rows, and as small as the model's processor allows, which enlarges
most to the size that its tower wants.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.collective_errors import user_errors_on_all_ranks
from manyhands.core.errors import UserError
from manyhands.data.batch.batches import Batch, collate, to_device
from manyhands.data.batch.collate import BatchShape
from manyhands.data.images.batch import ImageWork
from manyhands.data.images.open import ImageOpener, OpenedImage
from manyhands.data.images.rows import ImageRef
from manyhands.data.store.streams import IMAGE_SOURCES, IMAGES, MASK, TOKENS, Sample, Stream, make_sample, to_streams
from manyhands.model.checks import (
    PROBE_LENGTHS,
    PROBE_SEED,
    TOLERANCE,
    WIDE_TOLERANCE,
    Probed,
    eager_evaluation,
    relative_deviation,
)
from manyhands.model.loss import LossModel
from manyhands.model.multimodal import BY_OWN_FORWARD
from manyhands.model.structure import set_attention

FIX = "leave the images out with data.images: false, or use a model whose images are known (docs/vision.md)"
SIDE = 32  # pixels of a drawn image
NUM_BEFORE = 5  # tokens of a document that stand before its image


@dataclass(frozen=True)
class ImageVerdict:
    """Relative deviations of the logits, and what the checks took."""

    own: float  # from the model's own forward pass
    together: float  # of documents in one batch from each alone
    leak: float  # by another image in the document beside
    seen: float  # by another image in its own document
    num_tokens: int  # of an image
    seconds: float

    def describe(self) -> str:
        return (
            f"images: an image of {self.num_tokens:,} tokens gives the logits of the model's own forward pass"
            f" (relative deviation {self.own:.1e}; in one batch with another document {self.together:.1e})"
            f" and does not change those of another document ({self.leak:.1e}); checked in {self.seconds:.1f} s"
        )


@torch.no_grad()
def check_images(
    engine: Probed,
    loss_model: LossModel,
    probe: ProbeImages,
    device: torch.device,
    packing: bool,
    *,
    must_see: bool = True,
) -> ImageVerdict:
    """The checks above, of a model with its tower in memory. Raises UserError that names the check that failed.

    Without ``must_see`` an image may change nothing at all, as where weights are drawn and a projector begins as zeros.
    """
    begun = time.perf_counter()
    texts = _draw_texts(loss_model.model.config)

    def logits(*documents: tuple[int, int], own: bool = False) -> list[torch.Tensor]:
        """Of each document (t, v), all in one batch; a document is the number of its text and of its image."""
        batch, lengths = probe.batch([(texts[text], image) for text, image in documents], packing)
        batch[BY_OWN_FORWARD] = own
        found = engine.logits(to_device(batch, device))
        rows = found[0, : sum(lengths)].split(lengths) if packing else found
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    first, second, other = (0, 0), (1, 1), (0, 2)
    implementation = loss_model.model.config._attn_implementation
    with eager_evaluation(loss_model):
        together, changed = logits(first, second), logits(other, second)
        alone = torch.cat([*logits(first), *logits(second)])
        set_attention(loss_model.model, "eager")
        try:
            own = torch.cat([*logits(first, own=True), *logits(second, own=True)])
        finally:
            set_attention(loss_model.model, implementation)
    found = ImageVerdict(
        relative_deviation(alone, own),
        relative_deviation(torch.cat(together), alone),
        relative_deviation(changed[1], together[1]),
        relative_deviation(changed[0], together[0]),
        probe.num_tokens,
        time.perf_counter() - begun,
    )
    with user_errors_on_all_ranks():
        _judge(found, loss_model.model, own.dtype, packing)
        if must_see and not found.seen > 0:
            _refuse(loss_model.model, "another image changes no logits of its own document")
    return found


def _judge(found: ImageVerdict, model: Any, dtype: torch.dtype, packing: bool) -> None:
    how = "side by side" if packing else "in rows"
    for what, deviation, allowed in (
        ("its logits differ from those of the model's own forward pass", found.own, WIDE_TOLERANCE[dtype]),
        (f"logits of documents {how} differ from those of each alone", found.together, WIDE_TOLERANCE[dtype]),
        ("another image changes the logits of the document beside its own", found.leak, TOLERANCE[dtype]),
    ):
        if not deviation <= allowed:  # also refuses nan
            _refuse(model, f"{what}: relative deviation {deviation:.1e}, allowed {allowed:.0e}")


def _refuse(model: Any, why: str) -> NoReturn:
    raise UserError(f"images do not reach {type(model).__name__} as they should", where="model.name", why=why, fix=FIX)


def _draw_texts(config: Any) -> list[np.ndarray]:
    """Random ids of two documents, none of them a token that means something to the model."""
    fields = [config.to_dict(), config.get_text_config().to_dict()]
    meant = {value for each in fields for key, value in each.items() if "token" in key and isinstance(value, int)}
    ids = np.setdiff1d(np.arange(config.get_text_config().vocab_size), sorted(meant))
    draw = np.random.default_rng(PROBE_SEED)
    return [ids[draw.integers(0, len(ids), length)] for length in PROBE_LENGTHS]


class ProbeImages:
    """Documents of text around one drawn image each, as batches. Raises UserError where the processor takes none."""

    def __init__(self, config: RunConfig, work: ImageWork, tokenizer: Any) -> None:
        self._opener = ImageOpener(config.data, work.model_folder, tokenizer)
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
