"""What a run can be: the schema of a run file. Knows no torch, reads no file, has no validator with a side effect.

Every field carries one sentence with its unit; unknown keys are refused. Checks that concern more than one key stand in
``checks.py``. A value ``auto`` is decided by the plan and stays ``auto`` here: the config says what was asked.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "question", "text"]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model to start from."""

    name: str = Field(
        description="Hub name, or a folder with config.json, safetensors files and a tokenizer.", min_length=1
    )
    revision: str | None = Field(None, description="Hub branch, tag or commit; none takes the default branch.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`pretrained` loads the weights; `random` draws them from the seed (config.json suffices).",
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto",
        description="Compute dtype; auto is bfloat16 on GPUs that have it, else float32. For what trained weights keep see master_dtype.",
    )
    master_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="full: dtype of trained weights and of their optimizer states. bfloat16 takes 8 bytes a weight in place of 16 or more, "
        "rounds weights stochastically and gives other numbers; it needs optimizer adamw and computes in bfloat16.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja chat template, a path to one, or the name of one (alpaca, chatml, gemma, llama3, mistral, mistral-v7, phi3, "
        "phi4, zephyr), in place of the tokenizer's.",
    )
    new_tokens: tuple[str, ...] = Field(
        (),
        description="Special tokens to add, such as the markers of a chat template; embeddings grow, are trained and saved.",
    )
    trust_remote_code: bool = Field(False, description="Allow code from the model's repository to run on this machine.")


