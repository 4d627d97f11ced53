"""A new kind of images is one class: what it decides is all that preparation, batches and the model need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands import families
from manyhands.data.images.batch import ImageWork, open_batcher
from manyhands.data.images.files import PixelBounds
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.families import find
from manyhands.families.images import PIXELS, ImageKind, ImageShape
from manyhands.families.images.kind import Processor
from manyhands.model.image_checks import ProbeImages
from tests.support.layouts import build
from tests.support.tiny import tiny_plan, tiny_run
from tests.support.vision import write_tiny_vision

TRAINED = {"vision": "trained", "projector": "trained", "language": "trained"}


class Halves(ImageKind):
    """A unit is the upper or lower half of a square; the forward pass takes squares."""

    def prepare(self, processor: Processor, pixels: np.ndarray, alone: bool) -> dict[str, np.ndarray]:
        squares = super().prepare(processor, pixels, alone)[PIXELS]
        num, _, height, width = squares.shape
        halves = squares.reshape(num, 3, 2, height // 2, width).swapaxes(1, 2)
        return {PIXELS: halves.reshape(2 * num, 3, height // 2, width)}

    def measure(
        self, made: Mapping[str, Any], size: tuple[int, int], values: Mapping[str, Any], alone: bool
    ) -> ImageShape:
        shape = super().measure(made, size, values, alone)
        return replace(shape, units=2 * shape.units)

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        return entries | {PIXELS: entries[PIXELS].unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)}

    def smallest(self, config: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        (num, _, height, width), others = super().smallest(config)
        return (2 * num, 3, height // 2, width), others


def compute(folder: Path) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """A pack with two images as a run collates it, its logits, and features of the smallest image."""
    config = tiny_run(folder)
    open_batcher.cache_clear()
    probe = ProbeImages(config, ImageWork(str(folder), PixelBounds.of(config.data)), load_tokenizer(folder))
    batch, _ = probe.batch([(np.arange(1, 9), 0), (np.arange(1, 7), 1)], packed=True)
    engine = build(tiny_plan(folder, parts=TRAINED), config)
    images: Any = engine.loss_model.images
    smallest = images.smallest(engine.model.config, torch.device("cpu"))
    return dict(batch), engine.logits(batch), images.features(engine.model, smallest)[0].detach()


def test_a_kind_that_lives_here_alone_is_prepared_collated_and_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_vision(tmp_path, "llava")
    squares, logits, features = compute(folder)
    family = find("llava")
    assert family.images is not None
    halved = replace(family, images=replace(family.images, kind=Halves()))
    monkeypatch.setattr(families, "FAMILIES", tuple(halved if f is family else f for f in families.FAMILIES))
    halves, by_halves, features_by_halves = compute(folder)
    open_batcher.cache_clear()
    assert len(halves[PIXELS]) == 2 * len(squares[PIXELS]) == 4
    assert halves["cu_pixel_values"].tolist() == [0, 2, 4] and torch.equal(halves["input_ids"], squares["input_ids"])
    assert torch.equal(by_halves, logits) and torch.equal(features_by_halves, features)
