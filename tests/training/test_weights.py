"""Weights of labels in any layout: accumulation, ranks and strategies change where a row is computed, not its share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.layouts import measure
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights"), "llama", "float64")


def documents(seed: int, lengths: list[int]) -> list[tuple[list[int], list[float]]]:
    draw = random.Random(seed)
    return [
        ([draw.randrange(256) for _ in range(n)], [draw.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(n)])
        for n in lengths
    ]


ROWS = [documents(1, [9, 30]), documents(2, [17]), documents(3, [5, 5, 21]), []]  # the last rank has none
ALL_ROWS = [document for rows in ROWS for document in rows]


def step(folder: Path, layout: list[Any], world: Ranks | None = None, **plan: Any) -> dict[str, Any]:
    values = {"compute_dtype": "float64", "master_dtype": "float64", "frozen_dtype": "float64"} | plan
    arguments = (tiny_plan(folder, **values), tiny_run(folder), layout)
    if world is None:
        return measure(*arguments)
    return world.run("tests.support.layouts:measure", *arguments, world_size=values["world_size"])[0]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    for name, gradient in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-6, atol=1e-9, err_msg=name)


def test_accumulation_keeps_the_weighted_loss_and_gradients(folder: Path) -> None:
    whole = step(folder, [[ALL_ROWS]])
    assert_equal(step(folder, [[rows] for rows in ROWS]), whole)
    plain = [[[(ids, [weight > 0 for weight in weights]) for ids, weights in ALL_ROWS]]]
    assert step(folder, plain)["loss"] != pytest.approx(whole["loss"], rel=1e-3)  # the weights do act


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_keep_them_too(world: Ranks, folder: Path, strategy: str) -> None:
    found = step(folder, [ROWS], world, strategy=strategy, world_size=4)
    assert_equal(found, step(folder, [[ALL_ROWS]]))
