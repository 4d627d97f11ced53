"""A plain transformers.Trainer, with PEFT for LoRA, computes on the same rows what we compute.

The short version of benchmarks/reference.py, which runs the real model: a tiny one, 6 steps, accumulation 4, rows of 5
to 100 tokens of which one to almost all are trained, clipping in some steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reference
from benchmarks.reference import Settings
from tests.support import equality

TIGHT = 1e-5  # held on a tiny model at every step; the bounds of the real one are wider


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    equality.write_workspace(folder)
    return folder


def settings(workspace: Path, **changes: object) -> Settings:
    values = {
        "steps": 6,
        "max_length": 256,
        "learning_rate": 1e-3,
        "max_grad_norm": equality.CLIP,
        "lora_rank": 8,
        "device": "cpu",
    }
    return Settings(workspace / "model", workspace / "rows.jsonl", workspace, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        {"method": "full"},
        {"method": "full", "packed": True, "schedule": "linear"},
        {"method": "lora", "weight_decay": 0.1},
        {"method": "lora", "packed": True, "schedule": "constant"},
    ],
    ids=lambda case: f"{case['method']}{', packed' if case.get('packed') else ''}",
)
def test_trainer_computes_the_same(workspace: Path, case: dict[str, object]) -> None:
    chosen = settings(workspace, **case)
    ours = reference.run_ours(chosen)
    theirs = reference.run_trainer(reference.make_trainer(chosen, ours))
    deviations = reference.compare(ours.curve, theirs)
    assert len(theirs.losses) == 6
    assert deviations.within, deviations
    assert max(deviations.largest_loss, deviations.largest_norm) <= TIGHT, deviations
    assert ours.curve.losses[-1] != pytest.approx(ours.curve.losses[0], rel=1e-2)  # something was trained
    if chosen.packed:
        assert max(ours.num_micro_batches) != chosen.accumulation  # another layout than the Trainer's


def test_a_mean_of_means_is_seen(workspace: Path) -> None:
    """The rows are ragged enough: a Trainer that averages its micro-batches' means fails the same comparison."""
    chosen = settings(workspace, method="full", steps=2)
    ours = reference.run_ours(chosen)
    trainer = reference.make_trainer(chosen, ours)
    trainer.model_accepts_loss_kwargs = False
    deviations = reference.compare(ours.curve, reference.run_trainer(trainer))
    assert not deviations.within
    assert deviations.first_loss > 100 * reference.FIRST_LOSS


def test_another_learning_rate_is_seen(workspace: Path) -> None:
    chosen = settings(workspace, method="lora", steps=3)
    ours = reference.run_ours(chosen)
    trainer = reference.make_trainer(settings(workspace, method="lora", steps=3, schedule="constant"), ours)
    deviations = reference.compare(ours.curve, reference.run_trainer(trainer))
    assert deviations.first_loss <= reference.FIRST_LOSS and not deviations.within
