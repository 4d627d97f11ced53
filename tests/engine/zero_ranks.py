"""What the ranks do for ``test_deepspeed``: a few steps of any strategy through its own engine, saved, gone on from and
exported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.engine.apply import apply
from manyhands.export.model import export_model
from manyhands.planner.types import Plan
from tests.engine.strategy_ranks import CLIP, LEARNING_RATE, take_step
from tests.support.building import on_meta
from tests.support.layouts import Documents, documents_of, pack
from tests.support.plans import change_plan


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """torch's extensions may not be compiled within, which takes minutes, and can hang."""
    with tempfile.TemporaryDirectory() as built, mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=built):
        yield
        assert not os.listdir(built)


@nothing_compiled()
def run_steps(
    plan: Plan,
    config: RunConfig,
    layout: Sequence[Sequence[Documents]],
    num_steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    export: Path | None = None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; every step has the same documents."""
    grouped = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    world = World(rank, rank, world_size, torch.device("cpu"))
    loss_model, load = on_meta(plan, config, resumes=resume is not None)
    everything = all(parameter.requires_grad for parameter in loss_model.parameters())
    plan = change_plan(plan, trains_everything=everything, learning_rate=LEARNING_RATE)
    engine: Any = apply(loss_model, plan, world, load, config)
    engine.make_optimizer(plan, config)
    if resume is not None:
        assert engine.load(resume) == {"step": 2}
    results = [take_step(engine, layout) for _ in range(num_steps)]
    if save is not None:
        engine.save(save, {"step": num_steps})
    if export is not None:
        merge, source = config.method.name != "full", Path(plan.model_folder)
        export_model(export, engine.model, source, "float32", rank=rank, merge=merge)
    return results


def run_dropped(plan: Plan, config: RunConfig, layout: Sequence[Sequence[Documents]]) -> list[float]:
    """Gradient norms of the same step: after gradients that were dropped, without, and so after an update."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    loss_model, load = on_meta(plan, config)
    plan = change_plan(plan, trains_everything=True, learning_rate=1e-20)  # the same weights at each step
    engine: Any = apply(loss_model, plan, world, load, config)
    engine.make_optimizer(plan, config)

    def step(factor: float = 1.0) -> float:
        for index, micro in enumerate(layout):
            engine.backward(
                engine.forward(pack(documents_of(world, micro)))["lm"][0] * factor, last=index == len(layout) - 1
            )
        return float(engine.gradient_norm())

    found: list[float] = []
    for drops in (True, False, True):  # at the start, not at all, after a step
        if drops:
            step(3.0)
            engine.drop_gradients()
        found.append(step())
        engine.step(1e-20, max_norm=CLIP)
    return found
