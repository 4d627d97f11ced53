"""What the rank of ``test_masters`` does: a few steps of full bfloat16 training in one process, by the copy or by
FSDP2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.engine.apply import apply
from manyhands.engine.native import NativeEngine
from manyhands.planner.types import Plan
from manyhands.training.optimizer import make_optimizer
from manyhands.training.step import StepWork, TermWeight, compute_gradients
from tests.support.building import on_meta
from tests.support.layouts import Documents, count_loss_tokens, pack

LEARNING_RATE = 1e-2


def build(plan: Plan, config: RunConfig, *, sharded: bool = False) -> NativeEngine:
    """The model of ``plan`` as a run builds it; ``sharded``: by ``fully_shard`` on a (1, 1) mesh all the same."""
    if sharded:
        plan = plan.model_copy(update={"layout": replace(plan.layout, wrapper="fully_shard", compute_copy="gathered")})
    loss_model, load = on_meta(plan, config)
    return apply(loss_model, plan, World(0, 0, 1, torch.device("cpu")), load)


def train(
    plan: Plan, config: RunConfig, steps: list[list[Documents]], max_grad_norm: float, sharded: bool
) -> dict[str, Any]:
    """``steps[step][micro]``; after each step an evaluation and the logits of the first documents."""
    engine = build(plan, config, sharded=sharded)
    assert (engine._copy is None) == sharded
    engine.optimizer = make_optimizer(engine.model, config.optimizer, LEARNING_RATE)
    probe = pack(steps[0][0])
    found: dict[str, list[float]] = {"losses": [], "norms": [], "evaluations": []}
    logits = []
    for number, micros in enumerate(steps):
        weight = sum(count_loss_tokens(documents) for documents in micros)
        work = StepWork(
            step=number,
            epoch=0.0,
            num_samples=0,
            num_tokens=0,
            num_loss_tokens=0,
            num_micro_batches=len(micros),
            weights={"lm": TermWeight(weight, weight)},
            micro_batches=[pack(documents) for documents in micros],
        )
        sums = compute_gradients(engine, work, seed=0, rank=0)
        engine.step(LEARNING_RATE, max_norm=max_grad_norm)
        found["losses"].append(sums.terms["lm"].item())
        found["norms"].append(sums.grad_norm.item())
        with torch.no_grad():
            found["evaluations"].append(engine.forward(probe)["lm"][0].item())
        logits.append(engine.logits(probe).float().numpy())
        logits.append(engine.next_token_logits(probe["input_ids"]).float().numpy())
    return found | {"logits": logits, "weights": weights_of(engine)}


def weights_of(engine: NativeEngine) -> dict[str, np.ndarray]:
    engine.model.state_dict(keep_vars=True)  # FSDP2 gives gathered weights back
    whole = {name: p.detach() for name, p in engine.model.named_parameters()}
    assert {p.dtype for p in whole.values()} == {torch.float32}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).numpy() for name, p in whole.items()}
