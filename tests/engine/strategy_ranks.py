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

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.config.schema import RunConfig
from manyhands.convert.adapter import load_adapter_state
from manyhands.engine.native import Parallel
from manyhands.engine.optimizer_offload import StreamedOptimizer
from manyhands.export.model import export_model
from manyhands.model.blocks import find_blocks
from manyhands.plan.types import Plan
from manyhands.train.optimizer import make_optimizer
from manyhands.train.step import clip_gradients
from tests.support.layouts import Documents, build, count_loss_tokens, pack, random_adapter

CLIP = 1.0
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
    parallel = build(plan, config)
    load_adapter_state(parallel.model, random_adapter(parallel.model, start=True))
    optimizer = make_optimizer(parallel.model, config.optimizer, 1e-2, list(find_blocks(parallel.model)))
    if plan.offload == "optimizer":
        optimizer = StreamedOptimizer(optimizer, parallel.world.device, CHUNK_BYTES)
    if resume is not None:
        load_checkpoint(resume, parallel.model, optimizer)
    results = [_step(parallel, optimizer, layout) for _ in range(num_steps)]
    rank, world_size = parallel.world.rank, parallel.world.world_size
    if save is not None:
        save_checkpoint(save, parallel.model, optimizer, {}, rank=rank, world_size=world_size)
    if export is not None:
        export_model(
            export, parallel.model, Path(plan.model_folder), "float32", rank=rank, merge=config.method.name != "full"
        )
    return results


def _step(
    parallel: Parallel, optimizer: torch.optim.Optimizer, layout: Sequence[Sequence[Documents]]
) -> tuple[float, float]:
    rank, world_size = parallel.world.rank, parallel.world.world_size
    num_loss_tokens = sum(count_loss_tokens(documents) for micro in layout for documents in micro)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for index, micro in enumerate(layout):
        parallel.set_gradient_sync(index == len(layout) - 1)
        loss = parallel(pack([document for r in range(rank, len(micro), world_size) for document in micro[r]]))["lm"][0]
        (loss / num_loss_tokens).backward()
        loss_sum += loss.detach()
    norm = parallel.gradient_norm()
    clip_gradients(optimizer, norm, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(parallel.all_reduce_sum(loss_sum)) / num_loss_tokens, float(norm)


def count_reductions(plan: Plan, config: RunConfig, layout: Sequence[Sequence[Documents]]) -> dict[str, Any]:
    """Reduce-scatters of one step, and the parameters that got a gradient."""
    parallel = build(plan, config)
    with mock.patch.object(dist, REDUCE, wraps=getattr(dist, REDUCE)) as reduced:
        for index, micro in enumerate(layout):
            parallel.set_gradient_sync(index == len(layout) - 1)
            mine = [
                document for r in range(dist.get_rank(), len(micro), dist.get_world_size()) for document in micro[r]
            ]
            parallel(pack(mine))["lm"][0].backward()
    optimizer = make_optimizer(parallel.model, config.optimizer, 1e-2)
    optimizer.step()
    with_gradient = {name for name, p in parallel.model.named_parameters() if p.grad is not None}
    trained = {name for name, p in parallel.model.named_parameters() if p.requires_grad}
    return {"count": reduced.call_count, "gradients": with_gradient, "trained": trained, "states": len(optimizer.state)}
