"""How a run is laid out over processes: decided once by the plan, carried in estimate input, candidate and plan, and
executed by ``engine/apply.py``, which derives nothing again. Plain frozen values; knows no torch and no model.

A *rank* is one process of the run. A *data-parallel rank* is a group of ranks that trains samples of its own: the ranks
that differ in no coordinate of the mesh but those of ``context`` and ``tensor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

Device = Literal["cuda", "cpu"]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
ComputeDtype = Literal["bfloat16", "float32", "float64"]
Strategy = Literal["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
Checkpointing = Literal["none", "selective", "except_attention", "full"]
Offload = Literal["none", "optimizer", "all"]
Wrapper = Literal["none", "ddp", "fully_shard", "deepspeed"]
ComputeCopy = Literal["none", "kept", "gathered"]

ZERO_STAGES: dict[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3}  # carried out by DeepSpeed
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# What keeps more and computes less again: the choice for the last layers where memory is left.
WHOLE_BLOCKS: tuple[Checkpointing, ...] = ("none", "full")  # of a block all results are kept, or none
LIGHTER: dict[Checkpointing, Checkpointing] = {
    "full": "selective",
    "except_attention": "selective",
    "selective": "none",
}


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism by named axis, the outermost first.

    Ranks are numbered with the last axis varying fastest, as ``init_device_mesh`` numbers them, so that ranks of one
    machine are neighbors along the inner axes. A plan sets ``replicate``, ``shard`` and ``context``; a feature that
    divides a sample otherwise sets its own axis and takes its coordinate from ``coordinates``.
    """

    replicate: int = 1  # copies of the model
    shard: int = 1  # data-parallel ranks that hold one copy together
    context: int = 1  # ranks that divide the tokens of a sample; they hold one copy together too
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            if getattr(self, axis.name) < 1:
                raise ValueError(f"mesh degree {axis.name}: {getattr(self, axis.name)} is below 1")

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return math.prod(getattr(self, axis.name) for axis in fields(self))

    @property
    def data_parallel_degree(self) -> int:
        """Data-parallel ranks: each trains samples of its own."""
        return self.replicate * self.shard

    @property
    def num_shards(self) -> int:
        """Ranks over which a copy of the parameters is sharded."""
        return self.shard * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank (0 to ``world_size`` - 1) along every axis."""
        place = {}
        for axis in reversed(fields(self)):
            rank, place[axis.name] = divmod(rank, getattr(self, axis.name))
        return place

    def data_rank(self, rank: int) -> int:
        """The data-parallel rank, 0 to ``data_parallel_degree`` - 1, that a rank belongs to."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]


