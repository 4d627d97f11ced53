"""Bad numbers on one rank of several: every rank decides alike, and the rank that deviates is named."""

from __future__ import annotations

import pytest

from tests.e2e.runs import NO_VERIFY, NUM_STEPS, Place, at_step

# Rank 1's gradients of step 3 are not finite, before they are reduced.
POISON = {
    "manyhands.training.step": "import torch\n"
    "_share_of = _share\n"
    "import os\n"
    "NUM = [0]\n"
    "_compute = compute_gradients\n"
    "def compute_gradients(engine, work, **options):\n"
    "    NUM[0] = work.step + 1\n"
    "    return _compute(engine, work, **options)\n"
    "def _share(term_sum, weight, coefficient):\n"
    "    bad = NUM[0] == 3 and os.environ.get('RANK') == '1'\n"
    "    return _share_of(term_sum, weight, coefficient) * (float('nan') if bad else 1.0)\n"
}
# The machine has a fault that a launch names.
FEW_FILES = {
    "manyhands.worker.health": "_read_health = read_health\n"
    "def read_health(*arguments): return _read_health(*arguments).model_copy(update={'max_files': 99})\n"
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step_on_all(place: Place, strategy: str) -> None:
    name = f"nan-{strategy}"
    keys = ("guards.nonfinite=skip", f"parallel.strategy={strategy}")
    ended = place.train(name, "--gpus", "2", *keys, plant=POISON | FEW_FILES | NO_VERIFY)
    assert ended.code == 0 and ended.output.count("the update is skipped; its samples: ") == 1, ended.output
    assert ended.output.count("warning: a process may open 99 files (RLIMIT_NOFILE) -> ulimit -n 65536") == 1
    run = place.run(name)
    assert [row["skipped"] for row in run.rows()] == [step == 3 for step in range(1, NUM_STEPS + 1)]
    assert {one["rank"] for one in run.read("logs/batch-000003.json")["samples"]} == {0, 1}
    assert all(row["loss"] for row in run.rows()[3:])


@pytest.mark.slow
def test_a_rank_whose_weights_deviate_is_named(place: Place) -> None:
    act = (
        "import torch\n"
        "with torch.no_grad():\n"
        "    weight = next(p for p in self.engine.model.parameters() if p.requires_grad)\n"
        "    weight.view(-1)[0] += 1e-3"
    )
    ended = place.train(
        "deviates", "--gpus", "3", "parallel.strategy=ddp", "guards.replicas_every=2", plant=at_step(3, act, rank=2)
    )
    assert ended.code == 1 and ended.output.count("error: ") == 1, ended.output
    assert "error: rank 2 holds other trained weights" in ended.output and "equal after step 2" in ended.output
    assert place.run("deviates").read("status.json")["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
def test_ranks_that_hold_other_parts_of_the_weights_are_not_taken_for_deviating(place: Place, strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    keys = ("guards.replicas_every=1", "stop.max_steps=3", f"parallel.strategy={strategy}")
    ended = place.train(f"parts-{strategy}", "--gpus", "2", *keys, file="full.yaml", plant=NO_VERIFY)
    assert ended.code == 0, ended.output
