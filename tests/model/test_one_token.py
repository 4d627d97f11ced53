"""An image of one token, of families whose images keep their sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from manyhands.export.probe import find_sample_with_images
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


@pytest.mark.parametrize("family, chosen", [("mistral3", 2), ("gemma3", 1)])
def test_verification_leaves_out_what_transformers_own_forward_pass_does_not_take(family: str, chosen: int) -> None:
    """Samples without an image, with one of one token, and with a larger one."""
    train = SimpleNamespace(
        num_images=np.array([0, 1, 1]), image_tokens=np.array([0, 1, 4]), lengths=np.array([9, 9, 9])
    )
    plan = SimpleNamespace(parts={"vision": "frozen"})
    loss_model = SimpleNamespace(images=SimpleNamespace(layout=find(family).images))
    assert find_sample_with_images(train, plan, loss_model) == chosen  # type: ignore[arg-type]
