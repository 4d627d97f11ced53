"""Expert parallelism: each of ``expert_degree`` neighboring ranks holds an equal number of the experts of every block,
and tokens are sent to them (``convert/experts.py``).

The groups are made of data-parallel ranks, as in torchtitan: each has samples of its own, and all other parameters are
held as the strategy has them. An expert sees the tokens of its whole group, so its gradient is a sum over them already
and is added up over the groups alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from manyhands.core.holding import local
from manyhands.core.world import World
from manyhands.model.structure import find_experts
from manyhands.planner.layout import Layout

GROUPS, EXPERT = "expert_groups", "expert"  # axes: the same experts on each rank, and other ones


class DividedExperts:
    """The experts of a model, divided over a mesh (groups, ranks of a group)."""

    def __init__(self, loss_model: nn.Module, mesh: DeviceMesh) -> None:
        self._experts = list(find_experts(loss_model).values())
        self._mesh, self.group = mesh, mesh.get_group(EXPERT)
        for experts in self._experts:
            experts.expert_group = self.group
            for module in experts.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[key] = self._divide(parameter)

    def _divide(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter on meta whose rows are those of the experts, one after the other."""
        part = torch.empty_like(parameter.detach()[: len(parameter) // self._mesh.size(1)])
        divided = DTensor.from_local(part, self._mesh, [Replicate(), Shard(0)], run_check=False)
        return nn.Parameter(divided, parameter.requires_grad)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """As they are now: those on meta are replaced by others where they get memory."""
        return {parameter for experts in self._experts for parameter in experts.parameters()}

    def hide_from_ddp(self, loss_model: nn.Module) -> bool:
        """Exclude the experts from DDP. Returns whether anything else is trained: DDP refuses to wrap nothing."""
        own = self.parameters
        names = [name for name, parameter in loss_model.named_parameters() if parameter in own]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss_model, names)
        return any(parameter.requires_grad and parameter not in own for parameter in loss_model.parameters())

    def reduce_gradients(self) -> None:
        """Sum over the groups. Collective; every rank has the same gradients, of whatever tokens came to it."""
        if self._mesh.size(0) == 1:
            return
        group = self._mesh.get_group(GROUPS)
        for experts in self._experts:
            for parameter in experts.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=group)


def divide_experts(loss_model: nn.Module, layout: Layout, world: World) -> DividedExperts | None:
    """Divide the experts of a model on meta, before anything else is sharded; None where each rank computes all."""
    degree = layout.expert_degree
    if degree == 1:
        return None
    shape, names = (layout.world_size // degree, degree), (GROUPS, EXPERT)
    return DividedExperts(loss_model, init_device_mesh(world.device.type, shape, mesh_dim_names=names))
