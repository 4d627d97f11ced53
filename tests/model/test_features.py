"""Features of images that are kept: the same model with them as without, for every family, and no tower at work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.image_features import NAMED, FeatureFiles, FeatureWork, NamedImage
from manyhands.model.features import KeptFeatures, digest_of_tower
from manyhands.model.structure import find_tower_blocks
from tests.support.images import FAMILIES, Document, make_document, pack
from tests.support.layouts import build
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "frozen", "projector": "trained", "language": "trained"}
FROZEN = TRAINED | {"projector": "frozen"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: write_tiny_multimodal(tmp_path_factory.mktemp(f), family=f) for f in FAMILIES}


def engine_of(folder: Path, **changes: Any) -> Any:
    """``sdpa`` alone, where a family allows it: ours computes attention of images in both directions."""
    return build(tiny_plan(folder, **{"parts": TRAINED, "attention": "blockwise"} | changes), tiny_run(folder))


def keep(engine: Any, folder: Path) -> FeatureFiles:
    """From now on, features of the engine's images are kept in ``folder``."""
    images = engine.loss_model.images
    files = FeatureFiles(FeatureWork(str(folder), digest_of_tower(images, engine.model), 10**9))
    images.kept = KeptFeatures(images, engine.model, files)
    return files


def name_images(family: str, documents: Sequence[Document]) -> tuple[NamedImage, ...]:
    named = []
    for document in documents:
        alone = document.num_images == 1 or family != "llava_onevision"
        for number in range(document.num_images):
            sizes = {n: v[number : number + 1].numpy() for n, v in document.inputs.items() if n.startswith("image_")}
            units = int(np.prod(sizes["image_grid_thw"])) if "image_grid_thw" in sizes else 1
            units = 2 if family == "llava_onevision" and alone else units
            name = hashlib.sha256(f"{document.ids} {number}".encode()).digest()
            named.append(NamedImage(name, units, alone, sizes))
    return tuple(named)


def with_kept(family: str, documents: Sequence[Document], files: FeatureFiles) -> dict[str, Any]:
    """The batch without a pixel: what is kept in their place."""
    batch = pack(family, documents)
    found = files.find([image.name for image in name_images(family, documents)])
    assert found is not None
    sizes, entries = found
    batch["pixel_values"] = batch["pixel_values"][:0]
    for name in sizes[0]:
        assert np.array_equal(np.concatenate([size[name] for size in sizes]), batch[name])
    return batch | {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in entries.items()}


def train_one(engine: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = engine.forward(batch)["lm"][0]
    engine.backward(loss, last=True)
    gradients = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


@pytest.mark.parametrize("projector", ["trained", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_features_are_those_of_the_tower(
    folders: dict[str, Path], family: str, projector: str, tmp_path: Path
) -> None:
    """Losses and gradients within rounding of a tower that runs on all images together; from files to the bit as
    computed, without a tower.
    """
    documents = [make_document(family, num, seed, touching=True) for seed, num in enumerate((1, 2, 0, 1))]
    engine = engine_of(folders[family], parts=TRAINED if projector == "trained" else FROZEN)
    expected, plain = train_one(engine, pack(family, documents))
    assert projector == "frozen" or any("project" in n or "merger" in n or "connector" in n for n in plain)

    files, kept = keep(engine, tmp_path), engine.loss_model.images
    computed, first = train_one(engine, pack(family, documents) | {NAMED: name_images(family, documents)})
    kept.kept.close()
    assert float(computed) == pytest.approx(float(expected), rel=2e-6)
    assert first.keys() == plain.keys()
    for name, gradient in plain.items():
        assert float((first[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name

    calls: list[int] = []
    for block in find_tower_blocks(engine.model).values():
        block.register_forward_hook(lambda *_: calls.append(1))
    read, second = train_one(engine, with_kept(family, documents, files))
    assert not calls and kept.kept.num_computed == 4 and kept.kept.num_read == 1
    assert torch.equal(read, computed) and all(torch.equal(second[name], first[name]) for name in first)


def test_half_precision_is_kept_as_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    dtypes: dict[str, Any] = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16", "trains_everything": False}
    documents = [make_document("gemma3", num, seed) for seed, num in enumerate((1, 2))]
    engine = engine_of(folders["gemma3"], **dtypes)
    files = keep(engine, tmp_path)
    computed, _ = train_one(engine, pack("gemma3", documents) | {NAMED: name_images("gemma3", documents)})
    engine.loss_model.images.kept.close()
    found = files.find([image.name for image in name_images("gemma3", documents)])
    assert found is not None and found[1]["kept_shapes"][0][0] == "int16"
    assert torch.equal(train_one(engine, with_kept("gemma3", documents, files))[0], computed)


def test_names_follow_the_tower_and_not_what_is_trained_behind_it(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llava"])

    def digest_after(part: str) -> str:
        with torch.no_grad():
            next(p for n, p in engine.model.named_parameters() if part in n).flatten()[:1].add_(1)
        return digest_of_tower(engine.loss_model.images, engine.model)

    first = digest_of_tower(engine.loss_model.images, engine.model)
    assert digest_after("multi_modal_projector") == first == digest_after("language_model")
    assert digest_after("vision_tower") != first
    other = engine_of(folders["llava"], parts=FROZEN)
    assert digest_of_tower(other.loss_model.images, other.model) != first
