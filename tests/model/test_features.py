"""Features of images that are kept: the same model with them as without, for every family, and no tower at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.data.images.batch import NAMED
from manyhands.model.features import digest_of_weights
from manyhands.model.structure import find_tower_blocks
from tests.support.features import keep, name_images, with_features
from tests.support.images import FAMILIES, make_document, pack
from tests.support.layouts import build
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "frozen", "projector": "trained", "language": "trained"}
FROZEN = TRAINED | {"projector": "frozen"}


def engine_of(folder: Path, **changes: Any) -> Any:
    """``sdpa`` alone, where a family allows it: ours computes attention of images in both directions."""
    return build(tiny_plan(folder, **{"parts": TRAINED, "attention": "blockwise"} | changes), tiny_run(folder))


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
    assert projector == "frozen" or any(part in name for name in plain for part in ("project", "merger", "connector"))

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
    read, second = train_one(engine, with_features(family, documents, pack(family, documents), files))
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
    assert torch.equal(
        train_one(engine, with_features("gemma3", documents, pack("gemma3", documents), files))[0], computed
    )


def test_names_follow_the_tower_and_not_what_is_trained_behind_it(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llava"])

    def digest_after(part: str) -> str:
        with torch.no_grad():
            next(p for n, p in engine.model.named_parameters() if part in n).flatten()[:1].add_(1)
        return digest_of_weights(engine.loss_model.images, engine.model)

    first = digest_of_weights(engine.loss_model.images, engine.model)
    assert digest_after("multi_modal_projector") == first == digest_after("language_model")
    assert digest_after("vision_tower") != first
    pooled = engine_of(folders["gemma4"])
    first = digest_of_weights(pooled.loss_model.images, pooled.model)
    pooled.model.model.vision_tower.std_scale.mul_(2)
    assert digest_of_weights(pooled.loss_model.images, pooled.model) != first
    other = engine_of(folders["llava"], parts=FROZEN)
    assert digest_of_weights(other.loss_model.images, other.model) != first
