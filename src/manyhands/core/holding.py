"""How a parameter is held: in full on every rank, or a part of it on each.

The one place that knows DTensor (besides the engine that makes them). Loading, converters, optimizers, checkpoints and
export call the functions below with a tensor and never ask of which kind it is. An engine that partitions parameters in
another way (ZeRO) derives from ``Holding`` and registers it; nothing else changes.

Notation: a parameter of shape (n, ...) is cut along its first dimension; a rank's *part* of it is (m, ...), m <= n, and
may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from manyhands.core.collective_errors import this_rank


class Holding:
    """Plain tensors, of which every rank holds all; and the base of other ways to hold tensors over ranks.

    Nothing but ``gather`` and ``sum_over_shards`` communicates.
    """

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is held in this way."""
        return True

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Of the full tensor."""
        return tuple(tensor.shape)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, detached, sharing its memory."""
        return tensor.detach()

    def slices(self, tensor: torch.Tensor) -> tuple[slice, ...]:
        """Where this rank's part lies in the full tensor; an empty slice where it has none."""
        return tuple(slice(0, size) for size in tensor.shape)

    def part_of(self, tensor: torch.Tensor, full: Any) -> torch.Tensor:
        """What ``local(tensor)`` holds if ``full`` is the full tensor: a tensor, or what slices like one (a file)."""
        return full[self.slices(tensor)]

    def num_shards(self, tensor: torch.Tensor) -> int:
        """Parts that the tensor is cut into; replicas do not count."""
        return 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor, detached. Collective where it is sharded."""
        return tensor.detach()

    def shard_like(self, part: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of ``shape``, held as ``like`` is, of which ``part`` is this rank's; shares its memory."""
        return part

    def sum_over_shards(self, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each of ``parts`` (of one dtype) summed over the ranks that hold other parts of ``like[i]``. Collective."""
        return list(parts)


class DTensors(Holding):
    """Shards as FSDP2 makes them: by the first dimension, over one axis of a mesh; the other axis holds replicas."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def local(self, tensor: Any) -> torch.Tensor:
        with torch.no_grad():  # else a node of a graph for each: four times as long
            return tensor.to_local().detach()

    def slices(self, tensor: Any) -> tuple[slice, ...]:
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))

    def num_shards(self, tensor: Any) -> int:
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        return math.prod(size for size, placement in sizes if placement.is_shard())

    def gather(self, tensor: Any) -> torch.Tensor:
        return tensor.detach().full_tensor()

    def shard_like(self, part: torch.Tensor, like: Any, shape: Sequence[int]) -> torch.Tensor:
        size = torch.Size(shape)
        stride = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
        return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride)

    def sum_over_shards(self, parts: Sequence[torch.Tensor], like: Sequence[Any]) -> list[torch.Tensor]:
        sums = list(parts)
        by_mesh: dict[tuple, list[int]] = {}
        for index, parameter in enumerate(like):
            by_mesh.setdefault((parameter.device_mesh, tuple(parameter.placements)), []).append(index)
        for (mesh, placements), indices in by_mesh.items():
            flat = torch.cat([parts[index].flatten() for index in indices])
            for axis, placement in enumerate(placements):
                if placement.is_shard() and mesh.size(axis) > 1:
                    dist.all_reduce(flat, group=mesh.get_group(axis))
            for index, piece in zip(indices, flat.split([parts[index].numel() for index in indices]), strict=True):
                sums[index] = piece.view(parts[index].shape)
        return sums


_holdings: list[Holding] = [DTensors(), Holding()]  # the first one that holds a tensor answers for it


def register(holding: Holding) -> None:
    """``holding`` is asked before all others from now on; for an engine, before it partitions anything."""
    _holdings.insert(0, holding)


def unregister(holding: Holding) -> None:
    _holdings.remove(holding)


def holding_of(tensor: torch.Tensor) -> Holding:
    """How this tensor is held."""
    return next(holding for holding in _holdings if holding.holds(tensor))


