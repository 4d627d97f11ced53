"""Turn a loss model on meta into one that many processes train as one. The order of surgery stands in ``apply``.

All collectives are float32 (or float64) *sums*: the loss is divided by the trained tokens of the global batch before the
backward pass, so nothing is averaged here. Must not know data, the optimizer or the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from manyhands.model.blocks import find_blocks
from manyhands.model.loss import LossModel
from manyhands.parallel.compile import compile_blocks
from manyhands.parallel.mesh import replicate_mesh, shard_mesh
from manyhands.parallel.model import Parallel
from manyhands.parallel.recompute import recompute_blocks
from manyhands.parallel.world import World
from manyhands.plan.types import Plan

BUCKET_MB = {"full": 100, "part": 4096}  # adapters travel in one flat bucket


def apply(loss_model: LossModel, plan: Plan, world: World, materialize: Callable[[nn.Module], None]) -> Parallel:
    """Recompute ▸ compile ▸ shard ▸ materialize ▸ replicate.

    ``loss_model`` is on meta, in training mode, adapters applied and the rest frozen; ``materialize`` gives it memory and
    weights. Three ways, chosen by the plan and by what is trained:

    ============================  =====================================================================================
    plan                          way
    ============================  =====================================================================================
    fsdp                          ``fully_shard`` over all ranks; a bfloat16 policy if everything is trained in bfloat16
    one / ddp, all, in bfloat16   ``fully_shard`` on a (replicate, shard=1) mesh with that policy: the numerics of fsdp
    one / ddp, otherwise          the plain model / ``DistributedDataParallel`` whose hook sums
    ============================  =====================================================================================

    A process group is needed for more than one rank and for the second way.
    """
    trains_everything = all(parameter.requires_grad for parameter in loss_model.parameters())
    mixed = trains_everything and plan.compute_dtype == "bfloat16"

    if plan.recompute == "block":
        recompute_blocks(loss_model.model)
    if plan.compile:
        compile_blocks(loss_model.model)  # inside the recomputed region, outside the gathering of shards

    if plan.strategy == "fsdp":
        shard(loss_model, shard_mesh(world), mixed=mixed, reshard=plan.reshard)
        materialize(loss_model)
        # Reduced after every micro-batch: unreduced gradients would be whole on every rank.
        return Parallel(loss_model, world, sharded=True)
    if mixed:
        shard(loss_model, replicate_mesh(world), mixed=True, reshard=plan.reshard)
        materialize(loss_model)
        return Parallel(loss_model, world)
    materialize(loss_model)
    if world.world_size == 1:
        return Parallel(loss_model, world)
    return Parallel(loss_model, world, replica=replicate(loss_model, "full" if trains_everything else "part"))


def shard(loss_model: LossModel, mesh: DeviceMesh, *, mixed: bool, reshard: bool) -> None:
    """FSDP2 on every block, then on the rest (embeddings, last norm, head), whose tied weights must share one unit.

    ``mixed``: float32 masters, bfloat16 compute, float32 reduction. Without it parameters compute in the dtype they have:
    adapters cast by themselves. ``reshard`` frees a block's gathered weights after its forward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    for block in find_blocks(loss_model.model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(loss_model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in loss_model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and none is needed
    for method in ("logits", "next_token_logits"):
        register_fsdp_forward_method(loss_model, method)


def replicate(loss_model: LossModel, trained: str) -> DistributedDataParallel:
    """DDP over trained parameters, gradients summed. Every rank has already loaded the same weights: none are sent."""
    # forward_sync_buffers replaces broadcast_buffers from torch 2.13 on
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB[trained], "gradient_as_bucket_view": True, "init_sync": False, buffers: False}
    replica = DistributedDataParallel(loss_model, **options)
    replica.register_comm_hook(None, _sum_gradients)
    return replica


def _sum_gradients(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
