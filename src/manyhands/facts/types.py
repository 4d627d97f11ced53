"""Frozen facts: the model's dimensions, the data's lengths, the devices. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from manyhands.config.schema import MethodSection
from manyhands.core.machine import GpuArchitecture, Vendor

StoredDtype = Literal["bfloat16", "float16", "float32", "float64"]


class Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinearShape(NamedTuple):
    """A linear layer, or a stack of ``groups`` alike of which a token passes through ``active``; dense: one of one.

    Every term of memory and time that depends on a block's weights asks this description, so that a kind of layer that
    holds more than a token uses needs no term of its own.
    """

    out: int  # of all groups together
    into: int
    groups: int = 1
    active: int = 1

    @property
    def size(self) -> int:
        """Elements that are held."""
        return self.out * self.into

    @property
    def active_out(self) -> int:
        """Outputs that are computed for a token."""
        return self.out // self.groups * self.active

    @property
    def active_size(self) -> int:
        """Elements that a token is multiplied with."""
        return self.active_out * self.into

    @property
    def adapter_size(self) -> int:
        """Elements of an adapter of rank 1 on each group."""
        return self.out + self.into * self.groups


class Nf4Facts(Fact):
    """Weights that bitsandbytes has stored in NF4."""

    double_quant: bool
    linears: tuple[str, ...]  # of ``block_linear_shapes``, those that are stored so in every block


class TowerFacts(Fact):
    """Dimensions of vision tower and projector. Unit: see ``patches_per_unit`` (``families.images.ImageKind``)."""

    num_parameters: int  # of the tower
    num_projector_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_block_parameters: int  # of one block
    block_linear_shapes: dict[str, LinearShape]  # of one block
    patches_per_unit: int
    unit_values: int  # numbers that the pixels of a unit are
    tokens_per_unit: float  # placeholders in the text
    bidirectional: bool = False  # tokens of an image see all of it in the decoder
    num_further: int = 0  # lists of features that further layers of the decoder add, beside those of its embeddings
    # numbers of a unit that go into the projector, and those of further features; 0: where they do is not described
    projector_values: float = 0.0
    modules: dict[str, tuple[str, ...]] = {}  # of vision and projector, by their names in transformers' model
    shapes: dict[str, tuple[int, ...]] = {}  # of every tensor of tower and projector by its name in the files


class ModelFacts(Fact):
    """Dimensions of a decoder, from its config.json and the headers of its safetensors files.

    ``num_parameters`` counts each tied tensor once, and of a multimodal model the text decoder alone.
    ``block_linear_shapes`` describes the linear layers of ONE block, by their name within the block
    (``self_attn.q_proj``).
    """

    name: str  # as asked
    folder: str  # where the files are on this machine
    model_type: str
    decoder: str = "model"  # the module that holds embeddings and blocks, as transformers calls it
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    sliding_window: int | None
    num_windowed_layers: int | None = None  # with that window; None: all, if there is one
    attention_softcap: float | None = None  # scores are soft-capped, which few attention kernels can compute
    attention_sinks: bool = False  # heads have a learned score without a value
    rotates_by_length: bool = False  # rotary frequencies hang on a document's length
    stored_dtype: StoredDtype
    stored_nf4: Nf4Facts | None = None  # dtype and shapes are then those of the weights before
    stored_mxfp4: tuple[str, ...] = ()  # of ``block_linear_shapes``, stacks in MXFP4; likewise
    num_parameters: int
    is_multimodal: bool = False  # by config.json: the text decoder is one part among others, stored with it or not
    num_tower_parameters: int = 0  # vision, audio and projectors of a multimodal model: they stay on disk
    tower: TowerFacts | None = None  # what images pass through, if the model has it
    num_block_parameters: int  # of one block, the largest
    num_in_blocks: int = 0  # of all blocks; 0: each has as many
    block_linear_shapes: dict[str, LinearShape]  # of the same block
    other_linear_shapes: dict[int, dict[str, LinearShape]] = {}  # of blocks without stacks where others have some
    shared_gate: str = ""  # in blocks with stacks, the layer whose one output weighs a shared expert
    block_norm_elements: int  # elements a token that the norms of one block read: hidden_size for each
    head_norm_elements: int = 0  # of these, what norms of queries and keys read
    num_attention_layers: int | None = None  # None: every block has attention
    num_mixer_layers: int = 0  # blocks with linear attention, a state space model or a short convolution
    mixer_values: int = 0  # numbers a token that such a mixer's kernels keep for the backward pass
    mixer_state: int = 0  # numbers of the state that it carries along a row
    norms_mlp_output: bool = False  # before it is added to the residual stream
    parameter_shapes: dict[str, tuple[int, ...]] = {}  # of every tensor by its name in the files, or in the model
    files: dict[str, str] = {}  # SHA-256 of config.json and, unless weights are random, of each weights file
    packs: bool = True  # whether samples of one pack train as if each was alone
    packing_reason: str = ""  # how that is known, or why not

    def linears_of(self, index: int) -> dict[str, LinearShape]:
        """The linear layers of a block."""
        return self.other_linear_shapes.get(index, self.block_linear_shapes)

    def adaptable_of(self, index: int) -> dict[str, LinearShape]:
        """What can be adapted by name: the linear layers of a block, and a shared expert's gate."""
        linears = self.linears_of(index)
        gated = self.shared_gate and any(shape.groups > 1 for shape in linears.values())
        return linears | ({self.shared_gate: LinearShape(1, self.hidden_size)} if gated else {})

    @property
    def num_in_all_blocks(self) -> int:
        return self.num_in_blocks or self.num_layers * self.num_block_parameters

    @property
    def attention_share(self) -> float:
        """Of the blocks, those with attention."""
        return 1.0 if self.num_attention_layers is None else self.num_attention_layers / self.num_layers

    @property
    def mixer_share(self) -> float:
        return self.num_mixer_layers / self.num_layers

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token passes through: all of a dense model."""
        return self.num_parameters - self.sum_linears(lambda shape: shape.size - shape.active_size)

    def sum_linears(self, measure: Callable[[LinearShape], int]) -> int:
        """The sum of ``measure`` over the linear layers of all blocks."""
        others = self.other_linear_shapes.values()
        blocks = [(self.num_layers - len(others), self.block_linear_shapes), *((1, linears) for linears in others)]
        return sum(number * sum(map(measure, linears.values())) for number, linears in blocks)

    @property
    def has_groups(self) -> bool:
        return any(shape.groups > 1 for shape in self.block_linear_shapes.values())

    @property
    def rows_per_token(self) -> int:
        """Copies of a token that are sorted by group; 0 without stacks."""
        return max((shape.active for shape in self.block_linear_shapes.values() if shape.groups > 1), default=0)


class SharedLengths(Fact):
    """Fields of ``DataFacts`` where the prompt of several answers is computed once."""

    num_tokens: int
    max_length: int
    mean_length: float
    num_validation_tokens: int
    first_lengths: tuple[int, ...]


class DataFacts(Fact):
    """The prepared samples. Lengths are in tokens."""

    folder: str  # the token cache on this machine
    digest: str  # names what the samples were made of
    content: str = ""  # names the samples themselves: equal content, equal tokens
    num_samples: int
    num_tokens: int  # of all samples, each once
    num_loss_tokens: int  # loss tokens of all samples, each once
    max_length: int  # longest sample
    mean_length: float  # of an epoch
    num_documents: int = 1  # of a sample
    shared: SharedLengths | None = None
    # mean_length with a prompt for each answer, also where it is computed once
    whole_length: float = Field(default_factory=lambda fields: fields["mean_length"])
    num_validation_samples: int
    num_validation_tokens: int
    num_repeated: int = 0  # validation samples with the very tokens of a training sample
    unread: dict[str, tuple[str, ...]] = {}  # columns that hold something and are not read, by source
    num_dropped: int = 0
    num_truncated: int = 0
    num_split: int = 0
    left_out: dict[str, dict[str, int]] = {}  # samples by the key that left them out, and by source
    # Filled when batch.loss_tokens or batch.packs is asked: steps of each epoch that the run begins, as far as
    # stop.max_steps lets it come.
    steps_of_epochs: tuple[int, ...] = ()
    # of the samples that the first epoch begins with, in its order: all of it, or some ten thousands
    first_lengths: tuple[int, ...] = ()
    first_labels: tuple[int, ...] = ()  # loss tokens of the same; filled when batch.loss_tokens is asked
    # (samples, weight) of each source: an epoch takes the samples of each as often as its weight
    sources: tuple[tuple[int, float], ...] = Field(default_factory=lambda fields: ((fields["num_samples"], 1.0),))
    samples_per_epoch: int = Field(default_factory=lambda fields: fields["num_samples"])  # of the first epoch
    as_given: bool = False  # samples keep their order, also in packs
    num_images: int = 0  # of the training samples, each once
    num_validation_images: int = 0
    max_image_units: int = 0  # of one sample; units are patches or tiles, by family (``families.images.ImageKind``)
    max_units_per_token: float = 0.0  # of one sample: units of its images over all its tokens; 0: not known
    mean_image_units: float = 0.0  # of a sample of an epoch, those without images included
    max_image_tokens: int = 0  # of one sample: placeholders that become features
    largest_id: int = -1  # of all tokens but the placeholders of images


class GpuFacts(Fact):
    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    vendor: Vendor = "nvidia"
    compute_capability: tuple[int, int] | None = None  # NVIDIA's; torch makes one up for AMD's
    gfx: str = ""  # AMD's architecture, such as gfx942
    uuid: str = ""  # NVIDIA's: by which CUDA_VISIBLE_DEVICES may name it

    @property
    def architecture(self) -> GpuArchitecture:
        return GpuArchitecture(self.vendor, self.compute_capability, self.gfx)

    @property
    def has_bfloat16(self) -> bool:
        return self.architecture.has_bfloat16


class Figure(Fact):
    """A number, and who says it: ``measured: ...``, ``driver: ...`` or ``datasheet: ...``."""

    value: float
    source: str


class GpuKind(Fact):
    """What is known of a kind of GPU, from ``facts/gpus.toml``, which explains the fields."""

    name: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...]
    memory_gb: int
    vendor: Vendor
    compute_capability: tuple[int, int] | None = None
    gfx: str = ""
    host: str
    note: str = ""
    memory_mib: Figure
    usable_mib: Figure
    bf16_tflops: Figure | None = None
    fp8_tflops: Figure | None = None
    peak_tflops: Figure | None = None  # the datasheet's, where bf16_tflops was measured
    peak_fp8_tflops: Figure | None = None
    memory_gb_s: Figure
    link_gb_s: Figure

    @property
    def architecture(self) -> GpuArchitecture:
        return GpuArchitecture(self.vendor, self.compute_capability, self.gfx)


class Calibration(Fact):
    """Rates that ``manyhands doctor --calibrate`` measured (``bench/calibrate.py``)."""

    matmul_tflops: float = Field(gt=0)
    small_matmul_tflops: float = Field(gt=0)
    attention_tflops: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    pcie_gb_s: float = Field(gt=0)
    launch_us: float = Field(gt=0)
    fp8_tflops: float | None = Field(None, gt=0)
    link_gb_s: float | None = Field(None, gt=0)  # that each rank receives in a gather; None: one GPU
    when: str = ""


class UnusableGpus(Fact):
    """GPUs that are in this machine and cannot be used; parts of an error."""

    found: str
    why: str
    fix: str


class HostFacts(Fact):
    """One machine. ``gpus`` is empty where there are none."""

    name: str = ""  # among several nodes
    gpus: tuple[GpuFacts, ...]
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    num_nodes: int = 1  # machines like this one; more than one only where a plan is asked for GPUs that are not here
    is_here: bool = True  # else this machine was only described (``--gpus 8xH200``)
    kind: GpuKind | None = None  # of all GPUs, where it is a known one
    calibration: Calibration | None = None  # of these GPUs, where they were measured
    unusable_gpus: UnusableGpus | None = None  # set only if ``gpus`` is empty although the user did not ask for it
    has_flash4: bool = False  # the package flash-attn-4 is installed, for a described machine too in this Python
    lost_gpus: tuple[str, ...] = ()  # beside ``gpus``: those that are listed and do not answer, with the driver's words


class NewTokens(Fact):
    """The tokens of ``model.new_tokens`` in the tokenizer that has them."""

    ids: tuple[int, ...]  # in the order asked
    fresh_ids: tuple[int, ...]  # those that the tokenizer did not know before
    vocab_size: int  # rows of embeddings and head that they need; the model's own where it has rows to spare


class AdapterFacts(Fact):
    """The adapter whose training a run continues."""

    folder: str
    method: MethodSection  # as asked, with rank, alpha, target_modules, ... as the adapter has them


class Facts(Fact):
    model: ModelFacts
    data: DataFacts
    host: HostFacts
    new_tokens: NewTokens | None = None
    adapter: AdapterFacts | None = None
    free_disk_bytes: int | None = None  # for the run's folder; what an earlier launch has saved there counts as free
    free_cache_bytes: int | None = None  # for features of images in data.cache; those of other models count as free
    shares_disk: bool = False  # both are on one file system
    world_size: int | None = None  # set where somebody else launched us: the number of processes is given
    local_world_size: int | None = None  # and how many of them are on this machine
    hosts: tuple[HostFacts, ...] = ()  # of several nodes, in their order; ``host`` then is the least of all of them
    node_ranks: tuple[int, ...] = ()  # processes of each
    num_left: int | None = None  # GPUs (on a CPU processes) that a fault has left of a run's, to plan for
    node_link: Figure | None = None  # GB/s that one of them sends to another, of the slowest pair
