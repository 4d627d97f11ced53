"""The plan: what was decided for one launch, why, and what it will cost. Frozen; one JSON file. Knows no torch."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict

from manyhands.facts.types import AdapterFacts, NewTokens

Cause = Literal["first", "resume", "resize", "out_of_memory"]
Strategy = Literal["single", "ddp", "fsdp", "hsdp"]
Checkpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]

LIGHTER: dict[Checkpointing, Checkpointing] = {
    "full": "selective",
    "selective": "none",
}  # what keeps more and repeats less


def describe_checkpointing(recompute: Checkpointing, lighter_layers: int) -> str:
    """``block``, or ``block, of the last 63 selective``."""
    return f"{recompute}, of the last {lighter_layers} {LIGHTER[recompute]}" if lighter_layers else recompute


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryEstimate(Part):
    """Bytes a rank holds at its worst moment, by term. ``limit`` is what a rank may use."""

    terms: dict[str, int]  # weights, gradients, optimizer, activations, logits, gathered, overhead
    limit: int
    host_terms: dict[str, int] = {}  # what is offloaded: bytes of a rank in its machine's memory
    host_limit: int | None = None  # none: nothing is offloaded

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def host_total(self) -> int:
        return sum(self.host_terms.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit and self.fits_host

    @property
    def fits_host(self) -> bool:
        return self.host_limit is None or self.host_total <= self.host_limit


class Candidate(Part):
    """One way that was considered; ``reason`` says why it lost (empty for the chosen one)."""

    strategy: Strategy
    activation_checkpointing: Checkpointing
    lighter_layers: int = 0
    reshard_after_forward: bool
    micro: int  # tokens with packing, rows without
    memory: MemoryEstimate
    chosen: bool
    reason: str


class DiskEstimate(Part):
    """What a run's folder holds at its fullest, in bytes."""

    checkpoint_bytes: int  # of one
    num_checkpoints: int  # at once: those kept, and the one being written
    result_bytes: int  # the model or adapter that is left
    free_bytes: int | None  # by when it was planned; none: not known

    @property
    def total(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.result_bytes


class RanOut(Part):
    """A plan that ran out of memory: those after it take less."""

    number: int
    world_size: int
    strategy: Strategy
    reshard_after_forward: bool
    activation_checkpointing: Checkpointing
    micro_tokens: int  # of a full micro-batch, with packing or without
    estimated_bytes: int
    limit: int  # bytes that a rank could use by then


class Plan(Part):
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
    adapter: AdapterFacts | None = None  # to go on from; its method takes the place of the config's

    device: Literal["cuda", "cpu"]
    world_size: int
    strategy: Strategy
    shard_degree: int | None = None  # hybrid: ranks that hold one copy together
    reshard_after_forward: bool
    reduce_every: bool = True  # sharded gradients after every micro-batch; else whole ones wait for the last
    activation_checkpointing: Checkpointing
    lighter_layers: int = 0  # of the last blocks: recomputed the next lighter way, as there is room for what they keep
    offload: Offload = "none"
    offload_activations: bool = False
    compile: bool
    converters: tuple[str, ...] = ()  # what changes the model, in order: names of convert/build.py, or ``module:Class``
    fuse_optimizer: bool = False  # AdamW that clips, steps and writes the compute copy in one pass, where there is one
    dynamic: bool = True  # compiled blocks take micro-batches of any shape; not where all rows have one length
    compute_dtype: Literal["bfloat16", "float32", "float64"]
    master_dtype: Literal[
        "bfloat16", "float32", "float64"
    ]  # of trained weights and optimizer states; sums are float32 at least
    frozen_dtype: Literal["bfloat16", "float32", "float64"]  # of frozen weights
    attention: Literal["varlen", "sdpa", "blockwise"]  # see convert/attention.py

    packing: bool
    batch_samples: int | None  # rows of the global batch, or
    batch_loss_tokens: int | None  # trained tokens of the global batch
    micro_samples: int | None  # without packing
    micro_tokens: int | None  # with packing: capacity of one micro-batch
    pack_tokens: int | None = None  # with packing, all rows of one length: tokens of every micro-batch
    accumulation: int | None  # without packing; with packing it follows from each step's rows
    steps_per_epoch: int
    num_steps: int
    warmup_steps: int
    learning_rate: float
    evaluate_every: int  # 0: only at start and end
    checkpoint_every: int  # 0: only at the end
    output_dtype: Literal["bfloat16", "float16", "float32", "float64"]

    efficiency: float | None = None  # expected share of the computed tokens that is useful
    memory: MemoryEstimate
    disk: DiskEstimate | None = None
    ran_out: RanOut | None = None  # the newest plan of the run that did, where this one is smaller for that
    step_s: float | None = None  # not predicted yet
    environment: dict[str, str] = {}  # what launch/environment.py sets for every worker
    candidates: tuple[Candidate, ...] = ()
    why: tuple[str, ...] = ()  # one sentence a decision, with its formula

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
