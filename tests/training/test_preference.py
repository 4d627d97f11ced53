"""Preference losses against their formulas written down in float64, and whole runs on pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.config.tasks import PAIRS, TASKS, Task
from manyhands.core.errors import UserError
from manyhands.core.terms import LossTerm
from manyhands.preview.collect import BETWEEN_DOCUMENTS, collect
from tests.keys.lab import Lab, open_lab
from tests.training import door_ranks
from tests.training.preference_ranks import LOSSES, NUM_PAIRS, reference

ALL = [list(range(NUM_PAIRS))]
ALONE = [[number] for number in range(NUM_PAIRS)]
WAYS = (  # micro-batches, packed, fused with the head, ranks
    (ALL, True, True, 1),
    (ALONE, True, True, 1),
    (ALL, False, True, 1),
    ([[0, 1, 2], [3, 4]], True, False, 1),
    (ALONE, True, True, 2),  # the second rank has none of them
    (ALL, True, True, 2),
)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_a_loss_is_its_formula_however_pairs_are_laid_out(world, keys: dict[str, Any]) -> None:
    methods = ("lora",) if keys["loss"] not in ("cpo", "simpo", "orpo") else ("lora", "full")
    for method in methods:
        loss, figures, gradient = reference(keys, method)
        for cuts, packed, fuse, size in WAYS if method == "lora" else WAYS[::5]:
            arguments = (keys, cuts, packed, fuse, method)
            for found in world.run("tests.training.preference_ranks:compute", *arguments, world_size=size):
                assert found[0] == pytest.approx(loss, rel=1e-5)
                assert found[1] == pytest.approx(figures, rel=1e-4)
                assert (found[2] - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("preference")) as lab:
        yield lab


def keys_of_pairs(lab: Lab) -> dict[str, Any]:
    rows = [{"prompt": f"alpha {n % 7}", "chosen": "beta " * (1 + n % 3), "rejected": f"gamma {n}"} for n in range(60)]
    return {"data.train": lab.write_rows("pairs.jsonl", rows), "stop.epochs": 3, "evaluate.prompts": 1}


def test_a_whole_run_learns_which_answer_is_chosen(lab: Lab) -> None:
    keys = {"task": "preference", "method.dropout": 0.1, "optimizer.learning_rate": 0.02, **keys_of_pairs(lab)}
    ran = lab.export(keys)
    first, *_, last = ran.rows("evaluation")
    assert first["loss"] == pytest.approx(math.log(2)) and first["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < 0.5 and last["preference_accuracy"] > 0.9 and last["reward_margin"] > 0.3
    assert ran.losses[0] == pytest.approx(math.log(2)) and ran.adapter()
    card = (ran.folder / "adapter" / "README.md").read_text()
    assert "preference tuning on pairs of answers" in card and "preference accuracy" in card.lower()


def test_the_preview_shows_both_answers(lab: Lab) -> None:
    shown = collect(lab.config({"task": "preference", **keys_of_pairs(lab)}), report=lambda line: None)
    chosen, rejected = "".join(span.text for span in shown.rows[0].spans).split(BETWEEN_DOCUMENTS)
    assert "alpha" in chosen and "beta" in chosen and "alpha" in rejected and "gamma" in rejected


def test_a_new_task_of_pairs_enters_by_its_entry(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With terms of its own, and no other file that knows its name."""

    def make_terms(config: Any) -> tuple[LossTerm, ...]:
        return (door_ranks.TERMS["prefer"],)

    task = Task("contrast", "pairs, without a reference", "contrast of pairs", PAIRS, make_terms, num_documents=2)
    monkeypatch.setitem(TASKS, "contrast", task)
    keys = {"task": "contrast", "method.name": "full", **keys_of_pairs(lab)}
    ran = lab.export(keys)
    first, *_, last = ran.rows("evaluation")
    assert last["preferred"] > max(0.9, first["preferred"]) and last["loss"] < first["loss"]
    assert "contrast of pairs" in (ran.folder / "model" / "README.md").read_text()
    with pytest.raises(UserError, match=r"`data.train_on: all` does not fit `task: contrast`"):
        lab.config({**keys, "data.train_on": "all"})
