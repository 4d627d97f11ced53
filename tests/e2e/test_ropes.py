"""Whole runs with each ``rope_type`` of transformers, on documents of both sides of the length where some change
frequencies: packed as unpacked, two processes as one, resumed as straight on.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import WORDS, Place, Spec
from tests.support.ropes import BOUND, ROPE_CASES, rope_fields
from tests.support.tiny import write_tiny_model

pytestmark = pytest.mark.slow  # whole runs in processes of their own

CASES = [(family, kind) for family, kind in ROPE_CASES if family != "gemma3" or kind == "dynamic"]
BATCH, SAVED, NUM_STEPS = 4, 2, 4
LONGEST = 200  # the last row before the checkpoint: a state that it leaves behind is not that of any later row
UNPACKED = ("data.packing=false", "batch.micro_tokens=auto", "batch.micro_samples=1")
RUNS = {"unpacked": (1, UNPACKED), "packed": (1, ()), "two": (2, ())}


def write_rows(path: Path) -> None:
    """Answers on both sides of the bound; each of their characters is a token."""
    draw, rows = random.Random(0), []
    for index in range(BATCH * NUM_STEPS):
        size = LONGEST if index == BATCH * SAVED - 1 else draw.choice((5, 20, BOUND, 100, 130))
        rows.append({"prompt": "a", "completion": " ".join(draw.choices(WORDS, k=size))[:size]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(place: Place) -> Place:
    """All runs, in one set of processes."""
    write_rows(place.folder / "ropes.jsonl")
    run = yaml.safe_load((place.folder / "full.yaml").read_text())
    run |= {"evaluate": {"every_steps": 0, "prompts": 0}, "checkpoint": {"every_steps": SAVED}}
    run["data"] |= {"train": "ropes.jsonl", "order": "as_given", "validation_fraction": 0.0}
    run["batch"]["samples"], run["stop"]["max_steps"], run["model"]["dtype"] = BATCH, NUM_STEPS, "float64"
    (place.folder / "ropes.yaml").write_text(yaml.safe_dump(run))
    specs = []
    for family, kind in CASES:
        model = place.folder / f"{family}-{kind}"
        write_tiny_model(model, family, "float64", num_hidden_layers=2, **rope_fields(family, kind, 256))
        keys = (f"model.name={model}",)
        specs += [Spec(ranks, f"{model.name}-{name}", (*keys, *more)) for name, (ranks, more) in RUNS.items()]
        resumed = f"{model.name}-resumed"
        specs += [Spec(1, resumed, keys, {"step": NUM_STEPS}), Spec(1, resumed, keys)]
    specs = [dataclasses.replace(spec, file="ropes.yaml") for spec in specs]
    place.many(*specs)
    return place


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_packs_ranks_and_a_resume_change_nothing(trained: Place, family: str, kind: str) -> None:
    name = f"{family}-{kind}"
    runs = {how: trained.run(f"{name}-{how}") for how in (*RUNS, "resumed")}
    alone = runs["unpacked"].losses()
    assert len(alone) == NUM_STEPS
    for how, run in runs.items():
        assert run.losses() == pytest.approx(alone, rel=1e-6), how
    straight, resumed = runs["packed"], runs["resumed"]
    assert resumed.course() == straight.course()
    weights = [(run.folder / "model/model.safetensors").read_bytes() for run in (straight, resumed)]
    assert weights[0] == weights[1] and resumed.read("plans/002.json")["cause"] == "resume"
