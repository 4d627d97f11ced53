"""What the ranks of ``test_narrow_masters`` do: steps of full training with masters in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.holding import first_index, gather, local
from manyhands.kernels.adamw import FusedAdamW
from manyhands.planner.types import Plan
from manyhands.training.optimizer import make_optimizer
from manyhands.training.step import StepWork, TermWeight, compute_gradients
from tests.support.layouts import Documents, build, count_loss_tokens, documents_of, pack


def train(
    plan: Plan,
    config: RunConfig,
    layout: Sequence[Sequence[Documents]],
    num_steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    learning_rate: float = 1e-2,
) -> dict[str, Any]:
    """``layout[micro][rank]``, as in ``tests/support/layouts.py``; every step has the same documents."""
    engine = build(plan, config)
    streamed = {} if plan.layout.offload == "none" else {"stream_to": engine.world.device}
    make = partial(FusedAdamW, backend="eager", seed=config.seed, first_index=first_index, **streamed)
    engine.optimizer = optimizer = make_optimizer(engine.model, config.optimizer, learning_rate, make_adamw=make)
    start = 0 if resume is None else int(engine.load(resume)["step"])
    mine = [documents_of(engine.world, micro) for micro in layout]
    weight = sum(count_loss_tokens(documents) for micro in layout for documents in micro)
    losses, norms, gradients = [], [], []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({str(p.grad.dtype) for p in engine.model.parameters()})
    )
    for step in range(start, start + num_steps):
        weights = {"lm": TermWeight(weight, 0)}
        work = StepWork(step, 0.0, 0, 0, 0, len(mine), weights, [pack(documents) for documents in mine])
        sums = compute_gradients(engine, work, seed=0, rank=engine.world.rank)
        engine.step(learning_rate, max_norm=1.0)
        losses.append(float(engine.all_reduce_sum(sums.terms["lm"])) / weight)
        norms.append(sums.grad_norm.item())
    if save is not None:
        engine.save(save, {"step": start + num_steps})
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": set.union(*gradients),
        "dtypes": {str(tensor.dtype) for tensor in (*engine.model.parameters(), *states)},
        "weights": {name: gather(p).float().numpy() for name, p in engine.model.named_parameters()},
        "shares": {local(p).numel() / p.numel() for p in engine.model.parameters()},
    }


def sum_alike(plan: Plan, config: RunConfig, documents: Documents, times: int) -> dict[str, tuple[Any, Any]]:
    """By parameter the gradient of ``documents``, which rank 0 alone has, and that of a step of ``times`` such
    micro-batches.
    """
    engine = build(plan, config)
    batch = pack(documents if engine.world.rank == 0 else [])
    found = []
    for num_micro in (1, times):
        for index in range(num_micro):
            engine.backward(engine.forward(batch)["lm"][0], last=index == num_micro - 1)
        found.append({name: gather(p.grad).float().numpy() for name, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    return {name: (found[0][name], found[1][name]) for name in found[0]}
