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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_layouts_take_the_steps_of_one_process(place: Place, method: str) -> None:
    draw = random.Random(1)
    rows = [
        {key: " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for key in ("prompt", "chosen", "rejected")}
        for _ in range(40)
    ]
    (place.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = yaml.safe_load((place.folder / "run.yaml").read_text())
    run_file["method"] = {"name": "full"} if method == "full" else {**run_file["method"], "name": method, "dropout": 0}
    (place.folder / "pairs.yaml").write_text(yaml.safe_dump(run_file))
    names, specs = [f"pairs-{method}-{strategy}" for strategy in RANKS], []
    for name, (strategy, ranks) in zip(names, RANKS.items(), strict=True):
        keys = (*KEYS, f"parallel.strategy={strategy}", f"data.cache=cache-{name}")
        specs.append(Spec(ranks, name, keys, file="pairs.yaml"))
    place.many(*specs)
    losses = [place.run(name).losses() for name in names]
    assert losses[0][0] == pytest.approx(math.log(2), rel=1e-6)  # the model is its own reference
    assert losses[0][-1] != pytest.approx(math.log(2), rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[1], rel=1e-6)
