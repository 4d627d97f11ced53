"""What an optimizer needs to know where each rank holds a part of every parameter (DTensor). Must not know why it is
so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(groups: Sequence[dict]) -> list[tuple[torch.Tensor, dict]]:
    """Parameters that have a gradient, each with its group, in the same order on every rank."""
    return [(parameter, group) for group in groups for parameter in group["params"] if parameter.grad is not None]


def num_shards(parameter: torch.Tensor) -> int:
    """Parts that the parameter is cut into; copies do not count."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())


def first_index(parameter: torch.Tensor) -> int:
    """Where this rank's part begins in the whole, counted in elements; parts are whole rows, so they are stretches of
    it.
    """
    if not isinstance(parameter, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offsets[0] * math.prod(parameter.shape[1:])


def shard_as(part: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``part``, this rank's rows of a tensor of ``shape`` that is cut as ``like`` is; shares its memory. Itself where
    ``like`` is whole.
    """
    if not isinstance(like, DTensor):
        return part
    size = torch.Size(shape)
    stride = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride)


def gather(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which ``part`` is what this rank holds, cut as ``like`` is. A collective."""
    whole = shard_as(part, like, like.shape)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def take_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, which every rank has, as ``like`` is cut. No communication."""
    if not isinstance(like, DTensor):
        return whole
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()


def sum_over_shards(parts: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums of what ranks with other shards of the same parameter hold, in one collective for all tensors of one dtype.

    ``parts[i]`` belongs to ``parameters[i]``; copies (replicas) hold the same parts and are not added. Whole ones stay
    as they are.
    """
    sums = list(parts)
    by_mesh: dict[tuple, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor) and num_shards(parameter) > 1:
            by_mesh.setdefault((parameter.device_mesh, tuple(parameter.placements)), []).append(index)
    for (mesh, placements), indices in by_mesh.items():
        flat = torch.cat([parts[index].flatten() for index in indices])
        for axis, placement in enumerate(placements):
            if placement.is_shard() and mesh.size(axis) > 1:
                dist.all_reduce(flat, group=mesh.get_group(axis))
        for index, piece in zip(indices, flat.split([parts[index].numel() for index in indices]), strict=True):
            sums[index] = piece.view(parts[index].shape)
    return sums
