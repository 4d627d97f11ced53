"""One folder with a model and rows for all end-to-end tests, and the runs that several of them look at.

All of it is made once a session, also where pytest-xdist runs the session in several processes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import Ended, Place, Run, Spec, train_command, write_place
from tests.support.tiny import write_tiny_model

PLAIN = ("method.dropout=0",)
MAX_TOKENS = 2000
STILL = "optimizer.learning_rate=1e-30"  # no validation loss is lower than the first one
# So few samples that knowing them by heart soon makes the others worse, at a rate low enough for that to show on any
# processor.
OVERFIT = (
    "data.max_samples=3",
    "stop.epochs=60",
    "stop.max_steps=60",
    "optimizer.learning_rate=0.01",
    "schedule.name=constant",
)
BEST = (*PLAIN, *OVERFIT, "checkpoint.keep_best=true", "evaluate.every_steps=5", "checkpoint.every_steps=0")
SEVERAL_PACKS = (
    "batch.samples=40",
    "batch.micro_tokens=auto",
    "stop.max_steps=4",
    "checkpoint.every_steps=2",
    "evaluate.at_start=false",
)
DIVIDED = {
    "context": (PLAIN, "parallel.context_degree=2"),
    "experts": ((*PLAIN, "model.name=mixture"), "parallel.expert_degree=2"),
}
MANY = (
    Spec(2, "full", ("parallel.strategy=fsdp",), file="full.yaml"),
    Spec(1, "full-one", file="full.yaml"),
    Spec(1, "max-tokens", (*PLAIN, f"stop.max_tokens={MAX_TOKENS}")),
    Spec(2, "max-tokens-2", (*PLAIN, f"stop.max_tokens={MAX_TOKENS}")),
    Spec(2, "max-time", (*PLAIN, "stop.max_time_s=0.001")),
    Spec(1, "patience", (*PLAIN, STILL, "evaluate.every_steps=2", "stop.patience=3")),
    Spec(1, "best", BEST),
    Spec(1, "never-better", (*PLAIN, STILL, "checkpoint.keep_best=true", "stop.max_steps=2")),
    Spec(1, "roomy-1", SEVERAL_PACKS),
    Spec(2, "roomy-2", SEVERAL_PACKS),
    Spec(2, "elsewhere", SEVERAL_PACKS, {"memory": 3}),
    Spec(2, "elsewhere", SEVERAL_PACKS),
    *(
        spec
        for what, (plain, degree) in DIVIDED.items()
        for spec in (
            Spec(1, f"{what}-one", plain),
            Spec(2, f"{what}-two", (*plain, degree, "parallel.strategy=fsdp")),
            Spec(2, f"{what}-broken", (*plain, degree, "parallel.strategy=fsdp"), {"step": 7}),
            Spec(1, f"{what}-broken", plain),
        )
    ),
)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "e2e"
    once(folder, "place", lambda: (write_place(folder), "")[1])
    return Place(folder)


@pytest.fixture(scope="session")
def whole(place: Place) -> tuple[Ended, Run]:
    """``manyhands train --gpus 2`` in a process of its own: DDP, LoRA with dropout, from the first step to the verified
    adapter.
    """

    def train() -> str:
        ended = place.call(*train_command("whole", "--gpus", "2"))
        return json.dumps(dataclasses.asdict(ended))

    return Ended(**json.loads(once(place.folder, "whole", train))), place.run("whole")


@pytest.fixture(scope="session")
def many(place: Place) -> str:
    """The output of ``MANY`` under torchrun, in one set of two processes."""

    def train() -> str:
        write_tiny_model(place.folder / "mixture", "qwen3_moe", num_hidden_layers=2)
        return place.many(*MANY)

    return once(place.folder, "many", train)


def once(folder: Path, name: str, make: Callable[[], str]) -> str:
    """What ``make`` returned in the first process of the session that came here."""
    folder.mkdir(exist_ok=True)
    kept = folder / f"{name}.made"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            text = make()
            kept.write_text(text)
        return kept.read_text()
