"""What the terms of the memory estimate are functions of: dimensions, layout, how many weights are trained, bytes of
optimizer states. Plain values; no torch.

The notation is that of ``terms.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from manyhands.config.patterns import EMBEDDING_NAMES, HEAD_NAMES, expand, matches, reaches
from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.core.limits import (
    MXFP4_BLOCK_VALUES,
    MXFP4_SCALES_MULTIPLE,
    NF4_CODE_BYTES,
    NF4_FLOAT_STATISTICS_BYTES,
    NF4_ROW_VALUES,
    NF4_STATISTICS_BYTES,
)
from manyhands.facts.model import BLOCK_TENSOR
from manyhands.facts.types import DataFacts, ModelFacts, NewTokens, TowerFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.layout import DTYPE_BYTES, Layout

LARGEST_LOAD = 2  # rows that come to one rank of those that divide experts, by their mean: assumed, not measured


@dataclass(frozen=True)
class ImageInput:
    """What images pass through, and how many a micro-batch has at most. Units are those of ``TowerFacts``."""

    tower: TowerFacts
    vision: str  # state: frozen or trained
    projector: str
    units_per_token: float  # at most, in a pack
    units_per_sample: int  # at most
    mean_units: float  # of a sample, those without images included
    mean_patches: float  # that attend to each other: of an image, or of a square of it
    kept_bytes: float = 0.0  # of a unit's features, which the first pass keeps for later ones; 0: nothing is kept
    passes: float = 1.0  # over the images

    @property
    def projector_parameters(self) -> int:
        return self.tower.num_projector_parameters

    @property
    def num_trained(self) -> int:
        parts = {self.vision: 0, self.projector: 0}
        parts[self.vision] += self.tower.num_parameters
        parts[self.projector] += self.projector_parameters
        return parts.get("trained", 0)

    @property
    def num_frozen(self) -> int:
        return self.tower.num_parameters + self.projector_parameters - self.num_trained


def describe_images(parts: Mapping[str, str], model: ModelFacts, data: DataFacts) -> ImageInput | None:
    """None where no image passes through the model.

    A pack has for each of its tokens at most as many units as the sample that has most for each of its own, whatever
    samples share it: there are never more than the memory is estimated for. Where facts do not say, all its tokens are
    placeholders.
    """
    if model.tower is None or parts.get("vision", "left_out") == "left_out":
        return None
    tower = model.tower
    units_of_image = data.mean_image_units * data.num_samples / max(1, data.num_images)
    return ImageInput(
        tower=tower,
        vision=parts["vision"],
        projector=parts["projector"],
        units_per_token=data.max_units_per_token or 1 / tower.tokens_per_unit,
        units_per_sample=data.max_image_units,
        mean_units=data.mean_image_units,
        mean_patches=tower.patches_per_unit if tower.patches_per_unit > 1 else units_of_image,
    )


@dataclass(frozen=True)
class EstimateInput:
    """One layout of one model, as far as memory is concerned."""

    model: ModelFacts
    layout: Layout
    num_adapter_parameters: int  # 0: everything is trained, or the model ``partially_trained``
    adapter_rank: int
    adapter_dropout: bool
    builds_mask: bool  # a dense attention mask over the micro-batch
    attends_blockwise: bool = False
    nf4_blocks: bool = False  # qlora: the blocks' linear layers are held in NF4
    nf4_double: bool = True  # and the scales of that are quantized too
    fp8_blocks: bool = False  # matmuls of the blocks' linear layers in fp8
    fp8_weights: bool = False  # and their frozen weights are kept so alone
    fp8_groups: bool = False  # stacks among these multiply in fp8
    sums_in_products: bool = False  # grouped products add low-rank sums themselves (kernels/experts)
    partially_trained: TrainedWeights | None = None  # patterns: the model's own weights that are trained
    optimizer_name: str = next(iter(OPTIMIZERS))
    fuse_loss: bool = False  # cross-entropy fused with the head
    fuse_optimizer: bool = False  # AdamW takes gradients in the dtype of the copy that computes
    mixed_lengths: bool = False  # varlen, and samples differ in length or layers have windows
    row_length: int | None = None  # tokens of every sample, where they have one length
    adapter_dora: bool = False
    images: ImageInput | None = None  # of a model whose tower is loaded
    needs_all_gradients: bool = True  # before the update: to clip them, or to skip it
    reference: str = "none"  # Plan.reference
    num_values: int = 0  # that the loss needs of a whole step first, each by a pass of its own (``StepValue``)
    fuses_modules: bool = False  # attention and MLP are replaced by modules that know their layers (fused_modules.py)
    fuses_experts: bool = False  # adapters of experts are computed with their gate (fused_experts.py)
    num_expert_adapters: int = 0  # of the adapters' parameters, those of experts

    @property
    def num_more_passes(self) -> int:
        """Forward passes beside that which is trained: through the reference, and for values, which compare with it."""
        through_reference = self.reference == "adapters"
        return through_reference + self.num_values * (1 + through_reference)

    @property
    def merges_queries(self) -> bool:
        """q, k and v are one matmul: the family's own, or that of fused modules in fp8."""
        merged = any(name.endswith("qkv_proj") for name in self.model.block_linear_shapes)
        return merged or (self.fp8_blocks and self.fuses_modules)

    @property
    def pads_rows(self) -> bool:
        """Whether a micro-batch ends with padding, where attention works on rows of one length and leaves it out."""
        packed = self.layout.pack_tokens
        return packed is not None and self.row_length is not None and packed % self.row_length > 0

    @property
    def trains_everything(self) -> bool:
        return self.layout.trains_everything

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.compute_dtype]

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.master_dtype]

    @property
    def frozen_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.frozen_dtype]

    @property
    def num_shards(self) -> int:
        return self.layout.num_shards

    @property
    def keys_per_token(self) -> float:
        """Keys that a rank gathers for each of its own tokens where ranks divide packs, at most: of W ranks W + 1/2, in
        a pack of one document. 0 where they do not, or exchange heads.
        """
        context = self.layout.mesh.context
        return 0.0 if context == 1 or self.layout.exchanges_heads else context + 0.5

    @property
    def weight_shards(self) -> int:
        """Ranks that hold the weights together as they compute: not those of ZeRO's stages 1 and 2."""
        return 1 if self.layout.zero_stage in (1, 2) else self.num_shards

    @property
    def held_bytes(self) -> int:
        """Of an element of a trained weight in the model: ZeRO has its masters beside it."""
        return self.compute_bytes if self.layout.zero_stage and self.is_cast else self.master_bytes

    @property
    def num_parameters(self) -> int:
        """Of everything that is loaded, adapters included."""
        outer = 0 if self.images is None or self.trains_everything else self.images.num_trained + self.images.num_frozen
        return self.model.num_parameters + self.num_adapter_parameters + outer

    @property
    def num_trained(self) -> int:
        if self.partially_trained is not None:
            return self.partially_trained.total + self.outer_trained
        return (self.num_adapter_parameters or self.model.num_parameters) + self.outer_trained

    @property
    def outer_trained(self) -> int:
        """Trained parameters of vision tower and projector, where these are not counted as parts of the model."""
        return 0 if self.images is None or self.trains_everything else self.images.num_trained

    @property
    def freezes_text(self) -> bool:
        """Nothing of the language model is trained: gradients only pass through it."""
        t = self.partially_trained
        return t is not None and t.total == 0

    @property
    def is_cast(self) -> bool:
        """Trained weights are copied to the dtype that computes."""
        return self.layout.compute_copy != "none"

    @property
    def keeps_copy(self) -> bool:
        """One process keeps the bfloat16 copy of all weights beside their masters (engine/masters.py)."""
        return self.layout.compute_copy == "kept"

    @property
    def sum_bytes(self) -> int:
        """Of an element of a gradient while it is summed."""
        return max(4, self.master_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient as the optimizer finds it: in the masters' dtype, or where micro-batches are
        summed in the sums'. A kept copy's, of one micro-batch, stays in the copy's where the optimizer takes that.
        """
        if self.layout.accumulates:
            return self.sum_bytes
        return self.compute_bytes if self.keeps_copy and self.fuse_optimizer else self.master_bytes

    @property
    def block_in_experts(self) -> int:
        """Elements of a mean block that ``expert_degree`` ranks divide; 0 where ranks do not divide experts."""
        stacks = self.model.sum_linears(lambda shape: shape.size if shape.groups > 1 else 0)
        return stacks // self.model.num_layers if self.layout.expert_degree > 1 else 0

    @property
    def trained_in_experts(self) -> int:
        """Trained elements that ``expert_degree`` ranks divide."""
        if self.layout.expert_degree == 1:
            return 0
        return self.num_expert_adapters or self.trains_everything * self.block_in_experts * self.model.num_layers

    @property
    def expert_load(self) -> int:
        """Rows that come to the rank with the most of those that divide experts, by their mean."""
        return LARGEST_LOAD if self.layout.expert_degree > 1 else 1

    @property
    def trained_here(self) -> float:
        """Trained elements that a rank updates: ``1 / S``, of divided experts ``1 / expert_degree``."""
        shared = (self.num_trained - self.trained_in_experts) / self.num_shards
        return shared + self.trained_in_experts / self.layout.expert_degree

    def by_experts(self, num_bytes: float) -> int:
        """What a rank holds more than ``1 / S`` of, if these bytes are divided by ``expert_degree`` in place of S."""
        return int(num_bytes / self.layout.expert_degree - num_bytes / self.num_shards)

    @property
    def frozen_block_in_experts(self) -> int:
        """Bytes of a block's frozen experts as they are kept."""
        others = self.model.num_block_parameters - self.block_in_experts
        if self.model.stored_mxfp4:
            return self.frozen_block_bytes - others * self.frozen_bytes if self.block_in_experts else 0
        if self.nf4_blocks:  # the rest of a block's linear layers is as NF4, too
            return self.frozen_block_bytes * self.block_in_experts // self.model.num_block_parameters
        return self.block_in_experts * self.frozen_bytes

    @property
    def gathers_whole(self) -> bool:
        """Whether even unsharded weights are copied to where they compute: cast, or from host memory."""
        return self.is_cast or self.layout.offload == "all"

    @property
    def num_root_parameters(self) -> int:
        """R = P - L B: what is in no block."""
        m = self.model
        return m.num_parameters - m.num_in_all_blocks

    @property
    def num_apart(self) -> int:
        """E, of the embeddings, where ``fully_shard`` has them as a unit of their own: they are gathered for a moment
        at a micro-batch's begin, and their gradients reduced apart from those of the R - E other ones.
        """
        apart = self.layout.embeddings_apart and self.layout.wrapper == "fully_shard"
        return self.head_elements if apart and not self.model.tied_embeddings else 0

    @property
    def largest_outer_unit(self) -> int:
        """``max(R - E, E)``."""
        return max(self.num_root_parameters - self.num_apart, self.num_apart)

    @property
    def frozen_block_bytes(self) -> int:
        """One block's frozen weights as they are kept: ``B f``, or its linear layers in NF4 and the rest in f.

        NF4 takes 1/2 byte a value, 1/64 for its block's scale and 8 / 16,384 for the scales' own (convert/nf4.py), or
        4/64 for a scale that is not quantized, in whole rows. In fp8 alone a byte a value and 4 a row. Experts in MXFP4
        take 1/2 byte a value and 1/32 for its scale (convert/mxfp4.py).
        """
        if names := self.model.stored_mxfp4:
            stacks = [self.model.block_linear_shapes[name] for name in names]
            others = self.model.num_block_parameters - sum(stack.size for stack in stacks)
            scale_bytes = [math.ceil(stack.into / MXFP4_BLOCK_VALUES / MXFP4_SCALES_MULTIPLE) for stack in stacks]
            rows = zip(stacks, scale_bytes, strict=True)
            in_mxfp4 = sum(s.out * (s.into // 2 + MXFP4_SCALES_MULTIPLE * count) for s, count in rows)
            return others * self.frozen_bytes + in_mxfp4
        if self.fp8_weights:
            fits = [s for s in self.model.block_linear_shapes.values() if s.out % 16 == s.into % 16 == 0]
            in_fp8 = sum(shape.size for shape in fits)
            others = (self.model.num_block_parameters - in_fp8) * self.frozen_bytes
            return others + in_fp8 + 4 * sum(shape.out for shape in fits)
        if not self.nf4_blocks:
            return self.model.num_block_parameters * self.frozen_bytes
        stored = self.model.stored_nf4
        shapes = self.model.block_linear_shapes
        in_4_bits = shapes if stored is None else [name for name in shapes if name in stored.linears]
        sizes = [shapes[name].size for name in in_4_bits]
        row_bytes = NF4_CODE_BYTES + (NF4_STATISTICS_BYTES if self.nf4_double else NF4_FLOAT_STATISTICS_BYTES)
        in_nf4 = sum(math.ceil(size / NF4_ROW_VALUES) for size in sizes) * row_bytes
        return (self.model.num_block_parameters - sum(sizes)) * self.frozen_bytes + in_nf4

    @property
    def frozen_blocks_bytes(self) -> int:
        """Of all blocks: those of one, by the share of parameters where blocks differ."""
        return self.frozen_block_bytes * self.model.num_in_all_blocks // self.model.num_block_parameters

    @property
    def num_in_linears(self) -> int:
        """Elements of the linear layers of all blocks."""
        return self.model.sum_linears(lambda shape: shape.size)

    @property
    def head_elements(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def transposed_bytes(self) -> int:
        """Of the values of frozen stacks that multiply in fp8, a byte each, which the way back takes transposed."""
        stacks = self.model.sum_linears(lambda shape: shape.size if shape.groups > 1 else 0)
        return stacks * (self.fp8_weights and self.fp8_groups)

    @property
    def num_trained_in_head(self) -> int:
        """Elements of the head whose gradient the loss makes; embeddings alone, by patterns, are taken for it."""
        if self.partially_trained is not None:
            return min(self.partially_trained.num_in_root, self.head_elements)
        return self.head_elements if self.trains_everything else 0

    @property
    def offloads(self) -> bool:
        """Whether anything is in host memory; with ZeRO checkpoints pass through it."""
        return self.layout.offload != "none" or self.layout.offload_activations or self.layout.zero_stage > 0

    @property
    def streams_update(self) -> bool:
        """Masters in bfloat16 of which something is in host memory: a GPU updates them, a slice at a time."""
        return self.layout.offload != "none" and self.layout.master_dtype == "bfloat16"

    @property
    def updates_in_backward(self) -> bool:
        """Whether weights in host memory are updated beside the backward pass (``engine/host_shards.py``)."""
        layout = self.layout
        alone = layout.prefetches_blocks and layout.world_size == 1 and not layout.accumulates
        fits = self.streams_update and OPTIMIZERS[self.optimizer_name].is_fused and self.images is None
        return alone and fits and not self.needs_all_gradients


HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
ROUTER_BUFFERS = ("correction_bias", "expert_bias")  # never trained


@dataclass(frozen=True)
class TrainedWeights:
    """Parameters of the model itself that are trained where others are frozen."""

    num_in_blocks: int
    num_in_largest_block: int
    num_in_root: int

    @property
    def total(self) -> int:
        return self.num_in_blocks + self.num_in_root


def count_trained(method: MethodSection, model: ModelFacts) -> TrainedWeights | None:
    """What ``method: patterns`` trains, as convert/trainable.py chooses it; None where that is everything, or another
    method.

    Random models have no files whose headers give every name: of these, norms are counted by what is usual. A pattern
    that no known name fits is taken to mean everything, which is the safe side; the model itself refuses it before
    training.
    """
    if method.name != "patterns":
        return None
    blocks: dict[str, int] = {}
    root = frozen = 0
    train, freeze = (
        [part for pattern in patterns for part in expand(pattern, model.parameter_shapes)]
        for patterns in (method.train, method.freeze)
    )
    for name, shape in model.parameter_shapes.items():
        names = (name, HEAD) if model.tied_embeddings and name.endswith(EMBEDDINGS) else (name,)
        if (method.train and not _any(names, train)) or _any(names, freeze):
            frozen += prod(shape)
        elif block := BLOCK_TENSOR.search(name):
            blocks[block[1]] = blocks.get(block[1], 0) + prod(shape)
        else:
            root += prod(shape)
    trained = TrainedWeights(sum(blocks.values()), max(blocks.values(), default=0), root)
    return trained if frozen and trained.total else None


def count_text(config: RunConfig, model: ModelFacts, parts: Mapping[str, str]) -> TrainedWeights | None:
    """What is trained of the language model's own weights: as ``count_trained`` has it, and beside a frozen part all of
    it, or nothing where it is frozen itself. None where everything that is loaded is trained, or adapters are.
    """
    trained = count_trained(config.method, model)
    if trained is not None or config.method.trains_adapters or "frozen" not in parts.values():
        return trained
    if parts["language"] == "frozen":
        return TrainedWeights(0, 0, 0)
    blocks = model.num_in_all_blocks
    return TrainedWeights(blocks, model.num_block_parameters, model.num_parameters - blocks)


def with_towers(model: ModelFacts, parts: Mapping[str, str]) -> ModelFacts:
    """The model with tower and projector counted as parts of it, where everything is trained alike."""
    if model.tower is None or set(parts.values()) != {"trained"}:
        return model
    outer = model.tower.num_parameters + model.tower.num_projector_parameters
    return model.model_copy(update={"num_parameters": model.num_parameters + outer})


def _any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(reaches(name, pattern) for pattern in patterns for name in names)


def count_adapter_parameters(config: RunConfig, model: ModelFacts, new_tokens: NewTokens | None = None) -> int:
    """``r (in + out)`` for each adapted layer of each block, and each group of a stack, with DoRA ``out`` more; 0 where
    everything is trained.

    And what is fully trained (``modules_to_save``), of which a tied pair counts once. Else, for new tokens, ``k H`` in
    embeddings and head. Patterns are matched as convert/lora.py does.
    """
    method = config.method
    if not method.trains_adapters:
        return 0
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    adapted = 0
    for index in range(model.num_layers):
        by_name = model.linears_of if method.target_modules == "all-linear" else model.adaptable_of
        for name, shape in by_name(index).items():
            full_name = f"{model.decoder}.layers.{index}.{name}"
            is_adapted = any(matches(full_name, pattern) for pattern in patterns)
            if is_adapted and not is_saved(full_name, method.modules_to_save):
                adapted += method.rank * shape.adapter_size + shape.out * method.dora
    if not adapted:
        raise UserError(
            f"no layer matches method.target_modules: {', '.join(patterns)}",
            where="method.target_modules",
            fix="name linear layers of the blocks, or use all-linear",
            details=list(model.adaptable_of(model.num_layers - 1)),
        )
    called = [[f"{model.decoder}.{name}" for name in EMBEDDING_NAMES], HEAD_NAMES]
    saved = [any(is_saved(name, method.modules_to_save) for name in names) for names in called]
    matrices = [any(saved)] if model.tied_embeddings else saved
    num_tokens = 0 if new_tokens is None else len(new_tokens.ids)
    rows = sum(model.vocab_size if is_whole else num_tokens for is_whole in matrices)
    others = {
        name: shape
        for name, shape in model.parameter_shapes.items()
        if name.split(".")[-2] not in (*EMBEDDING_NAMES, *HEAD_NAMES) and not name.endswith(ROUTER_BUFFERS)
    }
    saved_modules = (name for name in others if is_saved(name.rpartition(".")[0], method.modules_to_save))
    return adapted + sum(prod(others[name]) for name in saved_modules) + rows * model.hidden_size


def count_expert_adapters(config: RunConfig, model: ModelFacts) -> int:
    """``r (in + out)`` for each expert of each adapted stack."""
    method = config.method
    if not method.trains_adapters:
        return 0
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    return method.rank * sum(
        shape.adapter_size
        for index in range(model.num_layers)
        for name, shape in model.linears_of(index).items()
        if shape.groups > 1 and any(matches(f"{model.decoder}.layers.{index}.{name}", pattern) for pattern in patterns)
    )


def is_saved(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the module, or one that it is a part of, is named by ``patterns``."""
    parts = name.split(".")
    return any(matches(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1) for pattern in patterns)
