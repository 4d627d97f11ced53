"""A parameter may be whole or a shard of a DTensor: read, fill and gather it without asking which elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial
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


def gather_parts(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole of what every rank holds a part of: as many rows of it as it holds of ``like``. A collective where that
    is sharded.
    """
    if not isinstance(like, DTensor):
        return part
    whole = DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((len(like), *part.shape[1:])),
        stride=part.stride(),
    )
    return whole.full_tensor()


def named_seed(seed: int, name: str) -> int:
    """A seed of 63 bits for one name, the same in every process and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on the seed and the name only."""
    return torch.Generator(device=device).manual_seed(named_seed(seed, name))


@torch.no_grad()
def select_rows(weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a whole or sharded matrix, whole on every rank. A collective where it is sharded, of these rows
    only.
    """
    part, held = local(weight.detach()), local_slices(weight)[0]
    if not isinstance(weight, DTensor):
        return part[list(rows)]
    found = torch.zeros(len(rows), *part.shape[1:], dtype=part.dtype, device=part.device)
    for index, row in enumerate(rows):
        if held.start <= row < held.stop:
            found[index] = part[row - held.start]
    placements = [Partial() if placement.is_shard() else placement for placement in weight.placements]
    return DTensor.from_local(found, weight.device_mesh, placements, run_check=False).full_tensor()
