"""Do images reach the loaded model as its own forward pass takes them? Asked before the first step, of two short
documents around one drawn image each, as the run's own processor and collation make them.

1. *features*: tower and projector make as many features of an image as the processor writes placeholders for it;
2. *own forward pass*: the logits of a document are those of the model's forward pass as transformers has it, with
   attention written out in plain torch;
3. *packing*: documents side by side (or in rows of one length) have the logits of each alone;
4. *leak*: another image changes the logits of its document, and of a pack none beside it.

Every rank runs the same probes in the same order, so they work where weights are sharded. Must not know how.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from manyhands.core.errors import UserError
from manyhands.data.image_probe import ProbeImages
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
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        found = engine.logits(batch)
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
