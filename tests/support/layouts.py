"""What one rank does in the tests of layouts: build a tiny model under a plan and return whole gradients and logits.

Runs inside a process of ``tests/support/ranks.py`` or, for one process, in the test itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.convert.adapter import adapter_state
from manyhands.core.holding import gather
from manyhands.core.seeds import named_generator
from manyhands.core.world import World
from manyhands.engine.apply import apply
from manyhands.engine.native import NativeEngine
from manyhands.model.loss import IGNORED
from manyhands.planner.types import Plan
from tests.support.adapters import load_adapter_state
from tests.support.building import on_meta
from tests.support.plans import change_plan

Documents = Sequence[
    tuple[Sequence[int], Sequence[bool] | Sequence[float]]
]  # token ids, and which are trained or what they weigh


def build(plan: Plan, config: RunConfig) -> NativeEngine:
    """The model of ``plan`` as the worker builds it; on one rank without a process group too."""
    grouped = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    world = World(rank, rank, world_size, torch.device("cpu"))
    loss_model, load = on_meta(plan, config, resumes=True)
    unused = loss_model.images.unused if loss_model.images is not None else set()
    everything = all(p.requires_grad for name, p in loss_model.model.named_parameters() if name not in unused)
    return apply(loss_model, change_plan(plan, trains_everything=everything), world, load)


def pack(documents: Documents) -> dict[str, Any]:
    """A packed micro-batch; two pad tokens where there are no documents."""
    if not documents:
        documents = [([0, 0], [False, False])]
    lengths = [len(ids) for ids, _ in documents]
    labels = [
        [t if m else IGNORED for t, m in zip(ids[1:], trained[1:], strict=True)] + [IGNORED]
        for ids, trained in documents
    ]
    batch = {
        "input_ids": torch.tensor([[token for ids, _ in documents for token in ids]]),
        "position_ids": torch.tensor([[position for n in lengths for position in range(n)]]),
        "labels": torch.tensor([[target for row in labels for target in row]]),
        "cu_seq_lens": torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32),
        "max_length": max(lengths),
    }
    if any(isinstance(weight, float) for _, trained in documents for weight in trained):
        batch["loss_weights"] = torch.tensor(
            [[float(weight) for _, trained in documents for weight in (*trained[1:], 0.0)]]
        )
    return batch


def documents_of(world: World, micro: Sequence[Documents]) -> Documents:
    """Those of this rank, where a micro-batch is given for more ranks than there are."""
    return [document for r in range(world.rank, len(micro), world.world_size) for document in micro[r]]


def count_loss_tokens(documents: Documents) -> float:
    """Trained tokens, or the sum of their weights."""
    return sum(sum(trained[1:]) for _, trained in documents)


def random_adapter(model: torch.nn.Module, start: bool = False) -> dict[str, torch.Tensor]:
    """Factors drawn from their names; empty for a model without adapters. With ``start`` added to what they are."""
    state = adapter_state(model)
    drawn = {
        name: torch.randn(t.shape, generator=named_generator(0, name), dtype=t.dtype) * 0.1 for name, t in state.items()
    }
    return {name: state[name] + tensor for name, tensor in drawn.items()} if start else drawn


def measure(plan: Plan, config: RunConfig, layout: Sequence[Sequence[Documents]]) -> dict[str, Any]:
    """One step without an optimizer. ``layout[micro][rank]`` are the documents of a micro-batch.

    Returns ``loss`` (mean over all labels), ``norm``, ``gradients`` (whole, by parameter name), ``dtypes`` and
    ``logits`` of the first documents, computed after the step's backward pass and again without one before it.
    """
    engine = build(plan, config)
    load_adapter_state(
        engine.model, random_adapter(engine.model, start=True)
    )  # with B = 0 the gradient of A would be zero
    num_loss_tokens = sum(count_loss_tokens(documents) for micro in layout for documents in micro)
    probe = pack(layout[0][0])
    before = engine.logits(probe)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for index, micro in enumerate(layout):
        terms = engine.forward(pack(documents_of(engine.world, micro)))
        engine.backward(terms["lm"][0] / num_loss_tokens, last=index == len(layout) - 1)
        loss_sum += terms["lm"][0].detach()
    gradients = {}
    dtypes = set()
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"no gradient: {name}"
            gradients[name] = gather(parameter.grad).numpy()
            dtypes |= {str(parameter.dtype), str(parameter.grad.dtype)}
    return {
        "loss": float(engine.all_reduce_sum(loss_sum)) / num_loss_tokens,
        "norm": float(engine.gradient_norm()),
        "gradients": gradients,
        "dtypes": dtypes,
        "logits": before.float().numpy(),
        "logits_after": engine.logits(probe).float().numpy(),
        "weights": {name: gather(p).float().numpy() for name, p in engine.model.named_parameters()},
    }
