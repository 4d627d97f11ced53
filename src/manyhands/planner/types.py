"""The plan: what was decided for one launch, why, and what it will cost. Frozen; one JSON file. Knows no torch.

Every decision, rejection and warning is a code with values. ``text.py`` turns it into a sentence, and nothing
reads a sentence.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.text import open_console
from manyhands.facts.types import AdapterFacts, NewTokens, Nf4Facts
from manyhands.planner.layout import Dtype, Layout

LOG_BYTES = 2**24  # logs, metrics, TensorBoard, reports: a few hundred bytes a step

PartState = Literal["left_out", "frozen", "trained"]
Cause = Literal["first", "resume", "resize", "out_of_memory"]


class FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryEstimate(FrozenModel):
    """Bytes a rank holds at its worst moment, by term. ``limit`` is what a rank may use."""

    terms: dict[str, int]  # weights, gradients, optimizer, activations, logits, gathered, pools, overhead
    limit: int
    margin: float = 0.0  # share of the limit that a plan leaves free, as the estimate is one
    host_terms: dict[str, int] = {}  # what is offloaded or staged: bytes of a rank in its machine's memory
    host_limit: int | None = None  # none: nothing is

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def outside_bytes(self) -> int:
        """Outside of torch's allocator, which a run's report does not count."""
        return self.terms.get("overhead", 0)

    @property
    def host_total(self) -> int:
        return sum(self.host_terms.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit and self.fits_host

    @property
    def is_safe(self) -> bool:
        """Fits, and leaves its margin free."""
        return self.leaves_margin and self.fits_host

    @property
    def leaves_margin(self) -> bool:
        """Whether its margin is free on the device."""
        return self.total <= (1 - self.margin) * self.limit

    @property
    def fits_host(self) -> bool:
        return self.host_limit is None or self.host_total <= self.host_limit


class TimeEstimate(FrozenModel):
    """Seconds of a mean step by term (``time/terms.py``), and what follows for the run."""

    terms: dict[str, float]  # those hidden behind others left out
    step_s: float  # their sum
    tokens_per_s: float  # of samples, all ranks together
    mfu: float | None  # share of the datasheet's bfloat16 FLOP/s, computing again not counted
    evaluation_s: float  # of one evaluation
    num_evaluations: int
    checkpoint_s: float  # of one checkpoint, with a disk that is assumed
    start_s: float  # before the first step, assumed
    total_s: float
    gpu_hours: float
    source: Literal["measured", "datasheet", "assumed"]  # of the GPUs' rates


class Candidate(FrozenModel):
    """One layout that was considered; ``reason`` says why it was not chosen (None for the chosen one)."""

    layout: Layout
    memory: MemoryEstimate
    step_s: float | None = None  # of a mean step; of a CPU only to compare layouts
    chosen: bool = False
    reason: Reason | None = None


class DiskEstimate(FrozenModel):
    """What a run's folder holds at its fullest, in bytes."""

    checkpoint_bytes: int  # of one
    num_checkpoints: int  # at once: those kept, and the one being written
    result_bytes: int  # the model or adapter that is left
    feature_bytes: int = 0  # of images, in data.cache, where that is on the same disk
    free_bytes: int | None  # by when it was planned; none: not known

    @property
    def total(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.result_bytes + self.feature_bytes

    @property
    def fits(self) -> bool:
        """With logs, as far as the free space is known."""
        return self.free_bytes is None or self.total + LOG_BYTES <= self.free_bytes


class MemoryFound(FrozenModel):
    """What a rank measured when its memory ran out, in bytes of its device, what is outside of torch's allocator
    included.
    """

    needed: int  # at least: held, and asked for in vain
    available: int  # to this rank: held, and free


class OutOfMemory(FrozenModel):
    """A plan that ran out of memory: those after it take less."""

    number: int
    layout: Layout
    estimated_bytes: int
    limit: int  # bytes that a rank could use by then
    found: MemoryFound | None = None
    again: bool = False  # it had been made after one that ran out, and took too much still


class PlannedData(FrozenModel):
    """Samples, each counted once."""

    samples: int = 0
    tokens: int = 0
    held_out: int = 0  # for validation
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    images: int = 0


class Plan(FrozenModel):
    """Everything derived for one launch. Workers read this and the config, and nothing else."""

    version: Literal[1] = 1
    number: int = 1
    cause: Cause = "first"
    config_digest: str
    data_digest: str
    data_content: str = ""  # of the tokens themselves
    data_folder: str
    model_folder: str
    model_files: dict[str, str] = {}  # SHA-256 of config.json and of each weights file, by name
    keeps_base: bool = True  # weights of these files are in what is trained or saved: not where all are trained
    new_tokens: NewTokens | None = None
    adapter: AdapterFacts | None = None  # that training continues; its method takes the place of the config's
    stored_nf4: Nf4Facts | None = None  # of a base whose weights are stored so
    # of a model of text and images: vision, projector, language; a language model is trained by its method, whatever
    # that is. {} for a text model
    parts: dict[str, PartState] = {}
    image_unit_cost: float = 0.0  # tokens of text that take as long as one unit of an image (``families.images``)
    keeps_features: bool = False  # of images, once a frozen tower has computed them: in data.cache
    rated_parts: dict[str, tuple[str, ...]] = {}  # those with a learning rate of their own: patterns of their weights
    target_modules: tuple[str, ...] | None = None  # of adapters; none: all linear layers of the blocks

    layout: Layout
    converters: tuple[str, ...] = ()  # what changes the model, in order: names of convert/build.py, or ``module:Class``
    fuse_optimizer: bool = (
        False  # AdamW that clips, steps and writes the compute copy in one kernel, where there is one
    )
    attention: Literal["varlen", "sdpa", "blockwise"]  # see model/attention.py

    num_parameters: int = 0  # of the model with its adapters
    num_trained: int = 0
    num_active: int = 0  # of the model's, those that a token passes through, where that is not all
    data: PlannedData = PlannedData()

    # of a preference loss: log-probabilities under the model before training are computed at each step with the
    # adapters switched off, or once before the first step
    reference: Literal["none", "adapters", "stored"] = "none"
    packing: bool
    shares_prompts: bool = False  # the prompt of a pair is computed once for both answers
    batch_samples: int | None  # samples of the global batch, or
    batch_loss_tokens: int | None  # loss tokens of the global batch, or
    batch_packs: int | None = None  # packs whose samples form a step, each of at most
    batch_pack_tokens: int | None = None  # tokens
    steps_per_epoch: int
    num_steps: int
    warmup_steps: int
    learning_rate: float
    evaluate_every: int  # 0: only at start and end
    checkpoint_every: int  # 0: only at the end
    evaluate_per_epoch: int = 0  # evaluations in each epoch, in place of evaluate_every
    checkpoint_per_epoch: int = 0
    async_checkpoints: bool = False  # written beside the training
    output_dtype: Dtype

    efficiency: float | None = None  # expected share of the computed tokens that is useful
    memory: MemoryEstimate
    disk: DiskEstimate | None = None
    ran_out: OutOfMemory | None = None  # the newest plan of the run that did, where this one is smaller for that
    step_s: float | None = None  # of a mean step; None: of a CPU or an unknown GPU, whose rates are not known
    time: TimeEstimate | None = None  # the same in its parts, and of the run
    environment: dict[str, str] = {}  # what launch/environment.py sets for every worker
    candidates: tuple[Candidate, ...] = ()
    why: tuple[Reason, ...] = ()  # of every decision, in the order in which they are shown; and warnings

    @property
    def step_size(self) -> dict[str, int | None]:
        """What decides which samples form a step, as ``TokenStore.order_samples`` takes it."""
        names = ("batch_samples", "batch_loss_tokens", "batch_packs")
        return {name: getattr(self, name) for name in names} | {"pack_tokens": self.batch_pack_tokens}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def explain(self, width: int = 120) -> str:
        """The decisions with their reasons, the memory by term, and why each alternative was rejected."""
        from io import StringIO

        from manyhands.planner.text import explain_plan

        text = StringIO()
        open_console(file=text, width=width, force_jupyter=False).print(explain_plan(self))
        return text.getvalue().rstrip()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython and notebooks show of a plan."""
        printer.text(self.explain())


def method_of(plan: Plan, config: RunConfig) -> MethodSection:
    """What is trained: as asked, or as the adapter has it from which the run continues; target modules by name, and
    double quantization as weights are stored.
    """
    method = config.method if plan.adapter is None else plan.adapter.method
    update: dict[str, Any] = {} if plan.target_modules is None else {"target_modules": plan.target_modules}
    if plan.stored_nf4 is not None:
        update["double_quant"] = plan.stored_nf4.double_quant
    return method.model_copy(update=update)


# Decisions, in the order of a plan's ``why``; then notes and warnings; then why a candidate was not chosen.
Code = Literal[
    "hardware", "figures", "assumed", "untried", "device", "processes", "nodes", "node_links", "packing", "targets",
    "stacks", "smaller", "strategy", "context", "activation_checkpointing", "reduction", "offload", "memory", "images",
    "features", "batch", "efficiency", "compute", "masters", "frozen", "frozen_experts", "linear", "towers", "parts",
    "attention", "compile", "data_workers", "new_tokens", "adapter", "reference", "prompts", "validation", "left_out",
    "unread", "steps", "warmup", "longer", "evaluation", "checkpoints", "saving", "early_end", "disk", "learning_rate",
    "output_dtype", "environment", "long_samples", "large_batch", "high_learning_rate", "long_warmup", "high_rank",
    "not_next_smaller", "exceeds_memory", "exceeds_host_memory", "near_limit", "computes_again", "computes_more_again",
    "shards_needlessly", "gathers_again", "smaller_micro_batch", "no_faster", "computes_attention_again", "more_memory",
    "moves_more_activations", "updates_copies", "expert_degree", "cuda_graphs", "flash4", "transposed",
]  # fmt: skip


class Reason(BaseModel):
    """``values`` are plain JSON: what the sentence needs, in bytes, tokens, samples and names of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: Code
    values: dict[str, Any] = {}


def reason(code: Code, **values: Any) -> Reason:
    return Reason(code=code, values=values)
