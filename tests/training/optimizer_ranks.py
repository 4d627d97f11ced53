"""What one rank does for ``test_optimizer_ranks``: steps of every optimizer with given gradients, saved and resumed
half-way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bitsandbytes.functional as kernels
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from manyhands.checkpoint import load_checkpoint, save_checkpoint
from manyhands.config.schema import OptimizerSection
from manyhands.core.errors import UserError
from manyhands.core.holding import fill_from, gather
from manyhands.core.seeds import named_generator
from manyhands.optim.adamw_8bit import MOMENTS, blocks_in
from manyhands.training.optimizer import make_optimizer, set_learning_rate

PEAK = 1e-2


class Net(nn.Module):
    """Sizes that 2 and 4 ranks cut unevenly, a vector that leaves ranks without rows, three dimensions, a frozen
    weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)  # 8192 values: large enough for 8 bits, were it no embedding
        self.block = nn.ModuleDict(
            {
                "wide": nn.Linear(256, 18),  # rows are whole blocks of 256
                "tall": nn.Linear(48, 128, bias=False),  # 1536 or 3072 values a shard: whole blocks, too
                "odd": nn.Linear(70, 70, bias=False),  # blocks lie across rows and shards
                "conv": nn.Conv1d(6, 10, 3, bias=False),
                "frozen": nn.Linear(4, 4, bias=False),
            }
        )
        self.norm = nn.LayerNorm(3)
        self.block["frozen"].requires_grad_(False)


class ImportContext(nn.Module):
    """Stands for the loss model: FSDP2's root."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net


def fill(net: Net) -> None:
    for name, parameter in net.named_parameters():
        fill_from(parameter, draw(name, parameter.shape))


def draw(key: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=named_generator(0, key))


def build(section: OptimizerSection, kind: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    if kind == "experts":  # divided over two ranks each, as engine/experts.py divides them; the rest as FSDP2 does
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("expert_groups", "expert"))
        for module in net.block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    part = parameter.detach()[: len(parameter) // 2].clone()
                    divided = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)
                    module._parameters[name] = nn.Parameter(divided, parameter.requires_grad)
        fully_shard(ImportContext(net), ignored_params=set(net.block.parameters()))
    elif kind != "single":
        world = dist.get_world_size()
        sizes = {"fsdp": (world,), "hsdp": (2, world // 2), "replicate": (world, 1)}[kind]
        names = ("replicate", "shard")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        fully_shard(ImportContext(net), mesh=mesh)
    fill(net)
    return net, make_optimizer(net, section, PEAK, blocks=["block"])


def take_step(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            fill_from(parameter.grad, draw(f"{step} {name}", parameter.shape))
    set_learning_rate(optimizer, PEAK / (step + 1))
    optimizer.step()
    optimizer.zero_grad()


def whole(net: Net) -> dict[str, torch.Tensor]:
    return {name: gather(parameter).clone() for name, parameter in net.named_parameters()}


def run(keys: dict[str, Any], kind: str, num_steps: int = 4) -> dict[str, torch.Tensor]:
    """Whole weights after the last step."""
    with cpu_kernels():
        net, optimizer = build(OptimizerSection(**keys), kind)
        for step in range(num_steps):
            take_step(net, optimizer, step)
        return whole(net)


def save(keys: dict[str, Any], kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Two steps, a checkpoint, two steps more; whole weights at the end."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with cpu_kernels():
        net, optimizer = build(OptimizerSection(**keys), kind)
        for step in range(4):
            if step == 2:
                save_checkpoint(folder / "step-000002", net, optimizer, {}, rank=rank, world_size=world_size)
            take_step(net, optimizer, step)
        return whole(net)


def resume(
    keys: dict[str, Any], kind: str, folder: Path, said: list[str] | None = None
) -> dict[str, torch.Tensor] | UserError:
    """The last two steps from that checkpoint; ``said`` gets what loading reports."""
    with cpu_kernels():
        net, optimizer = build(OptimizerSection(**keys), kind)
        for parameter in net.parameters():
            if parameter.requires_grad:
                nn.init.constant_(parameter, 7.0)
        try:
            load_checkpoint(folder / "step-000002", net, optimizer, report=([] if said is None else said).append)
        except UserError as error:
            return error
        for step in (2, 3):
            take_step(net, optimizer, step)
        return whole(net)


Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]  # values, and the largest of the block of each


def pass_on(keys: dict[str, Any], kind: str, source: Path, target: Path | None) -> tuple[Moments, list[str]]:
    """Loads a checkpoint and saves it again as it is held here; 8-bit moments in full, and what was reported."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    said: list[str] = []
    with cpu_kernels():
        net, optimizer = build(OptimizerSection(**keys), kind)
        load_checkpoint(source / "step-000002", net, optimizer, report=said.append)
        if target is not None:
            save_checkpoint(target / "step-000002", net, optimizer, {}, rank=rank, world_size=world_size)
        moments: Moments = {}
        for name, parameter in net.named_parameters():
            for key, levels in zip(MOMENTS, optimizer._levels_on(torch.device("cpu")).values(), strict=True):  # type: ignore[attr-defined]
                state = optimizer.state.get(parameter, {})
                if f"{key}_scale" not in state:
                    continue
                scales = gather(state[f"{key}_scale"])
                blocks = blocks_in(parameter, scales.shape)
                assert blocks is not None
                codes = gather(state[key]).flatten()
                largest = scales.flatten()[blocks.index_of(torch.arange(len(codes)))]
                moments[f"{key} {name}"] = (levels[codes.long()] * largest, largest)
    return moments, said


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """bitsandbytes' kernels for GPUs, in plain torch: what the classes around them do can be seen without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "optimizer_update_8bit_blockwise", update_8bit)
        patch.setattr(kernels, "optimizer_update_32bit", update_32bit)
        yield


def update_32bit(g, p, state1, state2, beta1, beta2, eps, step, lr, weight_decay, **_: Any) -> None:  # type: ignore[no-untyped-def]
    p.mul_(1 - lr * weight_decay)
    state1.lerp_(g, 1 - beta1)
    state2.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = state2.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    p.addcdiv_(state1, denominator, value=-lr / (1 - beta1**step))


def update_8bit(state1, state2, absmax1, absmax2, qmap1, qmap2, p, **shared: Any) -> None:  # type: ignore[no-untyped-def]
    """One step in float32 between blockwise dequantisation and quantisation, as the kernel documents it."""
    assert absmax1.numel() * 256 >= p.numel() and p.is_contiguous()
    moments = []
    for codes, scales, meaning in ((state1, absmax1, qmap1), (state2, absmax2, qmap2)):
        used = scales[: -(-p.numel() // 256)]
        moments.append((meaning[codes.long()].flatten() * used.repeat_interleave(256)[: p.numel()]).view(p.shape))
    update_32bit(p=p, state1=moments[0], state2=moments[1], **shared)
    for moment, codes, scales, meaning in zip(
        moments, (state1, state2), (absmax1, absmax2), (qmap1, qmap2), strict=True
    ):
        padded = nn.functional.pad(moment.flatten(), (0, -moment.numel() % 256)).view(-1, 256)
        largest = padded.abs().amax(1)
        scales[: len(largest)].copy_(largest)
        relative = padded / largest.clamp(min=1e-30)[:, None]
        nearest = (relative.flatten()[: p.numel(), None] - meaning[None]).abs().argmin(1)
        codes.copy_(nearest.to(torch.uint8).view(codes.shape))
