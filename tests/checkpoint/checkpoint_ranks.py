"""What gloo processes do for ``test_checkpoint_ranks``: a world of 4 saves, one of 2 loads. Runs in the test's
ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import manyhands.checkpoint.save as save_module
from manyhands.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from manyhands.core.errors import UserError


class Wrapper(nn.Module):
    """Stands for the loss model: FSDP2's root is outside the model that is saved."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().sum()


class Tiny(nn.Module):
    """Odd sizes: 10 rows over 4 ranks, and a bias of 3 that leaves a rank without rows. One weight is frozen, one
    tied.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 10, dtype=dtype)
        self.frozen = nn.Linear(10, 10, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(10, 5, bias=False, dtype=dtype)
        self.again = nn.Linear(10, 5, bias=False, dtype=dtype)
        self.again.weight = self.down.weight
        self.head = nn.Linear(5, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.inner(x).relu())
        return self.head(self.down(h) + self.again(h))


def build(
    kind: str, dtype: torch.dtype, fill: float | None = None
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """(inner model, what is called, optimizer); with ``fill`` every trained weight starts as that number."""
    torch.manual_seed(0)
    model = Tiny(dtype)
    wrapper: nn.Module = Wrapper(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(wrapper, mesh=mesh, reshard_after_forward=False)
    elif kind == "ddp":
        wrapper = DistributedDataParallel(wrapper)
    if fill is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(fill)
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:], "weight_decay": 0.0}]
    return model, wrapper, torch.optim.AdamW(decay, lr=0.01, fused=kind != "plain")


def train(wrapper: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        wrapper(torch.randn(7, 5, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters and states, by a way of its own."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = whole(parameter)
            found.update({f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()})
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True)
    )


def save(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Saves each case right after an evaluation, when FSDP2's root still holds gathered parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wanted = {}
    for case, (kind, dtype) in CASES.items():
        model, wrapper, optimizer = build(kind, dtype)
        train(wrapper, optimizer, dtype)
        wanted[case] = snapshot(model, optimizer)
        with torch.no_grad():
            wrapper(torch.ones(2, 5, dtype=dtype))
        save_checkpoint(folder / case / "step-000002", model, optimizer, {"step": 2}, rank=rank, world_size=world_size)
    return wanted


CASES = {
    "fsdp32": ("fsdp", torch.float32),
    "fsdp64": ("fsdp", torch.float64),
    "fsdp16": ("fsdp", torch.bfloat16),
    "ddp": ("ddp", torch.float32),
}


def load(folder: Path, wanted: dict[str, dict[str, torch.Tensor]]) -> dict[str, bool]:
    """Into FSDP2 over this world, whatever saved it; saves again for one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for case, (_, dtype) in CASES.items():
        model, _, optimizer = build("fsdp", dtype, fill=7.0)
        state = load_checkpoint(folder / case / "step-000002", model, optimizer)
        results[case] = state == {"step": 2} and same(snapshot(model, optimizer), wanted[case])
        save_checkpoint(folder / case / "step-000003", model, optimizer, {"step": 3}, rank=rank, world_size=world_size)
    model, _, optimizer = build("ddp", torch.float32, fill=7.0)
    load_checkpoint(folder / "fsdp32" / "step-000002", model, optimizer)
    results["fsdp into ddp"] = same(snapshot(model, optimizer), wanted["fsdp32"])
    return results


def load_alone(folder: Path, wanted: dict[str, dict[str, torch.Tensor]]) -> dict[str, bool]:
    results = {}
    for case, (_, dtype) in CASES.items():
        for step in (2, 3):
            model, _, optimizer = build("plain", dtype, fill=7.0)
            load_checkpoint(folder / case / f"step-{step:06d}", model, optimizer)
            results[f"{case} step {step}"] = same(snapshot(model, optimizer), wanted[case])
    return results


def save_on_a_full_disk(folder: Path) -> str:
    """Rank 3 alone cannot write."""
    rank = dist.get_rank()
    model, _, optimizer = build("fsdp", torch.float32)
    original = save_module.write_file
    if rank == 3:
        save_module.write_file = no_space
    try:
        save_checkpoint(folder / "failed" / "step-000001", model, optimizer, {}, rank=rank, world_size=4)
        return "saved"
    except UserError as error:
        return f"{error.what}; {error.why.partition('; ')[0]}; {len(list_checkpoints(folder / 'failed'))} checkpoints"
    finally:
        save_module.write_file = original


def no_space(path: str, *_: object) -> dict:
    raise OSError(28, "No space left on device", path)


def load_damaged(folder: Path) -> str:
    damaged = folder / "damaged" / "step-000002"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "fsdp32" / "step-000002", damaged)
        shard = damaged / "shard-00003-model-00001-of-00001.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    model, _, optimizer = build("fsdp", torch.float32)
    try:
        load_checkpoint(damaged, model, optimizer)
        return "loaded"
    except UserError as error:
        return error.what
