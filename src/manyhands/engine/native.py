"""The model as the loop sees it: call it, say when gradients are reduced, ask for their norm. See
``train/types.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from manyhands.convert.loss import LossModel, Terms
from manyhands.core.holding import local
from manyhands.core.world import World
from manyhands.engine.masters import ComputeCopy
from manyhands.engine.mesh import SHARD


class Parallel:
    """A loss model with its parallelism applied; implements ``train.types.ParallelModel``.

    ``mesh``: what FSDP2 shards over; every rank holds only its part of the gradients along its shard axis. ``replica``:
    the DDP module around the loss model. ``reduce_every``: shards are reduced after every micro-batch, not after the
    last one.
    ``copy``: what computes in place of the parameters, refreshed once a step.
    """

    def __init__(
        self,
        loss_model: LossModel,
        world: World,
        *,
        mesh: DeviceMesh | None = None,
        replica: DistributedDataParallel | None = None,
        reduce_every: bool = True,
        copy: ComputeCopy | None = None,
    ) -> None:
        self.model: nn.Module = loss_model.model
        self.loss_model = loss_model
        self.world = world
        self._replica, self._copy = replica, copy
        self._reduce_every = reduce_every
        # The axis over which gradients are in parts; with one rank on it they are whole.
        self._shard_group = mesh[SHARD].get_group() if mesh is not None and mesh[SHARD].size() > 1 else None
        self._units = [module for module in loss_model.modules() if isinstance(module, FSDPModule)]
        # Trained in bfloat16, whose gradients autograd would add up in bfloat16 if it were not given float32 to add to.
        self._narrow = [p for p in loss_model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        for parameter in self._narrow:
            parameter.grad_dtype = None  # any

    @property
    def is_whole(self) -> bool:
        """Whether this rank can use the model by itself: no other rank, and no gathering, is needed for a forward
        pass.
        """
        return not self._units

    @property
    def compute_copy(self) -> ComputeCopy | None:
        """What computes in place of the parameters, where something does."""
        return self._copy

    def __call__(self, batch: Mapping[str, Any], *, metrics: bool = False) -> Terms:
        """Loss terms of a micro-batch; without gradients where autograd is off."""
        if torch.is_grad_enabled():
            return (self._replica or self.loss_model)(batch, metrics=metrics)
        terms = self.loss_model(batch, metrics=metrics)
        self._free_gathered()
        return terms

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Logits (b, t, v) of a small batch, by the model's own forward pass. All ranks call it where weights are
        sharded.
        """
        logits = self.loss_model.logits(batch)
        self._free_gathered()
        return logits

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (b, v) after the rows (b, t). All ranks call it, equally often, where weights are sharded."""
        logits = self.loss_model.next_token_logits(input_ids)
        self._free_gathered()
        return logits

    def set_gradient_sync(self, on: bool) -> None:
        """Whether the next forward and backward reduce gradients over ranks.

        Copies are summed up where ``on`` only. Shards too if whole gradients may wait on every rank (``reduce_every``
        false). What earlier micro-batches gave is summed in float32, whatever dtype it came in.
        """
        for parameter in self._narrow:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()
        if self._copy is not None:
            self._copy.accumulates = not on
        elif self._replica is not None:
            self._replica.require_backward_grad_sync = on
        elif isinstance(self.loss_model, FSDPModule):
            if self._shard_group is not None and not self._reduce_every:
                self.loss_model.set_requires_gradient_sync(on)
            else:
                self.loss_model.set_requires_all_reduce(on)

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, 0-d float64. Summed over shards only: replicas hold the same gradients already.

        In float64, because float32 norms of different layouts differ in the last digit, and clipping spreads that
        digit. Gradients in host memory are summed there.
        """
        norms = tensor_norms([local(p.grad) for p in self.model.parameters() if p.grad is not None])
        total = (
            torch.stack(norms).square().sum()
            if norms
            else torch.zeros((), dtype=torch.float64, device=self.world.device)
        )
        total = total.to(self.world.device)
        if self._shard_group is not None:
            dist.all_reduce(total, group=self._shard_group)
        return total.sqrt()

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns it."""
        if self.world.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A small tensor from every rank, in rank order."""
        if self.world.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def _free_gathered(self) -> None:
        # Without a backward pass gathered weights would stay registered, and an optimizer or a checkpoint would find
        # them # in place of the shards.
        for unit in self._units:
            unit.reshard()


def tensor_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, 0-d float64, in any order.

    Widened as they are read: ``torch.linalg.vector_norm`` would write whole float64 copies first, 20 bytes a float32
    value in place of 4. Apart by dtype, because the kernel that sums many tensors at once takes one.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [norm for alike in by_dtype.values() for norm in torch._foreach_norm(alike, 2, dtype=torch.float64)]
