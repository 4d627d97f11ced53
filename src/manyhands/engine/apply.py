"""Apply a layout to a loss model on meta, so that many processes train it as one. ``apply`` has the order.

All collectives are float32 (or float64) *sums*: the loss is divided by the loss tokens of the global batch before
the backward pass, so nothing is averaged here. Must not know data, the optimizer or the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.fx.experimental import _config as shapes
from torch.nn.parallel import DistributedDataParallel

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.holding import is_full
from manyhands.core.world import World
from manyhands.engine import host_shards
from manyhands.engine.activations import checkpoint_blocks, checkpoint_towers, offload_activations
from manyhands.engine.experts import DividedExperts, divide_experts
from manyhands.engine.gradient_memory import GradientMemory
from manyhands.engine.host_shards import BlockPrefetch, GradientNorms
from manyhands.engine.masters import ComputeCopy
from manyhands.engine.native import SHARD, NativeEngine
from manyhands.engine.tiles import compile_tiles, tile_mlps
from manyhands.kernels.attention.context import use_group
from manyhands.model.loss import LossModel
from manyhands.model.structure import base_path, find_blocks, find_tower_blocks
from manyhands.planner.layout import Layout
from manyhands.planner.types import Plan

if TYPE_CHECKING:
    from manyhands.engine.deepspeed import ZeroEngine

REPLICATE = "replicate"  # the axis of a mesh along which ranks hold the same
LOGITS_METHODS = ("logits", "next_token_logits")  # of a LossModel, which may be called beside its forward pass
BUCKET_MB = {"full": 100, "part": 4096}  # adapters travel in one flat bucket


def apply(
    loss_model: LossModel,
    plan: Plan,
    world: World,
    materialize: Callable[[nn.Module, torch.device], None],
    config: RunConfig | None = None,
) -> NativeEngine | ZeroEngine:
    """Activation checkpointing ▸ tiles ▸ compile ▸ shard ▸ materialize ▸ offload activations ▸ replicate, as in
    ``plan.layout``.

    ``loss_model`` is on meta, in training mode, adapters applied and the rest frozen; ``materialize`` gives it memory
    and weights on the device that it is given. A process group is needed but where the layout has no wrapper.
    ``config`` is asked for by DeepSpeed's strategies alone, whose partitions are made with the optimizer.
    """
    layout = plan.layout
    check_trained(loss_model, layout)
    # the innermost axis: neighbors. A process may carry out several plans, one after the other
    use_group(dist.new_subgroups(layout.mesh.context)[0] if layout.mesh.context > 1 else None)
    num_blocks = len(find_blocks(loss_model.model))
    checkpoint_blocks(loss_model.model, layout.checkpointing_by_layer(num_blocks), compiled=layout.compile)
    checkpoint_towers(loss_model.model, layout.activation_checkpointing)
    if layout.mlp_tile_tokens:
        tile_mlps(loss_model.model, layout.mlp_tile_tokens)
    if layout.compile:
        # Inside the recomputed region (around it where that is selective), outside the gathering of shards.
        options = {"options": {"triton.cudagraphs": True}} if layout.cuda_graphs else {}
        compile_blocks(loss_model.model, dynamic=True if layout.dynamic else None, **options)
        compile_towers(loss_model.model)

    if layout.zero_stage:
        from manyhands.engine.deepspeed import apply_zero  # an extra

        assert config is not None
        engine = apply_zero(loss_model, plan, config, world, materialize)
        if layout.offload_activations:
            offload_activations(loss_model.model, world.device, num_blocks - layout.layers_on_device)
        return engine
    mesh = make_mesh(layout, world)
    experts = divide_experts(loss_model, layout, world)
    if mesh is not None:
        shard(
            loss_model,
            mesh,
            experts=experts,
            mixed=layout.compute_copy == "gathered",
            reshard_after_forward=layout.reshard_after_forward,
            offload=layout.offload == "all",
            embeddings_apart=layout.embeddings_apart,
        )
    materialize(loss_model, torch.device("cpu") if layout.offload == "all" else world.device)
    if layout.offload == "all":
        _move_whole(loss_model, world.device)
    if layout.offload_activations:
        first = num_blocks - layout.layers_on_device
        offload_activations(loss_model.model, world.device, first, layout.repeated_inputs)
    if mesh is not None:
        return make_sharded_engine(loss_model, world, mesh, layout, experts)
    if layout.wrapper == "none":
        copy = keep_compute_copy(loss_model) if layout.compute_copy == "kept" else None
        return NativeEngine(loss_model, world, copy=copy, cuda_graphs=layout.cuda_graphs)
    trained = "full" if layout.trains_everything else "part"
    if experts is not None and not experts.hide_from_ddp(loss_model):
        return NativeEngine(loss_model, world, experts=experts)
    replica = replicate(loss_model, trained, layout.ddp_bucket_mb)
    return NativeEngine(loss_model, world, replica=replica, experts=experts, cuda_graphs=layout.cuda_graphs)


def make_sharded_engine(
    loss_model: LossModel, world: World, mesh: DeviceMesh, layout: Layout, experts: DividedExperts | None = None
) -> NativeEngine:
    """Of shards that are there; of one rank's in host memory, what FSDP2 does not overlap there (``host_shards``)."""
    overlaps = layout.prefetches_blocks and host_shards.PREFETCH
    memory = GradientMemory() if layout.sums_are_gradients else None
    for module in loss_model.modules():
        if memory is not None and isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(memory)
    return NativeEngine(
        loss_model,
        world,
        mesh=mesh,
        reduce_every=layout.reduce_every,
        prefetch=BlockPrefetch([*find_blocks(loss_model.model).values()], world.device) if overlaps else None,
        norms=GradientNorms(loss_model) if overlaps and mesh.size() == 1 else None,
        memory=memory,
        experts=experts,
    )


