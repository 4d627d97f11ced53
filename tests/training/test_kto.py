"""KTO against its formula in float64, and whole runs on judged answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.core.errors import UserError
from tests.keys.lab import Lab, open_lab
from tests.training.kto_ranks import NUM_SAMPLES, reference

ALL, ALONE = [list(range(NUM_SAMPLES))], [[number] for number in range(NUM_SAMPLES)]


@pytest.mark.ci
@pytest.mark.distributed
def test_the_loss_is_its_formula_however_answers_are_laid_out(world) -> None:
    """The KL is of the whole step: one value for all ranks and micro-batches."""
    loss, kl, gradient = reference()
    assert kl > 0.01
    for cuts, packed, size in (
        (ALL, True, 1),
        (ALL, False, 1),
        (ALONE, True, 1),
        ([[0, 1, 2, 3], [4, 5]], True, 2),
        (ALONE, True, 2),
        (ALL, True, 4),
    ):
        for found in world.run("tests.training.kto_ranks:compute", cuts, packed, world_size=size):
            assert found[0] == pytest.approx(loss, rel=1e-5) and found[1] == pytest.approx(kl, abs=1e-5)
            assert (found[2] - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("kto")) as lab:
        yield lab


def write(lab: Lab, **row: Any) -> str:
    rows = [{"prompt": f"alpha {n % 7}", "completion": "beta beta" if n % 2 else f"gamma {n}"} for n in range(60)]
    return lab.write_rows("judged.jsonl", [{**one, "label": bool(n % 2), **row} for n, one in enumerate(rows)])


def test_a_whole_run_learns_which_answers_are_good(lab: Lab) -> None:
    """Packed in one micro-batch or in several, it is the same run; evaluations have one KL for all their samples."""
    keys = {"task": "kto", "data.train": write(lab), "stop.epochs": 3, "optimizer.learning_rate": 0.02}
    ran = lab.run(keys)
    first, *_, last = ran.rows("evaluation")
    assert (first["loss"], first["kl"]) == (0.5, 0) and ran.losses[0] == 0.5
    assert last["loss"] < 0.45 and last["desirable_reward"] > last["undesirable_reward"]
    longest = int(max(part.lengths.max() for part in (ran.rank.store.train, ran.rank.store.validation)))
    small = lab.run({**keys, "data.max_length": longest, "batch.micro_tokens": longest, "data.workers": 1})
    assert small.losses == pytest.approx(ran.losses, rel=1e-5)
    evaluated = small.rows("evaluation")[-1]
    assert evaluated["loss"] == pytest.approx(last["loss"], rel=1e-5) and evaluated["kl"] == pytest.approx(last["kl"])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"label": "good"}, "label must be true"),
        ({"label": None}, "label is null"),
        ({"completion": ""}, "completion is empty"),
        ({"weight": 2}, "every answer weighs 1"),
        ({"label": True}, "answers to train on are labelled good"),
        ({"label": 0}, "answers to train on are labelled bad"),
    ],
)
def test_rows_that_are_no_judged_answers_are_refused(lab: Lab, row: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as error:
        lab.prepare({"task": "kto", "data.train": write(lab, **row), "data.format": "label"})
    assert why in str(error.value)