def mesh_of(strategy: Strategy, world_size: int, shard_degree: int = 1, context: int = 1) -> Mesh:
    """``single``, ``ddp``: a copy on each rank. ``fsdp``, ``zero*``: shards over all. ``hsdp``: in groups of
    ``shard_degree``. ``context`` neighboring ranks divide the tokens of a pack, and are among those that shard.
    """
    ranks = world_size // context
    shard = {"fsdp": ranks, "hsdp": shard_degree // context, **dict.fromkeys(ZERO_STAGES, ranks)}.get(strategy, 1)
    return Mesh(replicate=ranks // shard, shard=shard, context=context)


@dataclass(frozen=True)
class Layout:
    """Who holds what, and how one step is carried out. Made by ``lay_out``; ``change`` makes another from one.

    ``wrapper`` and ``compute_copy`` follow from the rest (``choose_holding``) and are carried, so that estimate and
    engine cannot disagree.
    """

    device: Device
    mesh: Mesh
    strategy: Strategy
    reshard_after_forward: bool  # gathered weights, or a bfloat16 copy, are freed after a block's forward pass
    activation_checkpointing: Checkpointing
    compute_dtype: ComputeDtype
    master_dtype: ComputeDtype  # of trained weights and optimizer states; sums are float32 at least
    frozen_dtype: ComputeDtype
    trains_everything: bool  # no weight is frozen, and no adapter added
    lighter_layers: int = 0  # of the last layers: the next lighter activation checkpointing, as there is room
    mlp_tile_tokens: int = 0  # of the sequence, that a block's MLP computes at a time; 0: all
    reduce_every: bool = True  # sharded gradients after every micro-batch; else unsharded ones wait for the last
    offload: Offload = "none"
    offload_activations: bool = False
    layers_on_device: int = 0  # of the last layers: their activations stay where those of the others move
    repeated_inputs: int = 0  # pairs of layers, the first ones, whose second one's input is made again from the first's
    compile: bool = False
    dynamic: bool = True  # compiled blocks take micro-batches of any shape; not where all samples have one length
    keeps_transposed: bool = False  # frozen experts that multiply in fp8: their values transposed, for the way back
    cuda_graphs: bool = False  # compiled blocks are launched as CUDA graphs; packs have one size, padding included
    wrapper: Wrapper = "none"  # what gathers weights and reduces gradients
    compute_copy: ComputeCopy = "none"  # of masters: kept beside them by one process, or cast where they are gathered
    # exactly one of the first two is set
    micro_samples: int | None = None  # samples of a micro-batch, without packing
    micro_tokens: int | None = None  # capacity of a pack
    pack_tokens: int | None = None  # packs of samples of one length: tokens of every micro-batch
    accumulation: int | None = None  # micro-batches of a step; with packing it follows from each step's samples
    full_micro_tokens: int = 1  # tokens of a full micro-batch on a rank, padding included
    accumulates: bool = True  # a step may have several micro-batches
    data_workers: int = 0  # processes a rank that collate batches; 0: a thread
    ddp_bucket_mb: int | None = None  # of gradients that DDP reduces at once; none: as many as suits the method
    embeddings_apart: bool = False  # are a unit of ``fully_shard`` of their own, freed once tokens are looked up
    exchanges_heads: bool = False  # ranks that divide packs exchange heads for tokens in attention; else gather keys
    expert_degree: int = 1  # neighboring ranks that divide every block's experts, beside the axes of the mesh

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.mesh.world_size

    @property
    def data_parallel_degree(self) -> int:
        return self.mesh.data_parallel_degree

    @property
    def holds_copies(self) -> bool:
        """Whether each rank has all that is trained and its optimizer states."""
        return self.strategy in ("single", "ddp")

    @property
    def num_shards(self) -> int:
        """Ranks over which weights, or gradients and optimizer states alone, are sharded."""
        return 1 if self.holds_copies else self.mesh.num_shards

    @property
    def num_copies(self) -> int:
        """Ranks, or groups of them, that hold the same."""
        return self.world_size // self.num_shards

    @property
    def weight_shards(self) -> int:
        """Ranks that hold one copy of the trained weights together; ranks that are equal modulo it hold the same."""
        shards = self.num_shards if self.strategy in ("fsdp", "hsdp", "zero3") else 1
        return math.lcm(shards, self.expert_degree)

    @property
    def prefetches_blocks(self) -> bool:
        """Whether the next block's weights are copied from host memory by the engine (``engine/host_shards.py``), as
        FSDP2 fetches none ahead where nothing is sharded.
        """
        fetches = self.wrapper == "fully_shard" and self.offload == "all" and self.device == "cuda"
        return fetches and self.mesh.num_shards == 1

    @property
    def sums_are_gradients(self) -> bool:
        """Whether what FSDP2 reduces is kept as it is until the step: neither moved to host memory nor cast."""
        cast = self.compute_copy == "gathered" and self.master_dtype != "float32"
        return self.wrapper == "fully_shard" and self.offload != "all" and not cast

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage: 1 shards optimizer states and masters, 2 gradients too, 3 weights too; 0 without it."""
        return ZERO_STAGES.get(self.strategy, 0)

    @property
    def micro(self) -> int:
        """Size of a micro-batch in its own unit: tokens with packing, else samples."""
        return self.micro_tokens or self.micro_samples or 0

    @property
    def last_checkpointing(self) -> Checkpointing:
        """That of the last layer, the first of the backward pass."""
        return LIGHTER[self.activation_checkpointing] if self.lighter_layers else self.activation_checkpointing

    def checkpointing_by_layer(self, num_layers: int) -> tuple[Checkpointing, ...]:
        """One entry a layer, first to last."""
        heavy = num_layers - self.lighter_layers
        return (self.activation_checkpointing,) * heavy + (self.last_checkpointing,) * self.lighter_layers


HOLDING = (
    *("mesh", "strategy", "reshard_after_forward", "offload"),
    *("compute_dtype", "master_dtype", "trains_everything"),
)  # what ``choose_holding`` decides from


def choose_holding(
    mesh: Mesh,
    strategy: Strategy,
    reshard_after_forward: bool,
    offload: Offload,
    compute_dtype: ComputeDtype,
    master_dtype: ComputeDtype,
    trains_everything: bool,
) -> tuple[Wrapper, ComputeCopy]:
    """What wraps the model, and how masters get to the dtype that computes.

    ============================  =============================================================================
    layout                        wrapper, compute copy
    ============================  =============================================================================
    fsdp, hsdp                    ``fully_shard``; casts as it gathers if everything is trained in bfloat16
    all trained, in bfloat16      the same on a (replicate, shard=1) mesh, and so whatever is offloaded: one numerics
    single, copy not freed        none: float32 masters beside a bfloat16 copy, the same numbers without collectives
    single, bfloat16 masters      none: nothing is cast (``model.master_dtype``: other numbers, under any strategy)
    single, otherwise             none
    ddp, otherwise                ``DistributedDataParallel`` whose hook sums
    zero1, zero2, zero3           DeepSpeed, whose bfloat16 weights are copies of its float32 masters
    ============================  =============================================================================

    Adapters and partially trained models cast what they train by themselves. Masters in bfloat16 are cast too where
    there are several ranks: gradients are reduced as float32 sums.
    """
    narrow = master_dtype == "bfloat16" and strategy != "single"
    casts = trains_everything and (compute_dtype != master_dtype or narrow)
    if strategy in ZERO_STAGES:
        return "deepspeed", "gathered" if casts else "none"
    may_keep = strategy == "single" and not reshard_after_forward and offload != "all"
    if casts and may_keep and (master_dtype, compute_dtype) == ("float32", "bfloat16"):
        return "none", "kept"
    if strategy in ("fsdp", "hsdp") or casts or offload == "all":
        return "fully_shard", "gathered" if casts else "none"
    return "ddp" if mesh.world_size > 1 else "none", "none"


def lay_out(**values: Any) -> Layout:
    """A layout of these fields; wrapper and compute copy are decided here."""
    defaults = {"offload": "none"} | values
    wrapper, compute_copy = choose_holding(**{name: defaults[name] for name in HOLDING})
    return Layout(**values, wrapper=wrapper, compute_copy=compute_copy)


def change(layout: Layout, **changes: Any) -> Layout:
    """The same layout but for ``changes``; what follows from them is decided again."""
    values = {part.name: getattr(layout, part.name) for part in fields(layout)}
    return lay_out(
        **{name: value for name, value in (values | changes).items() if name not in ("wrapper", "compute_copy")}
    )
