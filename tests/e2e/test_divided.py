"""Runs whose packs, or whose experts, two processes divide: the course of one process, and resumed by one."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.e2e.runs import NUM_STEPS, Place, Run

pytestmark = pytest.mark.ci


def divided(place: Place, many: str, what: str, near: float) -> tuple[Run, list[Run]]:
    """The run of one process, and those that two divide, to the end or up to step 7."""
    assert "deprecated" not in many
    one, *others = (place.run(f"{what}-{how}") for how in ("one", "two", "broken"))
    assert len(one.seen()) == NUM_STEPS
    for run in others:
        assert run.seen() == one.seen() and run.losses() == pytest.approx(one.losses(), rel=near)
    return one, others


def test_two_processes_divide_packs_and_one_goes_on(place: Place, many: str) -> None:
    one, others = divided(place, many, "context", 1e-5)
    for run in others:
        norms = [[row["grad_norm"] for row in each.rows()] for each in (run, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        figures = [
            [row[key] for row in each.rows("evaluation") for key in ("step", "loss", "accuracy", "num_loss_tokens")]
            for each in (run, one)
        ]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    both = [row["rank_losses"] for row in place.run("context-two").rows()]
    means = [sum(losses) / 2 for losses in both]
    assert means == pytest.approx(one.losses(), rel=1e-5), "each rank's part of the loss, by half of its weight"


def test_two_processes_divide_experts_and_one_goes_on(place: Place, many: str) -> None:
    """The adapter has the names and shapes that PEFT opens."""
    one, others = divided(place, many, "experts", 1e-4)
    names = []
    for run in (one, *others):
        with safe_open(run.folder / "adapter" / "adapter_model.safetensors", "pt") as file:
            names.append([(name, file.get_slice(name).get_shape()) for name in file.keys()])  # noqa: SIM118
    assert names[0] == names[1] == names[2] and any("experts" in name for name, _ in names[0])