def is_full(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a plain one, with all of its values on this rank."""
    return type(holding_of(tensor)) is Holding


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the full tensor; of parameters, which an engine may have emptied, not to be had from themselves."""
    return holding_of(tensor).shape(tensor)


def full_numel(tensor: torch.Tensor) -> int:
    """Elements of the full tensor."""
    return math.prod(full_shape(tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part (m, ...), detached, sharing memory with ``tensor``."""
    return holding_of(tensor).local(tensor)


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part, differentiable. Its gradient reaches the parameter without a sum over ranks."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def computed_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of what computes, detached: the shard of a DTensor, else the tensor itself, also where masters
    are held in parts beside it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the full tensor; an empty slice where it has none."""
    return holding_of(tensor).slices(tensor)


def local_part(tensor: torch.Tensor, full: Any) -> torch.Tensor:
    """This rank's part of ``full`` (which every rank can slice), cut as ``tensor`` is. No communication."""
    return holding_of(tensor).part_of(tensor, full)


def first_index(tensor: torch.Tensor) -> int:
    """Where this rank's part begins in the full tensor, counted in elements: parts are full rows, and so contiguous."""
    if num_shards(tensor) == 1:
        return 0
    return local_slices(tensor)[0].start * math.prod(tensor.shape[1:])


def num_shards(tensor: torch.Tensor) -> int:
    """Parts that the tensor is cut into; replicas do not count."""
    return holding_of(tensor).num_shards(tensor)


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The ranks over which the tensor is a DTensor; None where it is none."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def replica_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(place, number) among the ranks that hold the same part: all of them where every rank holds everything."""
    if not isinstance(tensor, DTensor):
        return this_rank()
    index, count = 0, 1
    place = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    for size, own, placement in zip(tensor.device_mesh.shape, place, tensor.placements, strict=True):
        if not placement.is_shard():
            index, count = index * size + own, count * size
    return index, count


@torch.no_grad()
def fill_from(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copies this rank's part of ``full`` into ``tensor``, cast to its dtype and device. No communication."""
    local(tensor).copy_(local_part(tensor, full))


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, detached. Collective where it is sharded."""
    return holding_of(tensor).gather(tensor)


def shard_like(part: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape``, cut as ``like`` is, of which ``part`` (m, ...) is this rank's; shares its memory."""
    return holding_of(like).shard_like(part, like, shape)


def gather_parts(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The full tensor (n, ...) of which this rank has ``part`` (m, ...), sharded as ``like``. Collective if sharded."""
    return gather(shard_like(part, like, (like.shape[0], *part.shape[1:])))


def sum_over_shards(parts: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over the ranks that hold other parts of the same parameter, in one collective for all of them.

    ``parts[i]``, all of one dtype, belongs to ``parameters[i]``; replicas hold the same parts and are not added. What
    belongs to a parameter that is not cut stays as it is.
    """
    sums = list(parts)
    by_holding: dict[int, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if num_shards(parameter) > 1:
            by_holding.setdefault(id(holding_of(parameter)), []).append(index)
    for indices in by_holding.values():
        holding = holding_of(parameters[indices[0]])
        found = holding.sum_over_shards([parts[i] for i in indices], [parameters[i] for i in indices])
        for index, total in zip(indices, found, strict=True):
            sums[index] = total
    return sums


@torch.no_grad()
def select_rows(weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a matrix (n, ...), the same on every rank. Collective where it is sharded, of these rows only."""
    part = local(weight)
    if num_shards(weight) == 1:
        return part[list(rows)]
    own = local_slices(weight)[0]
    found = torch.zeros(len(rows), *part.shape[1:], dtype=part.dtype, device=part.device)
    for index, row in enumerate(rows):
        if own.start <= row < own.stop:
            found[index] = part[row - own.start]
    return sum_over_shards([found], [weight])[0]


class RowShards:
    """Cuts tensors of host memory by rows, as FSDP2 would: the form in which checkpoints take shards."""

    def __init__(self) -> None:
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Copies this rank's rows of a tensor that every rank has."""
        size, offset = compute_local_shape_and_global_offset(full.shape, self._mesh, [Shard(0)])
        own = full[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
        part, stride = own.to("cpu", copy=True).contiguous(), full.contiguous().stride()
        return DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False, shape=full.shape, stride=stride)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, so that ``model`` holds its shards again.

    After an evaluation FSDP2's root still has its parameters gathered, as other objects than the optimizer's. The root
    may be a wrapper outside ``model``; FSDP2's hooks on ``state_dict`` reach every module, so asking for it is enough.
    """
    model.state_dict(keep_vars=True)
