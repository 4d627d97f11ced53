"""Whole runs whose frozen tower computes each image once: the numbers of one that keeps nothing, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from manyhands.model import features
from manyhands.model.structure import find_tower_blocks
from tests.keys.lab import Lab, Ran, open_lab
from tests.support import torchvision
from tests.support.vision import write_tiny_vision

NUM_IMAGES, EPOCHS = 16, 2
NUM_MICRO_BATCHES = 10  # of an epoch, each with images


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as lab:
        draw = np.random.default_rng(0)
        rows: list[dict[str, Any]] = []
        for number in range(NUM_IMAGES):
            pixels = draw.integers(0, 256, (28 + number, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(lab.folder / f"{number}.png")
            parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "?"}]
            rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "so"}]})
            if number % 4 == 0:
                rows.append({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}]})
        lab.write_rows("images.jsonl", rows)
        yield lab


def train(lab: Lab, family: str, projector: str, **keys: Any) -> tuple[Ran, int]:
    """A run, and how often its tower was at work."""
    model = lab.folder / family
    if not model.exists():
        write_tiny_vision(model, family)
    given = {f"data.{key}": value for key, value in {"cache_features": True, **keys}.items()}
    rank = lab.start(
        {
            "model.name": str(model),
            "method.name": "full",
            "method.parts": {"vision": "frozen", "projector": projector},
            "data.train": str(lab.folder / "images.jsonl"),
            "data.validation_fraction": 0.0,
            "data.order": "as_given",
            "stop.epochs": EPOCHS,
            "batch.samples": 2,
        }
        | given
    )
    lab.check(rank)  # with images of its own, which are not kept
    calls: list[int] = []
    next(iter(find_tower_blocks(rank.model).values())).register_forward_hook(lambda *_: calls.append(1))
    return lab.train(rank), len(calls)


def weights(ran: Ran) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in ran.rank.model.named_parameters()}


MORE = [
    ("qwen3_vl", "trained", 2),
    ("llava_next", "trained", 0),
    ("qwen2_vl", "trained", 0),
    ("glm4v", "frozen", 0),
    ("mistral3", "frozen", 0),
    ("exaone4_5", "trained", 0),
]
WITH_TORCHVISION = pytest.param("lfm2_vl", "frozen", 0, marks=(pytest.mark.slow, torchvision.MISSING))


@pytest.mark.parametrize(
    ("family", "projector", "workers"),
    [("gemma3", "trained", 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE), WITH_TORCHVISION],
)
def test_each_image_is_computed_once_and_nothing_changes(
    lab: Lab, family: str, projector: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where features come from earlier runs, some of them damaged; nor where ``workers`` processes read them;
    nor by more than rounding where none are kept.
    """
    monkeypatch.setattr(features, "NUM_AHEAD", 1)  # so that all are written before they are asked for again
    plain, calls = train(lab, family, projector, cache_features=False)
    assert calls >= EPOCHS * NUM_IMAGES / 2 and not list((lab.folder / "cache").glob("features/*/*/*"))
    cache = lab.new_path("cache")
    first, calls = train(lab, family, projector, cache=str(cache), workers=workers)
    (planned,) = (reason.values["bytes"] for reason in first.rank.plan.why if reason.code == "features")
    written = sum(path.stat().st_size for path in cache.glob("features/*/*/*"))
    assert abs(written - planned) <= 2048 * NUM_IMAGES  # of files themselves
    assert calls == NUM_IMAGES and first.rank.measured["features"] == {
        "computed_images": NUM_IMAGES,
        "read_micro_batches": NUM_MICRO_BATCHES,  # of the second epoch
    }
    assert first.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, values in weights(plain).items():
        if name.endswith("k_proj.bias"):
            continue  # it shifts all scores of a query alike: its gradient is rounding, of which Adam makes full steps
        assert float((weights(first)[name] - values).norm()) <= 1e-4 * float(values.norm()), name

    torn, flipped, *others = sorted(cache.glob("features/*/*/*"))
    assert len(others) == NUM_IMAGES - 2
    torn.write_bytes(torn.read_bytes()[:200])
    raw = bytearray(flipped.read_bytes())
    raw[len(raw) // 2] ^= 1
    flipped.write_bytes(raw)
    second, calls = train(lab, family, projector, cache=str(cache))
    assert 2 <= calls <= 4  # with them the others of their micro-batches
    assert second.losses == first.losses
    assert all(torch.equal(weights(second)[name], values) for name, values in weights(first).items())
