"""Effects of ``guards.*``: what becomes of a run in which one step's gradient is not finite, or one loss is far off."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from manyhands.training import loop
from manyhands.training.guards import Diverged
from manyhands.training.step import StepSums
from manyhands.training.types import TrainState
from manyhands.worker import training
from tests.keys.lab import Lab, Ran

FAR = 50.0  # nats added to a loss
CALM = [5.6, 5.7] * 10  # about what the model has before training


@contextlib.contextmanager
def poisoned(*steps: int, far: bool = False) -> Iterator[None]:
    """Within, the gradients of these steps, counted from 1, are not finite; or ``far``: their losses are too high."""
    compute = loop.compute_gradients

    def planted(engine: Any, work: Any, **options: Any) -> StepSums:
        sums = compute(engine, work, **options)
        if work.step + 1 not in steps:
            return sums
        if far:
            shift = FAR * work.weights["lm"].own
            return StepSums({"lm": sums.terms["lm"] + shift}, sums.grad_norm, sums.worked_until)
        for parameter in engine.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan)
        return StepSums(sums.terms, sums.grad_norm * math.nan, sums.worked_until)

    with mock.patch.object(loop, "compute_gradients", planted):
        yield


def run_poisoned(lab: Lab, keys: dict[str, Any], *steps: int, far: bool = False) -> Ran:
    rank = lab.start(keys)
    if far:
        rank.state.losses_before = list(CALM)
    with poisoned(*steps, far=far):
        return lab.train(rank)


def weights(ran: Ran) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ran.rank.model.named_parameters() if p.requires_grad}


def same(first: Ran, second: Ran) -> bool:
    others = weights(second)
    return all(torch.equal(one, others[name]) for name, one in weights(first).items())


def nonfinite(lab: Lab) -> None:
    """Skipped, the step leaves the weights as they are; rolled back, the run ends with the same bits."""
    rank = lab.start()
    with poisoned(3), pytest.raises(Diverged, match="step 3 gave loss"):
        lab.train(rank)
    kept = json.loads((rank.folder.logs / "batch-000003.json").read_text())
    order = rank.order.samples(0, 2).tolist()
    assert sorted(one["sample"] for one in kept["samples"]) == sorted(order) and kept["fault"] == "nonfinite"
    line = kept["samples"][0]["line"]
    assert line == rank.store.line(kept["samples"][0]["sample"]) and "rows.jsonl" in kept["samples"][0]["source"]
    skipped = run_poisoned(lab, {"guards.nonfinite": "skip"}, 3)
    assert skipped.column("skipped") == [False, False, True, False, False]
    assert skipped.losses[:3] == lab.base.losses[:3] and skipped.losses[3] != lab.base.losses[3]
    keys = {"guards.nonfinite": "rollback", "checkpoint.every_steps": 1}
    rolled = run_poisoned(lab, keys, 3)
    assert rolled.rank.state.left_out == [2] and rolled.rank.state.num_rollbacks == 1
    assert rolled.column("step") == [1, 2, 3, 4, 5] and rolled.losses == skipped.losses and same(rolled, skipped)
    with pytest.raises(Diverged, match="no checkpoint to roll back to"):
        run_poisoned(lab, {"guards.nonfinite": "rollback"}, 3)


def spike(lab: Lab) -> None:
    for action, is_skipped in (("off", False), ("warn", False), ("skip", True)):
        ran = run_poisoned(lab, {"guards.spike": action, "stop.divergence": "warn"}, 2, far=True)
        assert ran.column("skipped")[1] == is_skipped
        assert (ran.folder / "logs/batch-000002.json").exists() == (action != "off")
    rolled = run_poisoned(lab, {"guards.spike": "rollback", "checkpoint.every_steps": 1}, 2, far=True)
    assert rolled.rank.state.left_out == [1]


def _jumps(lab: Lab, keys: dict[str, Any], before: list[float]) -> bool:
    rank = lab.start({"guards.spike": "skip", "stop.max_steps": 1} | keys)
    rank.state.losses_before = before
    with poisoned(1, far=True):
        return lab.train(rank).column("skipped")[0]


def spike_mads(lab: Lab) -> None:
    noisy = [1.0, 21.0] * 10
    assert not _jumps(lab, {}, noisy) and _jumps(lab, {"guards.spike_mads": 1.0}, noisy)


def spike_window(lab: Lab) -> None:
    ran = run_poisoned(lab, {"guards.spike_window": 16, "stop.max_steps": 2}, far=True)
    assert len(ran.rank.state.losses_before) == 16 < len(lab.base.rank.state.losses_before) + len(CALM)


def max_in_a_row(lab: Lab) -> None:
    keys = {"guards.nonfinite": "skip", "guards.max_in_a_row": 2}
    with pytest.raises(Diverged, match="2 steps in a row were skipped"):
        run_poisoned(lab, keys, 2, 3, 4)
    assert run_poisoned(lab, keys | {"guards.max_in_a_row": 3}, 2, 3, 4).rank.state.num_skipped == 3


def leave_out(lab: Lab) -> None:
    """As far as the checkpoint does not have the steps already."""
    for every, left_out in ((2, [2, 3]), (1, [3])):
        keys = {"guards.nonfinite": "rollback", "checkpoint.every_steps": every, "guards.leave_out": 2}
        ran = run_poisoned(lab, keys, 4)
        assert ran.rank.state.left_out == left_out
        assert [step for step, skipped in enumerate(ran.column("skipped")) if skipped] == left_out


def replicas_every(lab: Lab) -> None:
    """Two ranks are needed to differ (``tests/e2e/test_guards.py``); here, how often the weights are compared."""
    taken: list[int] = []
    make: Callable[..., Any] = training.make_replicas
    with mock.patch("manyhands.worker.guards.replica_groups", lambda layout: [0]):
        for every, steps in ((2, [0, 2, 4]), (0, [])):
            taken.clear()
            rank = lab.start({"guards.replicas_every": every})

            def watched(*given: Any) -> Any:
                found = make(*given)
                if found is not None:
                    compare = found.compare
                    found.compare = lambda state, prints: (
                        taken.append(state.step) if prints[0] else None,
                        compare(state, prints),
                    )
                return found

            with mock.patch.object(training, "make_replicas", watched):
                lab.train(rank)
            assert taken == steps
    assert TrainState().replicas_equal_at is None
