"""A parameter may be whole or a shard of a DTensor: read, fill and gather it without asking which elsewhere."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor; an empty slice where it has none."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


@torch.no_grad()
def fill_from(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``tensor``, cast to its dtype and device. No communication."""
    local(tensor.detach()).copy_(whole[local_slices(tensor)])


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached. A collective where it is sharded."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def named_seed(seed: int, name: str) -> int:
    """A seed of 63 bits for one name, the same in every process and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on the seed and the name only."""
    return torch.Generator(device=device).manual_seed(named_seed(seed, name))
