"""An image of one token, of families whose images keep their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.families import find
from manyhands.model.multimodal import Images
from manyhands.model.structure import auto_class_of
from tests.support.vision import write_tiny_vision


@pytest.mark.parametrize("family", ["mistral3", "lighton_ocr"])
@torch.no_grad()
def test_the_only_image_may_be_one_token(tmp_path: Path, family: str) -> None:
    folder = write_tiny_vision(tmp_path / "model", family)
    model = auto_class_of(folder).from_pretrained(folder, dtype=torch.float32).eval()
    images = Images(model, find(family))
    patches = torch.randn(12, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    together = {"pixel_values": patches, "image_sizes": torch.tensor([[28, 28], [28, 56]])}
    alone = {"pixel_values": patches[:4], "image_sizes": torch.tensor([[28, 28]])}
    expected, _ = images.features(model, together)
    found, _ = images.features(model, alone)
    assert found.shape == (1, 64)
    torch.testing.assert_close(found, expected[:1], rtol=1e-5, atol=1e-6)
