"""What the ranks do for ``test_nf4_ranks``: layers in NF4 are sharded, filled, gathered; a model is stepped on a 2-D
mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from manyhands.config.schema import RunConfig
from manyhands.convert.nf4 import Nf4Linear
from manyhands.core.holding import gather, local
from manyhands.engine.apply import shard
from manyhands.planner.types import Plan
from tests.support.adapters import load_adapter_state
from tests.support.building import on_meta
from tests.support.layouts import Documents, count_loss_tokens, pack, random_adapter

# rows of codes: 1 (fewer than ranks), 5 (of which the last is not full), 8, and 3 whose blocks run across rows of the
# weight
SHAPES = {"small": (64, 64), "uneven": (300, 250), "even": (512, 256), "odd": (511, 75)}
CPU = torch.device("cpu")


class Watched:
    """A weight that counts the rows that were taken."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.num_rows = weight, 0

    def __getitem__(self, rows: slice) -> torch.Tensor:
        part = self.weight[rows]
        self.num_rows += len(part)
        return part


class Unit(nn.Module):
    """One FSDP unit: layers in NF4, a float32 factor and a parameter in the compute dtype."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        linears = {
            name: nn.Linear(into, out, bias=False, dtype=dtype, device=device) for name, (out, into) in SHAPES.items()
        }
        self.layers = nn.ModuleDict({name: Nf4Linear(linear) for name, linear in linears.items()})
        self.factor = nn.Parameter(torch.ones(7, 3, device=device))
        self.norm = nn.Parameter(torch.ones(5, dtype=dtype, device=device), requires_grad=False)
        self.seen: dict[str, torch.Tensor] = {}

    def fill(self, dtype: torch.dtype) -> list[str]:
        """Returns the layers whose weight this rank has read more of than its own rows."""
        greedy = []
        for name, (out, into) in SHAPES.items():
            weight = torch.randn(out, into, generator=torch.Generator().manual_seed(out)).to(dtype)
            watched = Watched(weight)
            self.layers[name].fill(watched)
            own = local(self.layers[name].weight_codes.detach()).shape[0] * 16384 / into  # rows of the weight
            if watched.num_rows > own + 2:
                greedy.append(name)
        return greedy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            for kind in ("weight_codes", "weight_statistics"):
                self.seen[f"{name}.{kind}"] = getattr(layer, kind).detach().clone().view(torch.uint8)
        return x * self.factor.sum().to(x.dtype) * self.norm.sum()


def gathered_bytes(dtype_name: str, policy: bool, replicas: int) -> dict[str, Any]:
    """The bytes that a forward pass sees, and those of ``full_tensor``, on this rank."""
    dtype, world_size = getattr(torch, dtype_name), dist.get_world_size()
    unit = Unit(dtype, "meta")
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)} if policy else {}
    fully_shard(unit, mesh=make_mesh(replicas, world_size // replicas), **options)
    unit.to_empty(device=CPU)
    greedy = unit.fill(dtype)
    with torch.no_grad():
        unit.factor.fill_(1.0)
        unit.norm.fill_(1.0)
    unit(torch.ones(2, dtype=dtype, requires_grad=True)).sum().backward()
    unit.reshard()
    whole = {name: gather(parameter).view(torch.uint8).numpy() for name, parameter in unit.layers.named_parameters()}
    return {"seen": {name: bytes_.numpy() for name, bytes_ in unit.seen.items()}, "whole": whole, "greedy": greedy}


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def step_on_a_mesh(plan: Plan, config: RunConfig, micro: list[Documents], replicas: int) -> dict[str, Any]:
    """``testing.layouts.measure`` of one micro-batch a rank, on (replicas, ranks / replicas)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss_model, load = on_meta(plan, config)
    model = loss_model.model
    shard(loss_model, make_mesh(replicas, world_size // replicas), mixed=False, reshard_after_forward=True)
    load(loss_model, CPU)
    load_adapter_state(model, random_adapter(model, start=True))
    num_loss_tokens = sum(count_loss_tokens(documents) for documents in micro)
    loss_sum = loss_model(pack(micro[rank]))["lm"][0]
    (loss_sum / num_loss_tokens).backward()
    total = loss_sum.detach().double()
    dist.all_reduce(total)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: gather(p.grad) for name, p in trained.items() if p.grad is not None}
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    return {
        "loss": float(total) / num_loss_tokens,
        "norm": norm,
        "gradients": {name: g.numpy() for name, g in gradients.items()},
    }


def nf4_bytes(plan: Plan, config: RunConfig) -> dict[str, bytes]:
    """Every stored parameter of a model in NF4, whole, as the worker loads it."""
    from tests.support.layouts import build

    model = build(plan, config).model
    return {
        name: gather(p).view(torch.uint8).numpy().tobytes()
        for name, p in model.named_parameters()
        if ".weight_" in name
    }


def write_merged(plan: Plan, config: RunConfig, folder: Path) -> None:
    """The merged model of random factors, written by all ranks together."""
    from manyhands.export.model import export_model
    from tests.support.layouts import build

    model = build(plan, config).model
    load_adapter_state(model, random_adapter(model))
    rank = dist.get_rank() if dist.is_initialized() else 0
    export_model(folder, model, Path(plan.model_folder), plan.layout.frozen_dtype, rank=rank, merge=True)
