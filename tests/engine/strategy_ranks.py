"""What the ranks do for ``test_strategies``: a few steps with an optimizer, saved and gone on from; collectives are
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.core.holding import is_full
from manyhands.engine.optimizers import StreamedOptimizer
from manyhands.export.model import export_model
from manyhands.model.structure import find_blocks
from manyhands.planner.types import Plan
from manyhands.training.optimizer import make_optimizer
from tests.support.adapters import load_adapter_state
from tests.support.layouts import Documents, build, count_loss_tokens, documents_of, pack, random_adapter

CLIP = 1.0
LEARNING_RATE = 1e-2
REDUCE = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)  # before torch 2.13
CHUNK_BYTES = 2**15  # several chunks of the tiny model


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
    engine = build(plan, config)
    load_adapter_state(engine.model, random_adapter(engine.model, start=True))
    optimizer = make_optimizer(engine.model, config.optimizer, LEARNING_RATE, list(find_blocks(engine.model)))
    if plan.layout.offload == "optimizer":
        optimizer = StreamedOptimizer(optimizer, engine.world.device, CHUNK_BYTES)
    engine.optimizer = optimizer
    if resume is not None:
        engine.load(resume)
    results = [take_step(engine, layout) for _ in range(num_steps)]
    if save is not None:
        engine.save(save, {})
    if export is not None:
        export_model(
            export,
            engine.model,
            Path(plan.model_folder),
            "float32",
            rank=engine.world.rank,
            merge=config.method.name != "full",
        )
    return results


def take_step(engine: Any, layout: Sequence[Sequence[Documents]]) -> tuple[float, float]:
    """Loss and gradient norm of one step."""
    num_loss_tokens = sum(count_loss_tokens(documents) for micro in layout for documents in micro)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for index, micro in enumerate(layout):
        loss = engine.forward(pack(documents_of(engine.world, micro)))["lm"][0]
        engine.backward(loss / num_loss_tokens, last=index == len(layout) - 1)
        loss_sum += loss.detach()
    norm = engine.gradient_norm()
    engine.step(LEARNING_RATE, max_norm=CLIP)
    return float(engine.all_reduce_sum(loss_sum)) / num_loss_tokens, float(norm)


def count_reductions(plan: Plan, config: RunConfig, layout: Sequence[Sequence[Documents]]) -> dict[str, Any]:
    """Reduce-scatters of one step, and the parameters that got a gradient."""
    engine = build(plan, config)
    with mock.patch.object(dist, REDUCE, wraps=getattr(dist, REDUCE)) as reduced:
        for index, micro in enumerate(layout):
            mine = documents_of(engine.world, micro)
            engine.backward(engine.forward(pack(mine))["lm"][0], last=index == len(layout) - 1)
    optimizer = make_optimizer(engine.model, config.optimizer, 1e-2)
    optimizer.step()
    with_gradient = {name for name, p in engine.model.named_parameters() if p.grad is not None}
    trained = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    return {"count": reduced.call_count, "gradients": with_gradient, "trained": trained, "states": len(optimizer.state)}


def whole_weights(plan: Plan, config: RunConfig, micro: Sequence[Documents]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of weights that are whole on this rank, by name: after the last block's forward pass, and when its backward
    pass begins.
    """
    engine = build(plan, config)
    last = [*find_blocks(engine.model).values()][-1]
    found: list[dict[str, int]] = []

    def count(*_: Any) -> None:
        weights = engine.model.named_parameters()
        found.append({name: p.nbytes for name, p in weights if is_full(p) and p.untyped_storage().size()})

    def after_forward(module: Any, args: Any, output: Any) -> None:
        count()
        (output if isinstance(output, torch.Tensor) else output[0]).register_hook(count)

    last.register_forward_hook(after_forward)
    engine.backward(engine.forward(pack(documents_of(engine.world, micro)))["lm"][0], last=True)
    first, second = found
    return first, second
