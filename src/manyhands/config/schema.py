"""What a run can be: the schema of a run file. Knows no torch, reads no file, has no validator with a side effect.

Every field carries one sentence with its unit; unknown keys are refused. Checks that concern more than one key stand in
``checks.py``. A value ``auto`` is decided by the plan and stays ``auto`` here: the config says what was asked.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model to start from."""

    name: str = Field(description="Hub name, or a folder with config.json, safetensors files and a tokenizer.", min_length=1)
    revision: str | None = Field(None, description="Hub branch, tag or commit; none takes the default branch.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="`pretrained` loads the weights; `random` draws them from the seed (config.json suffices)."
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto", description="Compute dtype; auto is bfloat16 on GPUs that have it, else float32. Trained weights keep float32 masters."
    )
    chat_template: str | None = Field(None, description="A Jinja chat template, or a path to one, in place of the tokenizer's.")
    trust_remote_code: bool = Field(False, description="Allow code from the model's repository to run on this machine.")


class MethodSection(Section):
    """Which weights are trained, and how."""

    name: Literal["full", "lora"] = Field("lora", description="`full` trains every weight, `lora` low-rank adapters on frozen weights.")
    rank: PositiveInt = Field(16, description="LoRA: rank r of the two factors, in dimensions.")
    alpha: float = Field(32.0, gt=0, description="LoRA: the update is scaled by alpha / rank.")
    dropout: Fraction = Field(0.0, description="LoRA: share of the adapter's inputs that is dropped in training.")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="LoRA: `all-linear` (every linear layer of the blocks), or names / glob patterns of modules."
    )


class DataSection(Section):
    """The rows to train on."""

    train: str = Field(description="JSONL file of training rows (for task cpt also a .txt file).", min_length=1)
    validation: str | None = Field(None, description="JSONL file of validation rows; without one a part of `train` is held out.")
    validation_fraction: Fraction = Field(
        0.02, description="Share of the training rows held out when no validation file is given (at least 20 rows); 0 holds out none."
    )
    format: Literal["auto", "messages", "prompt", "question", "text"] = Field(
        "auto", description="Fields of a row: messages; prompt + completion; question + answer; text. auto looks at the first rows."
    )
    max_rows: PositiveInt | None = Field(None, description="Use at most this many training rows, the first ones of the seeded order.")
    max_length: PositiveInt = Field(2048, description="Longest row in tokens.")
    too_long: Literal["refuse", "truncate", "split"] = Field(
        "refuse", description="Rows over max_length: an error, cut at the end, or (task cpt) split into several rows."
    )
    packing: bool = Field(True, description="Lay several rows side by side into one micro-batch; no row sees another.")
    cache: str = Field("~/.cache/manyhands/data", description="Folder for tokenised data, shared between runs, named by content.")


class BatchSection(Section):
    """How many rows form a step. The global batch is the same for any number of GPUs."""

    rows: PositiveInt | Auto = Field("auto", description="Rows of the global batch, over all GPUs and accumulation.")
    tokens: PositiveInt | None = Field(
        None, description="Instead of rows: trained tokens of the global batch (the row that reaches it is the last)."
    )
    micro_rows: PositiveInt | Auto = Field("auto", description="Without packing: rows a GPU processes at once.")
    micro_tokens: PositiveInt | Auto = Field("auto", description="With packing: tokens a GPU processes at once, at least data.max_length.")
    accumulation: PositiveInt | Auto = Field("auto", description="Without packing: micro-batches a GPU accumulates in one step.")


class OptimizerSection(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="Peak learning rate; auto is 2e-4 for lora and 2e-5 for full."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Decoupled weight decay, on matrices only (no norms, biases, embeddings)."
    )
    beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(0.999, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="Gradients are scaled down to this 2-norm; 0 does not clip.")


class ScheduleSection(Section):
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; wsd is warm-up, stable, decay."
    )
    warmup_ratio: Fraction | None = Field(None, description="Warm-up as a share of all steps; 0.03 when neither warm-up key is given.")
    warmup_steps: NonNegativeInt | None = Field(None, description="Warm-up in steps; excludes warmup_ratio.")
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="wsd: last share of all steps in which the rate falls.")
    min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Final learning rate as a share of the peak.")


class StopSection(Section):
    """When the run ends: at whichever comes first."""

    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="Passes over the training rows.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps.")
    max_tokens: PositiveInt | None = Field(None, description="Tokens processed in training, untrained ones included.")
    max_time_s: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds of training, resumed time included.")
    patience: PositiveInt | None = Field(None, description="Evaluations in a row without a lower validation loss.")


class ParallelSection(Section):
    """How the work is spread."""

    gpus: PositiveInt | Auto = Field(
        "auto", description="Processes, one a GPU; auto takes every GPU. Without GPUs: CPU processes (auto: 1)."
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Where to train; auto takes GPUs if there are any.")
    strategy: Literal["auto", "one", "ddp", "fsdp"] = Field(
        "auto", description="one process, ddp (a copy a GPU), fsdp (weights, gradients and optimizer states sharded by FSDP2)."
    )
    reshard: bool | Auto = Field("auto", description="fsdp: free gathered parameters after the forward pass (less memory) or keep them.")
    recompute: Literal["auto", "none", "block"] = Field(
        "auto", description="Activations: kept, or recomputed a block at a time in the backward pass."
    )
    compile: bool | Auto = Field("auto", description="Compile each block with torch.compile; auto does on GPUs.")
    timeout_s: PositiveInt = Field(600, description="Seconds after which a rank that makes no progress ends the run.")


class EvaluateSection(Section):
    """Measuring on rows that are never trained."""

    every_steps: NonNegativeInt | Auto = Field(
        "auto", description="Steps between evaluations; auto is five times a run; 0 only at start and end."
    )
    at_start: bool = Field(True, description="Evaluate once before the first step.")
    max_tokens: PositiveInt | None = Field(None, description="Evaluate on at most this many tokens (whole rows, always the same ones).")
    samples: NonNegativeInt = Field(2, description="Validation prompts answered in each evaluation, as text in the log.")
    max_new_tokens: PositiveInt = Field(64, description="Tokens generated for one sample.")


class CheckpointSection(Section):
    """Saving the state of the run."""

    every_steps: NonNegativeInt | Auto = Field("auto", description="Steps between checkpoints; auto is ten times a run; 0 only at the end.")
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept.")
    keep_best: bool = Field(False, description="Also keep the checkpoint with the lowest validation loss, and export that one.")


class LogSection(Section):
    """What is written while training."""

    every_steps: PositiveInt = Field(1, description="Steps between rows in metrics.jsonl and TensorBoard.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files into the run's folder.")


class OutputSection(Section):
    """What is left at the end."""

    dir: str = Field("runs", description="Folder that holds the runs' folders.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Saved weights; auto is the source's dtype, float32 for adapters, model.dtype for a merged model."
    )
    merge: bool = Field(False, description="lora: also write the model with the adapter merged into its weights.")


class RunConfig(Section):
    """One fine-tuning run: what was asked, never what was derived."""

    name: str = Field(description="The run's name; its folder is output.dir/name.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    task: Literal["sft", "cpt"] = Field("sft", description="sft: conversations, answers trained; cpt: text, every token trained.")
    seed: NonNegativeInt = Field(0, description="Seed of row order, held-out rows, new weights and dropout.")
    model: ModelSection
    method: MethodSection = MethodSection()
    data: DataSection
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    stop: StopSection = StopSection()
    parallel: ParallelSection = ParallelSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()

    @property
    def digest(self) -> str:
        """Hash of everything asked; two runs with the same digest are the same run."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