def check_trained(loss_model: LossModel, layout: Layout) -> None:
    """UserError where the model disagrees with its layout about what is trained, which would change the numerics: the
    plan knows the names in the model's files, the model itself what it loads of them.
    """
    unused = loss_model.optional_parts.unused if loss_model.optional_parts is not None else set()
    named = loss_model.model.named_parameters()
    frozen = [name for name, parameter in named if not parameter.requires_grad and name not in unused]
    if layout.trains_everything == (not frozen):
        return
    raise UserError(
        "the plan and the model disagree about what is trained",
        where="method.train, method.freeze, or a converter",
        why=f"by the names in the files everything is trained, but {frozen[0]} is frozen"
        if frozen
        else "by the names in the files some weights are frozen, but the model trains all of them",
        fix="name the weights as the model does (model.layers.0. ...), or set method.name=full to train all of them",
    )


def compile_blocks(model: nn.Module, *, dynamic: bool | None = True, **options: object) -> None:
    """Compile every block in place; names and state do not change. ``options`` go to ``torch.compile``.

    ``dynamic=True`` makes every size symbolic from the first micro-batch on (those that meet a weight become numbers
    again), so packs of any fill and any number of documents run one graph for each kind of block in training, and one
    in evaluation. None makes sizes numbers, which is fastest where there is one shape; a second shape compiles once
    more, with the sizes that changed as symbols. Kinds of blocks differ in what they compute: with and without a
    window; under adapters the first block, whose input needs no gradient; with masks (``sdpa``) also a pack of one
    single document, for which transformers builds none.
    """
    _compile(find_blocks(model).values(), dynamic, **options)
    compile_tiles(model, dynamic, **options)


def compile_towers(model: nn.Module) -> None:
    """The same for the repeated layers of frozen vision towers, whose attention over patches end to end stays outside.

    Their norms, rotary embeddings and activation functions read and write every value of a patch several times
    otherwise.
    """
    blocks = find_tower_blocks(model).values()
    _compile([block for block in blocks if not any(p.requires_grad for p in block.parameters())], dynamic=True)


def _compile(blocks: Iterable[nn.Module], dynamic: bool | None, **options: object) -> None:
    # Graphs with autograd functions of ours are kept on the disk as others are: torch does so where it is told.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # What leaves a block beside its result (``convert/routing.py``) does so in the forward pass alone.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if dynamic:
        # Sizes that happen to be equal in the first micro-batch (tokens and hidden size, documents and head size) would
        # share a symbol, and a weight would then fix both. Read while tracing, that is at the first micro-batch.
        shapes.use_duck_shape = False
        # Floats (an epsilon, a scaling) would become tensors on the CPU, whose kernels need a C++ compiler and the
        # tests of its vector instructions: 70 s of the first step.
        torch._dynamo.config.specialize_float = True
    for block in blocks:
        block.compile(dynamic=dynamic, **options)  # type: ignore[operator]


