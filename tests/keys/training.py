"""Effects of ``optimizer.*``, ``schedule.*`` and ``stop.*``, seen in the course of a run of five steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.training.guards import Diverged
from tests.keys.lab import NUM_STEPS, Lab
from tests.keys.table import first_difference


def optimizer_name(lab: Lab) -> None:
    for name in ("adafactor", "muon"):
        assert first_difference(lab, lab.run({"optimizer.name": name})) == 2
    assert set(next(iter(lab.run({"optimizer.name": "muon"}).rank.engine.optimizer.state.values()))) == {
        "momentum_buffer"
    }
    for dtype in ("float32", "bfloat16"):  # of its iterations: as the model computes
        assert lab.run({"optimizer.name": "muon", "model.dtype": dtype}).rank.engine.optimizer.dtype == getattr(
            torch, dtype
        )
    for name in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit"):
        with pytest.raises(UserError, match="GPUs only"):
            lab.prepare({"optimizer.name": name})


def learning_rates(lab: Lab) -> None:
    """The first pattern that fits sets the peak, the schedule scales it, and the log has each; others keep theirs."""
    rates = {"q_proj.lora_B": 1e-2, "lora_B": 1e-3}
    ran = lab.run({"optimizer.learning_rates": rates, "schedule.name": "linear"})
    assert [row.get(key, 0.0) for row in ran.column("learning_rates") for key in rates] == pytest.approx(
        [peak * (1 - step / NUM_STEPS) for step in range(NUM_STEPS) for peak in rates.values()]
    )
    assert ran.rates[0] == 1.0 and first_difference(lab, lab.run({"optimizer.learning_rates": rates})) == 2
    with pytest.raises(UserError, match=r"'lora_C' of .* chooses no trained weight"):
        lab.start({"optimizer.learning_rates": {"lora_C": 1.0}})
    with pytest.raises(UserError, match="patterns before it take all"):
        lab.start({"optimizer.learning_rates": {"lora_B": 1.0, "q_proj.lora_B": 1.0}})


def part_learning_rates(lab: Lab) -> None:
    """A text model has no parts (test_optimizer.py and plan/test_parts.py have the rates of one that does)."""
    with pytest.raises(UserError, match=r"set optimizer\.learning_rate"):
        lab.prepare({"optimizer.part_learning_rates": {"language": 1e-3}})


def betas(key: str) -> Any:
    """Adam's first update is g / |g| whatever they are, but for rounding: they act from the third loss on."""

    def check(lab: Lab) -> None:
        losses = lab.run({key: 0.5}).losses
        assert losses[:2] == pytest.approx(lab.base.losses[:2], rel=1e-6)
        assert losses[2] != pytest.approx(lab.base.losses[2], rel=1e-4)

    return check


def eps(lab: Lab) -> None:
    """An eps far above every gradient leaves next to nothing of an update."""
    assert first_difference(lab, lab.run({"optimizer.eps": 1e3})) == 2
    losses = lab.run(
        {"optimizer.eps": 1e6, "optimizer.max_grad_norm": 0.0, "batch.samples": 40, "stop.epochs": 3}
    ).losses
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def max_grad_norm(lab: Lab) -> None:
    """Clipped far below eps, gradients move nothing; clipped at half, they move weights otherwise than clipped at 1."""
    losses = lab.run({"optimizer.max_grad_norm": 1e-15, "batch.samples": 40, "stop.epochs": 3}).losses
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert max(lab.base.column("grad_norm")) > 0.5
    assert first_difference(lab, lab.run({"optimizer.max_grad_norm": 0.5})) > 0


def max_tokens(lab: Lab) -> None:
    limit = sum(lab.base.column("num_tokens")[:3]) + 1
    state = lab.run({"stop.max_tokens": limit}).rank.state
    assert state.step == 3 and state.tokens == limit - 1 and "stop.max_tokens" in state.stop_reason


def max_time_s(lab: Lab) -> None:
    state = lab.run({"stop.max_time_s": 1e-6}).rank.state
    assert state.step == 1 and "stop.max_time_s" in state.stop_reason
    assert lab.run({"stop.max_time_s": 1e6}).rank.state.step == NUM_STEPS


def patience(lab: Lab) -> None:
    """Steps too small to change a weight bring no lower loss."""
    still = {"optimizer.learning_rate": 1e-30, "evaluate.every_steps": 1}
    state = lab.run(still | {"stop.patience": 2}).rank.state
    assert state.step == 2 and "stop.patience" in state.stop_reason
    assert lab.run(still).rank.state.step == NUM_STEPS


RISING = {
    "method.name": "full",
    "optimizer.learning_rate": 1.0,
    "schedule.name": "constant",
    "schedule.warmup_steps": 5,
    "stop.epochs": 3,
}


def ended_at(lab: Lab, keys: dict[str, Any]) -> int:
    """The step after which a run whose loss rises from 5.7 over 15 and 40 to 100 is ended as diverged."""
    rank = lab.start(RISING | keys)
    with pytest.raises(Diverged, match="training has diverged: the loss is"):
        lab.train(rank)
    assert "Training diverged" in (rank.folder.path / "report.md").read_text()
    return rank.state.step


def divergence(lab: Lab) -> None:
    """An absurd rate leaves a gradient of exactly 0: the run is ended, or goes on and its report says so."""
    absurd = {"optimizer.learning_rate": 1000.0}
    with pytest.raises(Diverged, match=r"the gradient of step 3 is exactly 0 at loss 5\.5"):
        lab.train(lab.start(absurd | {"stop.divergence": "fail"}))
    ran = lab.run(absurd | {"stop.divergence": "warn"})
    assert len(ran.losses) == NUM_STEPS and "the gradient of step 3 is exactly 0" in ran.rank.state.divergence
    said = ran.rank.terminal.getvalue()
    assert said.count("warning: the gradient of step 3") == 1 and "(stop.divergence: warn)" in said


def divergence_factor(lab: Lab) -> None:
    keys = {"stop.divergence_steps": 3}
    assert (ended_at(lab, keys), ended_at(lab, keys | {"stop.divergence_factor": 2.0})) == (8, 6)


def divergence_steps(lab: Lab) -> None:
    assert (ended_at(lab, {"stop.divergence_steps": 3}), ended_at(lab, {"stop.divergence_steps": 5})) == (8, 10)


def loss_above(lab: Lab) -> None:
    """A bound that every loss of this run is above: ended at the third step, or as asked."""
    for keys, step in (({}, 3), ({"stop.loss_above_steps": 2}, 2)):
        rank = lab.start({"stop.loss_above": 0.5} | keys)
        with pytest.raises(Diverged, match=rf"the loss is .* at step {step}"):
            lab.train(rank)
    assert lab.run({"stop.loss_above": 50.0}).losses == lab.base.losses


def decay_embeddings(lab: Lab) -> None:
    keys = {"method.name": "full", "optimizer.weight_decay": 0.5}
    ran, other = (lab.run(keys | more) for more in ({}, {"optimizer.decay_embeddings": True}))
    name = "model.embed_tokens.weight"
    kept, decayed = (run.rank.model.get_parameter(name).norm() for run in (ran, other))
    assert decayed < kept and ran.losses[0] == other.losses[0] and ran.losses[1] != other.losses[1]