class MethodSection(Section):
    """Which weights are trained, and how."""

    name: Literal["full", "lora", "qlora", "patterns"] = Field(
        "lora",
        description="`full` trains every weight, `lora` low-rank adapters on frozen weights, `qlora` the same on weights in 4 bits (NF4), "
        "`patterns` the weights that `train` and `freeze` name.",
    )
    train: tuple[str, ...] = Field(
        (), description="patterns: names, glob patterns or `re:` expressions of weights that are trained; none is all."
    )
    freeze: tuple[str, ...] = Field(
        (), description="patterns: names or patterns of weights that are not trained; they win over `train`."
    )
    rank: PositiveInt = Field(16, description="LoRA: rank r of the two factors, in dimensions.")
    alpha: float = Field(32.0, gt=0, description="LoRA: the update is scaled by alpha / rank.")
    dropout: Fraction = Field(0.0, description="LoRA: share of the adapter's inputs that is dropped in training.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="LoRA: `all-linear` (every linear layer of the blocks), or names, glob patterns or `re:` expressions of modules.",
    )
    rslora: bool = Field(False, description="LoRA: scale the update by alpha / sqrt(rank) in place of alpha / rank.")
    dora: bool = Field(
        False, description="LoRA: train the magnitude of each output's weights apart from their direction (DoRA)."
    )
    init: Literal["zero", "loftq"] = Field(
        "zero",
        description="qlora: what the factors add at first: nothing (zero), or the best low-rank part of what NF4 loses (loftq); such an "
        "adapter belongs to the weights in 4 bits.",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="LoRA: names or patterns of modules that are trained whole and saved with the adapter, such as lm_head.",
    )
    adapter: str | None = Field(
        None, description="LoRA: go on from this adapter: a PEFT folder, or the folder of a finished run."
    )

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained beside frozen weights; else weights of the model itself are, and a model is
        saved.
        """
        return self.name in ("lora", "qlora")


class Source(Section):
    """Where rows come from: a file, a folder of files, or a data set of the hub."""

    path: str = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet or .txt file (also .gz), a folder of them, or hub:OWNER/NAME.",
        min_length=1,
    )
    name: str | None = Field(
        None, description="What the source is called in counts; none takes the file's or data set's name."
    )
    subset: str | None = Field(None, description="hub: configuration of the data set.")
    split: str = Field("train", description="hub: split of the data set.")
    revision: str | None = Field(None, description="hub: branch, tag or commit; none takes the default branch.")
    format: Format | None = Field(None, description="Fields of a row; none takes data.format.")
    fields: dict[str, str] | None = Field(None, description="Field names by role; none takes data.fields.")
    ignore: tuple[str, ...] | None = Field(None, description="Columns to leave out; none takes data.ignore.")
    weight: float = Field(
        1.0,
        gt=0,
        description="Times the rows are taken in one epoch; with 0.5 another half each epoch, with 2 each row twice.",
    )
    max_samples: PositiveInt | None = Field(
        None, description="Use at most this many rows, the first ones of the seeded order."
    )


class DataSection(Section):
    """The rows to train on."""

    train: str | tuple[str | Source, ...] = Field(
        description="Training rows: a path (see Source.path), or a list of paths and sources with weights.",
        min_length=1,
    )
    validation: str | tuple[str | Source, ...] | None = Field(
        None, description="Validation rows, as in `train`; without them a part of `train` is held out."
    )
    validation_fraction: Fraction = Field(
        0.02,
        description="Share of the training rows held out when no validation rows are given: at least 20 rows, or a tenth where that is "
        "fewer; 0 holds out none.",
    )
    format: Format = Field(
        "auto",
        description="Fields of a row: messages; sharegpt (conversations); alpaca (instruction, input, output); prompt + completion; "
        "question + answer; text. auto looks at the first rows.",
    )
    fields: dict[str, str] = Field(
        {},
        description="Where a row's fields have other names: {our field: name in the row}, such as {prompt: frage, completion: antwort}.",
    )
    ignore: tuple[str, ...] = Field(
        (),
        description="Columns of the rows to leave out as if they were not there, such as one that would be refused for what it says "
        "(rejected, label, images).",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Trained tokens of a conversation: every assistant turn, the last one, or all tokens."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="More arguments of the chat template, such as {enable_thinking: false}."
    )
    date: str = Field(
        "2026-01-01", description="Today's date for chat templates that ask for it.", pattern=r"^\d{4}-\d{2}-\d{2}$"
    )
    max_samples: PositiveInt | None = Field(
        None, description="Use at most this many training rows, the first ones of the seeded order."
    )
    max_length: PositiveInt = Field(2048, description="Longest row in tokens.")
    too_long: Literal["error", "truncate", "split"] = Field(
        "error", description="Rows over max_length: an error, cut at the end, or (task cpt) split into several rows."
    )
    packing: bool | Auto = Field(
        "auto",
        description="Lay several rows side by side into one micro-batch; no row sees another. auto does where the model allows it.",
    )
    workers: NonNegativeInt | Auto = Field(
        "auto",
        description="Processes of each rank that prepare batches ahead; 0 is one thread, auto takes what the batches need.",
    )
    cache: str = Field(
        "~/.cache/manyhands/data", description="Folder for tokenised data, shared between runs, named by content."
    )


class BatchSection(Section):
    """How many rows form a step. The global batch is the same for any number of GPUs."""

    samples: PositiveInt | Auto = Field(
        "auto", description="Samples of the global batch, over all GPUs and accumulation."
    )
    loss_tokens: PositiveInt | None = Field(
        None, description="Instead of rows: trained tokens of the global batch (the row that reaches it is the last)."
    )
    micro_samples: PositiveInt | Auto = Field("auto", description="Without packing: rows a GPU processes at once.")
    micro_tokens: PositiveInt | Auto = Field(
        "auto", description="With packing: tokens a GPU processes at once, at least data.max_length."
    )
    accumulation: PositiveInt | Auto = Field(
        "auto", description="Without packing: micro-batches a GPU accumulates in one step."
    )


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "muon"] = Field(
        "adamw",
        description="adamw; 8bit keeps its states in 8 bits, paged lets them move to host memory (both of bitsandbytes); adafactor; "
        "muon for matrices of the blocks, adamw for the rest.",
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Peak learning rate of weights by name or pattern, in place of `learning_rate`; the first that fits.",
    )
    learning_rate: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="Peak learning rate; auto is 2e-4 for lora and 2e-5 for full."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Decoupled weight decay, on matrices only (no norms, biases, embeddings)."
    )
    beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(0.999, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Gradients are scaled down to this 2-norm; 0 does not clip."
    )


class ScheduleSection(Section):
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; wsd is warm-up, stable, decay."
    )
    warmup_ratio: Fraction | None = Field(
        None, description="Warm-up as a share of all steps; 0.03 when neither warm-up key is given."
    )
    warmup_steps: NonNegativeInt | None = Field(None, description="Warm-up in steps; excludes warmup_ratio.")
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: last share of all steps in which the rate falls."
    )
    min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Final learning rate as a share of the peak."
    )


class StopSection(Section):
    """When the run ends: at whichever comes first."""

    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="Passes over the training rows.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps.")
    max_tokens: PositiveInt | None = Field(None, description="Tokens processed in training, untrained ones included.")
    max_time_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds of training, resumed time included."
    )
    patience: PositiveInt | None = Field(None, description="Evaluations in a row without a lower validation loss.")
    divergence: Literal["fail", "warn"] = Field(
        "fail",
        description="What follows where training has diverged: a gradient of exactly 0, the loss far above its best for "
        "`divergence_steps` steps, the held-out loss far above what it was before training. fail ends the run, warn goes on and the "
        "report says so. A loss that is not a finite number always ends it.",
    )
    divergence_factor: Annotated[float, Field(gt=1)] = Field(
        3.0, description="Far above: more than this times as much, and more than 1 nat above."
    )
    divergence_steps: PositiveInt = Field(
        20, description="Steps in a row that the training loss must be far above its best."
    )


class ParallelSection(Section):
    """How the work is spread."""

    gpus: PositiveInt | Auto = Field(
        "auto", description="Processes, one a GPU; auto takes every GPU. Without GPUs: CPU processes (auto: 1)."
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Where to train; auto takes GPUs if there are any."
    )
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = Field(
        "auto",
        description="one process, ddp (a copy a GPU), fsdp (weights, gradients and optimizer states sharded by FSDP2), hsdp (sharded "
        "within groups of `shard_degree`, a copy a group).",
    )
    shard_degree: PositiveInt | Auto = Field(
        "auto", description="hsdp: ranks that hold one copy together; auto is the ranks of one machine."
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="Held in host memory: nothing, optimizer states, or sharded weights, gradients and optimizer states.",
    )
    offload_activations: bool | Auto = Field(
        "auto",
        description="Keep what the backward pass needs in host memory, copied while blocks compute; auto does on GPUs where blocks are "
        "recomputed and the host has room.",
    )
    reshard_after_forward: bool | Auto = Field(
        "auto", description="fsdp: free gathered parameters after the forward pass (less memory) or keep them."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="Activations: kept; cheap operations recomputed (selective); or all of a block recomputed in the backward pass. "
        "auto takes the first that fits, and the one before it for as many blocks as there is room for.",
    )
    compile: bool | Auto = Field("auto", description="Compile each block with torch.compile; auto does on GPUs.")
    timeout_s: PositiveInt = Field(600, description="Seconds after which a rank that makes no progress ends the run.")


class KernelsSection(Section):
    """Fast paths; `auto` takes one on GPUs where it passes its check, the log says which ran. `reference` never does,
    `fused` asks for it.
    """

    lora: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="Adapted layers of known attention and MLP modules as one function, or one layer after the other (reference).",
    )
    loss: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="Cross-entropy fused with the head, each logit computed once; or in chunks that are recomputed (reference).",
    )
    attention: Literal["auto", "reference"] = Field(
        "auto",
        description="Packs and rows of one length by the fastest kernels that pass a self-test (FlashAttention 4 where it is installed, "
        "cuDNN); or both by torch's varlen (reference).",
    )
    linear: Literal["compute_dtype", "fp8"] = Field(
        "compute_dtype",
        description="Linear layers of the blocks, in training: in the compute dtype, or their products in fp8 (other numerics, checked "
        "before step 1).",
    )
    optimizer: Literal["auto", "reference"] = Field(
        "auto",
        description="AdamW of full training in one process: gradient, states, weight and its bfloat16 copy in one pass; or torch's own, "
        "with clipping and casts as passes of their own (reference).",
    )
    nf4: Literal["auto", "reference"] = Field(
        "auto",
        description="qlora: weights dequantised in one launch, with the very bits that bitsandbytes gives; or by bitsandbytes (reference).",
    )


class EvaluateSection(Section):
    """Measuring on validation rows."""

    every_steps: NonNegativeInt | Auto = Field(
        "auto", description="Steps between evaluations; auto is five times a run; 0 only at start and end."
    )
    at_start: bool = Field(True, description="Evaluate once before the first step.")
    max_tokens: PositiveInt | None = Field(
        None, description="Evaluate on at most this many tokens (whole rows, always the same ones)."
    )
    prompts: NonNegativeInt = Field(
        2, description="Validation prompts answered in each evaluation, as text in the log."
    )
    max_new_tokens: PositiveInt = Field(64, description="Tokens generated for one sample.")


class CheckpointSection(Section):
    """Saving the state of the run."""

    every_steps: NonNegativeInt | Auto = Field(
        "auto", description="Steps between checkpoints; auto is ten times a run; 0 only at the end."
    )
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept.")
    keep_best: bool = Field(
        False, description="Also keep the checkpoint with the lowest validation loss, and export that one."
    )


class LogSection(Section):
    """What is written while training."""

    every_steps: PositiveInt = Field(1, description="Steps between rows in metrics.jsonl and TensorBoard.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files into the run's folder.")


class OutputSection(Section):
    """What is left at the end."""

    dir: str = Field("runs", description="Folder that holds the runs' folders.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Dtype of saved weights, towers included. auto: of adapters float32; of a merged model the compute dtype "
        "(model.dtype); of any other model the source's, or bfloat16 with model.master_dtype=bfloat16.",
    )
    merge: bool = Field(False, description="lora: also write the model with the adapter merged into its weights.")


class RunConfig(Section):
    """One fine-tuning run: what was asked, never what was derived."""

    name: str = Field(
        description="The run's name; its folder is output.dir/name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
    )
    task: Literal["sft", "cpt", "mixed"] = Field(
        "sft",
        description="sft: conversations, answers trained; cpt: text, every token trained; mixed: both, each row by its format.",
    )
    seed: NonNegativeInt = Field(0, description="Seed of row order, held-out rows, new weights and dropout.")
    model: ModelSection
    method: MethodSection = MethodSection()
    data: DataSection
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    stop: StopSection = StopSection()
    parallel: ParallelSection = ParallelSection()
    kernels: KernelsSection = KernelsSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()

    @property
    def digest(self) -> str:
        """Hash of everything asked; two runs with the same digest are the same run."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