def keep_compute_copy(loss_model: LossModel) -> ComputeCopy:
    """Float32 masters and their bfloat16 copy, wherever a forward pass may begin: the loss, the logits, generation, the
    head.
    """
    model = loss_model.model
    copy = ComputeCopy(loss_model, [loss_model, model, model.get_submodule(base_path(model))], torch.bfloat16)
    for method in LOGITS_METHODS:
        copy.enter_by(loss_model, method)
    return copy


def make_mesh(layout: Layout, world: World) -> DeviceMesh | None:
    """What ``fully_shard`` works on; None where it wraps nothing.

    Axes (replicate, shard), the second one over all axes of the layout's mesh that parameters are sharded over: of
    ``s`` shards ranks ``k s`` to ``(k + 1) s - 1`` hold copy k together. Launchers number
    the ranks of one machine side by side, so with a machine's ranks a copy only gradients leave it. Where nothing can
    be replicated there is the axis of shards alone, whatever its size: with two, FSDP2 holds every block's gradients on
    the device until the backward pass ends, also those that it has moved to host memory.
    """
    if layout.wrapper != "fully_shard":
        return None
    replicate, shard = layout.mesh.replicate, layout.mesh.num_shards
    if layout.strategy in ("single", "fsdp"):
        return init_device_mesh(world.device.type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(world.device.type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))


def shard(
    loss_model: LossModel,
    mesh: DeviceMesh,
    *,
    mixed: bool,
    reshard_after_forward: bool,
    offload: bool = False,
    embeddings_apart: bool = False,
    experts: DividedExperts | None = None,
) -> None:
    """FSDP2 on every block, then on the rest (embeddings, last norm, head), whose tied weights must share one unit.

    ``embeddings_apart``: embeddings that are not tied are a unit of their own, freed once tokens are looked up and not
    gathered in the backward pass, which reads only the tokens.

    ``mixed``: float32 masters, bfloat16 compute, float32 reduction. Without it parameters compute in the dtype they
    have: adapters cast by themselves. ``reshard_after_forward`` frees a block's gathered weights after its forward
    pass. ``offload``: shards, frozen ones too, and their gradients lie in host memory, pinned where there is a GPU to
    copy to. ``experts`` are divided already.
    """
    # Inputs stay as they are: weights of tokens, and the rotary angles of families that have them in float32.
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False, **dtypes)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    parts = loss_model.optional_parts
    optional_blocks, held_in_full = ([], set()) if parts is None else parts.divide_for_sharding(loss_model.model)
    divided = set() if experts is None else experts.parameters
    for block in (*find_blocks(loss_model.model).values(), *optional_blocks):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=place,
            reshard_after_forward=reshard_after_forward,
            ignored_params=divided,
        )
    ignored = held_in_full | divided
    embeddings = _find_untied_embeddings(loss_model.model) if embeddings_apart else None
    if embeddings is not None:
        fully_shard(
            embeddings,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=place,
            reshard_after_forward=True,
            ignored_params=ignored,
        ).set_unshard_in_backward(False)
    fully_shard(
        loss_model,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=place,
        reshard_after_forward=False,
        ignored_params=ignored,
    )
    for module in loss_model.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1:  # else nothing is averaged, and a factor would only cost a division by it
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and none is needed
    for method in LOGITS_METHODS:
        register_fsdp_forward_method(loss_model, method)


def _find_untied_embeddings(model: nn.Module) -> nn.Module | None:
    """The embeddings of tokens; None where another module holds a parameter of theirs."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    own, inside = set(embeddings.parameters()), set(embeddings.modules())
    others = (module for module in model.modules() if module not in inside)
    is_tied = any(p in own for module in others for p in module.parameters(recurse=False))
    return None if is_tied else embeddings


def _move_whole(module: nn.Module, device: torch.device) -> None:
    """Buffers (rotary frequencies, indices) and parameters that are not sharded to where the forward pass runs: FSDP2
    moves its own parameters only.
    """
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and is_full(parameter):
                part._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def replicate(loss_model: LossModel, trained: str, bucket_mb: int | None = None) -> DistributedDataParallel:
    """DDP over trained parameters, gradients summed. Every rank has already loaded the same weights: none are sent."""
    # forward_sync_buffers replaces broadcast_buffers from torch 2.13 on
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {
        "bucket_cap_mb": BUCKET_MB[trained] if bucket_mb is None else bucket_mb,
        "gradient_as_bucket_view": True,
        "init_sync": False,
        buffers: False,
    }
    replica = DistributedDataParallel(loss_model, **options)
    replica.register_comm_hook(None, _sum_gradients)
    return replica


def _sum_gradients(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
