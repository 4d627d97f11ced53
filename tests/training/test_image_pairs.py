"""Pairs of answers to a prompt with images: rows, the loss beside the model's own forward pass, and a whole run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import from_streams, split_documents
from manyhands.data.tokenize.prepare import prepare
from manyhands.infer.compare import compare
from manyhands.planner.text import sentence_of
from tests.keys.lab import Lab, open_lab
from tests.support.ranks import Ranks
from tests.support.vision import write_tiny_processor, write_tiny_vision
from tests.training.image_pair_ranks import reference, write_pictures

PART, TEXT = {"type": "image"}, {"type": "text", "text": "What is it?"}
GOOD, BAD = ([{"role": "assistant", "content": [{"type": "text", "text": text}]}] for text in ("A cat.", "Nothing"))
ANSWERS: dict[str, Any] = {"chosen": GOOD, "rejected": BAD}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def shown(path: str) -> dict[str, Any]:
    return {"type": "image", "image": path}


def write_rows_of(path: str) -> dict[str, dict[str, Any]]:
    """One pair with one image before its question, as tools write it."""
    return {
        "TRL, parts and a column": {"prompt": asked(PART, TEXT), "images": [path], **ANSWERS},
        "TRL, a column alone": {"prompt": asked(TEXT), "images": [path], **ANSWERS},
        "implicit prompt": {
            "chosen": asked(PART, TEXT) + GOOD,
            "rejected": asked(PART, TEXT) + BAD,
            "images": [path],
        },
        "a column of another name": {"prompt": asked(PART, TEXT), "pictures": [path], **ANSWERS},
        "the image in its part": {"prompt": asked(shown(path), TEXT), **ANSWERS},
        "LLaMA-Factory, a mark": {
            "conversations": [{"from": "human", "value": "<image>What is it?"}],
            "chosen": {"from": "gpt", "value": "A cat."},
            "rejected": {"from": "gpt", "value": "Nothing"},
            "images": [path],
        },
        "ms-swift": {
            "messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}],
            "rejected_response": "Nothing",
            "images": [path],
        },
    }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_lab(tmp_path_factory.mktemp("image-pairs")) as lab:
        yield lab


def config_of(lab: Lab, name: str, rows: list[dict[str, Any]], keys: dict[str, Any]) -> Any:
    path = lab.write_rows(f"{name}.jsonl", rows)
    return lab.config({"task": "preference", "data.train": path, "data.validation_fraction": 0.0, **keys})


def test_every_tools_rows_become_one_sample_with_one_image(lab: Lab) -> None:
    folder, (path, *_) = write_tiny_processor(lab.folder / "processor", "qwen2_5_vl"), write_pictures(lab.folder)
    made = []
    for number, row in enumerate(write_rows_of(path).values()):
        fields = {"data.fields": {"images": "pictures"}} if "pictures" in row else {}
        config = config_of(lab, f"row-{number}", [row], {"model.name": str(folder), **fields})
        found = prepare(config, folder, lambda _: None)
        assert (found.num_images, found.num_documents) == (1, 2)
        made.append(TokenStore.open(found.folder).train)
    samples = [each.sample(0) for each in made]
    for sample in samples[1:]:
        assert all(np.array_equal(sample[name], samples[0][name]) for name in ("tokens", "mask", "documents"))
        assert from_streams(sample)[0].content == from_streams(samples[0])[0].content
    (image,), documents = from_streams(samples[0]), split_documents(samples[0], made[0].streams)
    ids = [document["tokens"][: int(document["mask"].argmax())] for document in documents]
    assert np.array_equal(*ids) and image.num_tokens < len(ids[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chosen": [{"role": "assistant", "content": [PART, GOOD[0]["content"][0]]}]}, "stand in the prompt"),
        ({"images": []}, "the row has no images, and 1 place"),
        ({"weight": 2}, "every pair weighs 1"),
    ],
)
def test_rows_that_cannot_be_trained_are_named(lab: Lab, change: dict[str, Any], words: str) -> None:
    folder, (path, *_) = write_tiny_processor(lab.folder / "processor", "qwen2_5_vl"), write_pictures(lab.folder)
    row = write_rows_of(path)["TRL, parts and a column"]
    if "chosen" in change:
        row["images"] = [path, path]
    keys = {"model.name": str(folder), "data.images": True}
    with pytest.raises(UserError, match=words):
        prepare(config_of(lab, "faulty", [row | change], keys), folder, lambda _: None)


def write_pairs(lab: Lab, num: int) -> list[dict[str, Any]]:
    paths = write_pictures(lab.folder)
    images = ([paths[0]], [paths[1], paths[2]], [], [paths[2]])
    return [
        {"prompt": asked(*map(shown, images[n % 4]), TEXT), "chosen": "alpha " * (1 + n % 3), "rejected": f"beta {n}"}
        for n in range(num)
    ]


ALL, ALONE = [[0, 1, 2, 3]], [[3], [2], [1], [0]]
WAYS = ((ALL, True, 1), (ALONE, True, 1), (ALL, False, 1), ([[0, 1, 2], [3]], True, 2))  # the second rank may have none
KEYS = {"method.dropout": 0.0, "preference.beta": 0.7}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(f, marks=pytest.mark.ci) for f in ("gemma3", "llava_onevision"))]
)
def test_a_loss_is_that_of_the_models_own_forward_pass(lab: Lab, world: Ranks, family: str) -> None:
    """However pairs are laid out; both answers see the images of the prompt, which pass through the tower once."""
    folder = write_tiny_vision(lab.folder / family, family)
    path = lab.write_rows("pairs.jsonl", write_pairs(lab, 4))
    keys = {"task": "preference", "model.name": str(folder), "data.train": path, "data.validation_fraction": 0.0}
    prepared = lab.prepare({**keys, **KEYS})
    loss, figures, gradient = reference(prepared.plan, prepared.config)
    assert any(
        text.startswith("computed for each answer of a pair, as ") for text in map(sentence_of, prepared.plan.why)
    )
    for cuts, packed, size in WAYS:
        given = (prepared.plan, prepared.config, cuts, packed)
        for found in world.run("tests.training.image_pair_ranks:compute", *given, world_size=size):
            assert found[0] == pytest.approx(loss, rel=1e-5) and found[1] == pytest.approx(figures, rel=1e-4)
            assert (found[2] - gradient).norm() <= 2e-5 * gradient.norm()


@pytest.mark.ci
def test_a_whole_run_on_pairs_with_images(lab: Lab) -> None:
    folder = write_tiny_vision(lab.folder / "whole", "gemma3")
    path = lab.write_rows("many.jsonl", write_pairs(lab, 24))
    keys = {"task": "preference", "model.name": str(folder), "data.train": path, "stop.epochs": 4}
    ran = lab.export({**keys, "optimizer.learning_rate": 2e-2, "preference.reference": "stored"})
    first, *_, last = ran.rows("evaluation")
    assert first["loss"] == pytest.approx(math.log(2)) and last["preference_accuracy"] > 0.7
    found = compare(ran.folder)
    names = {"preference_accuracy", "reward_margin"}
    assert found.columns["measured"] == pytest.approx({name: last[name] for name in names}, rel=1e-3)
