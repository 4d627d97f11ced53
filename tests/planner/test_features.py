"""Whether features of images are kept: counted by hand, and what each decision does to memory, time and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.types import Facts, ModelFacts
from manyhands.planner.features import FILE_BYTES
from manyhands.planner.memory.images import kept_by_images, num_units
from manyhands.planner.search import base_input, plan
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, gemma_4b_with_images, run_config
from tests.support.plans import explain_why

IMAGES = data_facts(
    num_samples=10_000, num_images=10_000, num_validation_images=200, max_image_units=1, mean_image_units=1.0
)
PARTS = {"vision": "frozen", "projector": "trained"}


def planned(given: Facts | None = None, **keys: Any) -> Plan:
    config = run_config(**{"method__parts": PARTS, "method__name": "full", "stop__epochs": 3.0} | keys)
    return plan(config, given or gemma())


def gemma(data: Any = IMAGES, gpus: int = 1, **more: Any) -> Facts:
    found = facts(gemma_4b_with_images(), gpus=gpus, data=data)
    return found.model_copy(update=more)


def undescribed() -> ModelFacts:
    model = gemma_4b_with_images()
    assert model.tower is not None
    return model.model_copy(update={"tower": model.tower.model_copy(update={"projector_values": 0.0})})


def sentence(found: Plan) -> str:
    (line,) = explain_why(found, "features")
    return line


def test_what_is_kept_is_what_goes_into_a_trained_projector_or_comes_out_of_a_frozen_one() -> None:
    found = planned()
    assert found.keeps_features
    (values,) = (reason.values for reason in found.why if reason.code == "features")
    assert values["bytes"] == 10_200 * (256 * 1152 * 2 + FILE_BYTES) and values["images"] == 10_200
    assert sentence(found).startswith(
        "features: computed once and kept in data.cache, 5.6 GiB of 10,200 images, read by"
    )
    frozen = planned(method__parts={"projector": "frozen"}, method__name="lora")
    (values,) = (reason.values for reason in frozen.why if reason.code == "features")
    assert values["bytes"] == 10_200 * (256 * 2560 * 2 + FILE_BYTES)


@pytest.mark.parametrize(
    ("keys", "more", "words"),
    [
        ({"stop__epochs": 1.0}, {}, "as there is one epoch"),
        ({"stop__max_steps": 3}, {}, "as there is one epoch"),
        ({"data__cache_features": False}, {}, "as configured"),
        ({"method__parts": {"vision": "trained"}}, {}, "as the vision tower is trained"),
        ({}, {"model": undescribed()}, "is not described"),
        ({"data__feature_cache_gb": 6.0}, {}, "do not fit into data.feature_cache_gb (6 GB)"),
        ({}, {"free_cache_bytes": 10**9}, "do not fit on the disk of data.cache"),
        (
            {},
            {"shares_disk": True, "free_cache_bytes": 10**11, "free_disk_bytes": 150 * 10**9},
            "do not fit on the disk",
        ),
    ],
)
def test_auto_says_why_it_keeps_nothing(keys: dict[str, Any], more: dict[str, Any], words: str) -> None:
    found = planned(gemma(**more), **keys)
    assert not found.keeps_features and words in sentence(found), sentence(found)
    assert found.disk is not None and found.disk.feature_bytes == 0


def test_what_cannot_be_kept_is_refused_if_it_was_asked_for() -> None:
    for keys, more, why in (
        ({"method__parts": {"vision": "trained"}}, {}, "the vision tower is trained"),
        ({"data__feature_cache_gb": 6.0}, {}, "of the bound"),
        ({}, {"free_cache_bytes": 10**9}, "are free"),
    ):
        with pytest.raises(UserError, match=r"data\.cache_features is true") as caught:
            planned(gemma(**more), data__cache_features=True, **keys)
        assert why in (caught.value.why or "")
    with pytest.raises(UserError, match=r"data\.cache_features is true") as caught:
        plan(run_config(data__cache_features=True), facts())
    assert "no image passes" in (caught.value.why or "")
    assert planned(data__cache_features=True, stop__epochs=1.0).keeps_features


def test_time_memory_and_disk_count_them() -> None:
    """A third of the tower's time in three epochs; two micro-batches of features ahead on the device."""
    kept = planned(gemma(shares_disk=True, free_cache_bytes=10**12, free_disk_bytes=10**12))
    plain = planned(data__cache_features=False)
    assert kept.time is not None and plain.time is not None and kept.disk is not None
    assert kept.time.terms["towers"] == pytest.approx(plain.time.terms["towers"] / 3, rel=0.05)
    assert kept.disk.feature_bytes == 10_200 * (256 * 1152 * 2 + FILE_BYTES)
    assert "5.6 GiB of features of images" in explain_why(kept, "disk")[0]
    base = base_input(run_config(method__parts=PARTS, method__name="full"), gemma())
    base = replace(base, layout=kept.layout)
    assert base.images is not None
    ahead = replace(base, images=replace(base.images, kept_bytes=256 * 1152 * 2.0, passes=3.0))
    assert kept_by_images(ahead) - kept_by_images(base) == 2 * num_units(base) * 256 * 1152 * 2


def test_features_that_a_disk_gives_more_slowly_than_the_tower_are_not_kept() -> None:
    """Hundreds of layers of features of an image, and eight ranks at one disk."""
    model = gemma_4b_with_images()
    assert model.tower is not None
    wide = model.tower.model_copy(update={"projector_values": 4096.0 * 1152 * 400})
    given = gemma(gpus=8, model=model.model_copy(update={"tower": wide}))
    found = planned(given, data__feature_cache_gb=1e6)
    assert not found.keeps_features and "would take longer" in sentence(found)
    assert planned(given, data__feature_cache_gb=1e6, data__cache_features=True).keeps_features
