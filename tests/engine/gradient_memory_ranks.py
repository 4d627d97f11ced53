"""What ranks of ``test_gradient_memory`` do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from manyhands.config.schema import RunConfig
from manyhands.convert.fp8 import check_fp8
from manyhands.core.holding import local
from manyhands.engine.gradient_memory import GradientMemory
from manyhands.planner.types import Plan
from tests.engine.host_shards_ranks import Block
from tests.support.layouts import Documents, build, pack


class RecordedMemory(GradientMemory):
    """Records of each backward pass whether what it reduces stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def prepare(self, device: torch.device, *, become_gradients: bool) -> None:
        super().prepare(device, become_gradients=become_gradients)
        self.answers.append(become_gradients)


def record(plan: Plan, config: RunConfig, steps: Sequence[Sequence[Documents]]) -> list[list[bool]] | None:
    """Of steps of several micro-batches each; None where the engine keeps no account."""
    engine = build(plan, config)
    if engine._memory is None:
        return None
    engine.optimizer = torch.optim.SGD([p for p in engine.model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for micro_batches in steps:
        engine._memory = recorded = RecordedMemory()
        for index, documents in enumerate(micro_batches):
            loss = engine.forward(pack(documents))["lm"][0]
            engine.backward(loss, last=index == len(micro_batches) - 1)
        engine.step(0.1, max_norm=1.0)
        found.append(recorded.answers)
    return found


def record_after_check(plan: Plan, config: RunConfig, documents: Documents) -> list[bool]:
    """Of the first backward pass after the self-test of fp8, which takes two of its own."""
    engine = build(plan, config)
    engine.optimizer = torch.optim.SGD([p for p in engine.model.parameters() if p.requires_grad], lr=0.1)
    check_fp8(engine, engine.model, pack(documents), seed=0, random_weights=True)
    engine._memory = recorded = RecordedMemory()
    engine.backward(engine.forward(pack(documents))["lm"][0], last=True)
    return recorded.answers


def train_blocks(width: int, num_rows: int, micro_batches: int, with_activations: bool) -> dict[str, Any]:
    """Three steps of eight blocks on a GPU: losses, weights, and bytes that were in use and held at most."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(8))).to(device)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    memory = GradientMemory()
    for module in (*model, model):
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not model)
        unit.set_custom_reduce_scatter(memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / width)
    losses = []
    for _ in range(3):
        for index in range(micro_batches):
            memory.prepare(device, become_gradients=with_activations and index == 0)
            x = torch.randn(num_rows, width, device=device, generator=torch.Generator(device).manual_seed(index))
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": [local(p).cpu().numpy() for p in model.parameters()],
        "used": torch.cuda.max_memory_allocated(),
        "held": torch.cuda.max_memory_reserved(),
    }
