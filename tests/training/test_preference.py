"""Preference losses against their formulas written down in float64, and whole runs on pairs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from manyhands.config.schema import PreferenceSection
from manyhands.config.tasks import PAIRS, TASKS, Task
from manyhands.core.errors import UserError
from manyhands.core.terms import LossTerm
from manyhands.infer.compare import compare
from manyhands.preview.collect import BETWEEN_DOCUMENTS, collect
from manyhands.worker import stages
from manyhands.worker.batches import iterate_steps
from manyhands.worker.reference import attach_reference
from tests.keys.lab import Lab, LabRank, open_lab
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
    (ALL, True, True, 4),
)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_a_loss_is_its_formula_however_pairs_are_laid_out(world, keys: dict[str, Any]) -> None:
    for method in ("lora", "stored") if keys["loss"] not in ("cpo", "simpo", "orpo") else ("lora", "full"):
        loss, figures, gradient = reference(keys, method)
        for cuts, packed, fuse, size in WAYS[:6] if method == "lora" else WAYS[::3]:
            arguments = (keys, cuts, packed, fuse, method)
            for found in world.run("tests.training.preference_ranks:compute", *arguments, world_size=size):
                assert found[0] == pytest.approx(loss, rel=1e-5)
                assert found[1] == pytest.approx(figures, rel=1e-4)
                assert (found[2] - gradient).norm() <= 1e-5 * gradient.norm()


def test_every_loss_is_held_to_its_formula() -> None:
    assert {keys["loss"] for keys in LOSSES} == set(get_args(PreferenceSection.model_fields["loss"].annotation))


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
    found = compare(ran.folder)
    names = {"preference_accuracy", "reward_margin"}
    assert found.columns["measured"].keys() == names and "base" not in found.columns
    assert found.columns["measured"] == pytest.approx({name: last[name] for name in names}, rel=1e-3)
    with pytest.raises(UserError, match="rewards compare with the model before training"):
        compare(ran.folder, with_base=False)
    with pytest.raises(UserError, match="the loss of preferences is measured by the evaluations"):
        compare(ran.folder, metrics=["loss"])


def test_a_stored_reference_is_that_of_adapters_switched_off(lab: Lab) -> None:
    """Computed once for all launches of the same base, whatever else they train, and read by processes that collate."""
    keys = {"task": "preference", "seed": 5, **keys_of_pairs(lab), "optimizer.learning_rate": 0.02}
    off = lab.run({**keys, "preference.reference": "adapters"})
    stored = lab.run({**keys, "data.workers": 1})
    assert stored.rank.plan.reference == "stored" and "60 samples computed" in stored.rank.terminal.getvalue()
    assert stored.losses == pytest.approx(off.losses, rel=1e-5) and off.losses[-1] < 0.6
    assert stored.column("reward_margin", "evaluation") == pytest.approx(
        off.column("reward_margin", "evaluation"), rel=1e-4, abs=1e-6
    )
    again = lab.run({**keys, "method.rank": 2})
    assert "reference: read from" in again.rank.terminal.getvalue()
    other = lab.copy_model()
    weights = load_file(other / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    changed = lab.run({**keys, "model.name": str(other), "stop.epochs": 2})
    assert "60 samples computed" in changed.rank.terminal.getvalue()


def test_full_training_resumes_with_the_reference_of_its_start(lab: Lab) -> None:
    """Also where the stored values are gone, or reach less far than the run does now."""
    keys = {"task": "preference", "seed": 6, "method.name": "full", **keys_of_pairs(lab), "evaluate.prompts": 0}
    del keys["stop.epochs"]
    keys |= {"checkpoint.every_steps": 2, "checkpoint.asynchronous": False, "optimizer.learning_rate": 0.01}
    whole = lab.run({**keys, "stop.max_steps": 4, "schedule.name": "constant", "schedule.warmup_steps": 0})
    text = whole.rank.terminal.getvalue()
    assert whole.rank.plan.reference == "stored" and whole.losses[0] == pytest.approx(math.log(2), rel=1e-5)
    path = Path(text.partition("kept in ")[2].partition("\n")[0])
    shutil.rmtree(whole.rank.folder.checkpoints / "step-000004")
    kept = path.read_bytes()
    for damaged in (b"", kept[:-1], kept):
        path.write_bytes(damaged)
        rank = LabRank(whole.rank.config, whole.rank.plan, whole.rank.folder)
        rank.data = stages.open_data(rank.rank)
        rank.checkpoint = stages.find_checkpoint(rank.rank)
        rank.build()
        rank.data = attach_reference(rank.rank, rank.data, rank.built)
        assert ("read from" in rank.terminal.getvalue()) == (damaged == kept)
        found = np.frombuffer(path.read_bytes()[:-32])
        assert np.allclose(found, np.frombuffer(kept[:-32]), rtol=1e-6, equal_nan=True)
        assert 0 < np.isnan(found).sum() < len(found)  # of what the run does not read
        rank.resume()
        assert rank.state.step == 2
        batch = next(iter(next(iter(iterate_steps(rank.rank, rank.data, rank.loss_model, 2))).micro_batches))
        loss, weight = rank.loss_model(batch)["preference"]
        assert float(loss.detach() / weight) == pytest.approx(whole.losses[2], rel=1e-5)


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
