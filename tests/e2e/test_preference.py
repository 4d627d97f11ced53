"""Preference tuning takes the same steps on one process and on two, however weights are held and divided."""

from __future__ import annotations

import json
import math
import random

import pytest
import yaml

from tests.e2e.runs import WORDS, Place, Spec

KEYS = ("task=preference", "data.train=pairs.jsonl", "data.validation=null", "batch.samples=8")
KEYS += ("stop.max_steps=4", "optimizer.learning_rate=0.01", "evaluate.every_steps=0", "evaluate.at_start=false")
RANKS = {"single": 1, "ddp": 2, "fsdp": 2}


METHODS = ("lora", "qlora", "full")


@pytest.fixture(scope="module")
def trained(place: Place) -> Place:
    """Each method in each layout, in one set of processes."""
    draw = random.Random(1)
    rows = [
        {key: " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for key in ("prompt", "chosen", "rejected")}
        for _ in range(40)
    ]
    (place.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = []
    for method in METHODS:
        run = yaml.safe_load((place.folder / "run.yaml").read_text())
        run["method"] = {"name": "full"} if method == "full" else {**run["method"], "name": method, "dropout": 0}
        (place.folder / f"pairs-{method}.yaml").write_text(yaml.safe_dump(run))
        for strategy, ranks in RANKS.items():
            name = f"pairs-{method}-{strategy}"
            keys = (*KEYS, f"parallel.strategy={strategy}", f"data.cache=cache-{name}")
            specs.append(Spec(ranks, name, keys, file=f"pairs-{method}.yaml"))
    place.many(*specs)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_layouts_take_the_steps_of_one_process(trained: Place, method: str) -> None:
    losses = [trained.run(f"pairs-{method}-{strategy}").losses() for strategy in RANKS]
    assert losses[0][0] == pytest.approx(math.log(2), rel=1e-6)  # the model is its own reference
    assert losses[0][-1] != pytest.approx(math.log(2), rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[1], rel=1e-6)
