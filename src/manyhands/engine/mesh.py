"""Which ranks hold which part: everything sharded, a copy on every rank, or a copy on every group of neighbouring
ranks.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyhands.core.world import World

SHARD, REPLICATE = "shard", "replicate"


def shard_mesh(world: World) -> DeviceMesh:
    """One axis: each rank holds 1 / world_size of every weight, gradient and optimizer state."""
    return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=(SHARD,))


def hybrid_mesh(world: World, shard_degree: int) -> DeviceMesh:
    """Two axes, (replicate, shard): ranks ``k shard_degree`` to ``(k + 1) shard_degree - 1`` hold copy k together.

    Launchers number the ranks of one machine side by side, so with a machine's ranks a copy only gradients leave it.
    """
    shape = (world.world_size // shard_degree, shard_degree)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
