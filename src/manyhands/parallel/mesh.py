"""Which ranks hold which part. Two layouts: everything sharded, or a copy on every rank."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyhands.parallel.world import World

SHARD, REPLICATE = "shard", "replicate"


def shard_mesh(world: World) -> DeviceMesh:
    """One axis: each rank holds 1 / world_size of every weight, gradient and optimizer state."""
    return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=(SHARD,))


def replicate_mesh(world: World) -> DeviceMesh:
    """Two axes, the shard axis of size 1: a whole copy on every rank, under the same code and numerics as sharding."""
    return init_device_mesh(world.device.type, (world.world_size, 1), mesh_dim_names=(REPLICATE, SHARD))
