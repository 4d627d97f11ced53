"""The schema of a run file. Knows no torch, reads no file, has no validator with a side effect.

Every key has a description with its unit; unknown keys are refused. Sources, ``data`` and ``batch`` are in
``data_schema.py``, sections that stand alone in ``section_schemas.py``. Checks that involve more than one key are in
``checks.py``. A value ``auto`` is decided by the plan and stays ``auto`` here:
the config is what was asked for.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from manyhands.config.data_schema import (
    Auto,
    BatchSection,
    DataSection,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)
from manyhands.config.data_schema import Source as Source
from manyhands.config.section_schemas import (
    CheckpointSection,
    GuardsSection,
    LogSection,
    MethodSection,
    PartName,
    PartOfRun,
    PreferenceSection,
    SubmitSection,
)
from manyhands.config.tasks import DEFAULT_TASK, TASKS
from manyhands.optim.registry import OPTIMIZERS


class ModelSection(Section):
    """The model to start from."""

    name: str = Field(
        description="Hub name, folder with config.json, safetensors and tokenizer, or a finished run's folder, whose "
        "result is trained further.",
        min_length=1,
    )
    revision: str | None = Field(None, description="Hub branch, tag or commit; null is the default branch.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`pretrained` loads the weights; `random` initializes them from the seed (needs only config.json).",
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto",
        description="Compute dtype; auto is bfloat16 on GPUs that support it, else float32.",
    )
    master_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="full: dtype of trained weights and optimizer states. bfloat16 takes 8 bytes per parameter, "
        "not 16 or more, with stochastic rounding (different numerics); it needs optimizer adamw. With "
        "parallel.offload they are in host memory, and the GPU updates them.",
    )
    frozen_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="lora: auto keeps frozen weights in model.dtype. fp8 keeps linear layers of the blocks as e4m3 "
        "values alone, with a scale per output: half the memory, and the adapter is trained beside these rounded "
        "weights; it needs kernels.linear=fp8 and a copy on each GPU.",
    )
    chat_template: str | None = Field(
        None,
        description="Replaces the tokenizer's chat template: Jinja text, a path, or a name: alpaca, alpaca-chat, "
        "alpaca-phi, alpaca-plain, chatml, chatml-no-bos, cohere, deepseek-v2, deepseek-v3, exaone, falcon-h1, gemma, "
        "gemma4, jamba, llama3, llama3.1, llama3.2-vision, llama4, metharme, mistral, mistral-v1, mistral-tekken, "
        "mistral-v7, phi3, phi3.5, phi4, qwen2-vl, qwen2.5, tekken (that of the version in the model's tekken.json), "
        "vicuna, zephyr.",
    )
    new_tokens: tuple[str, ...] = Field(
        (),
        description="Special tokens to add; embeddings are resized, trained and saved.",
    )
    special_tokens: dict[str, str] = Field(
        {},
        description="Replaces special tokens of the tokenizer, such as {eos: <|im_end|>}: bos, eos (ends answers and "
        "texts), pad, unk. A token that the tokenizer lacks is added as those of new_tokens are.",
    )
    converters: tuple[str, ...] = Field(
        (),
        description="Classes of your own that change the model, in this order: module:Class, or file.py:Class for a "
        "file next to the run file. Each is a subclass of manyhands.convert.protocol.BaseConverter. Plans do not "
        "estimate what they take.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code from the model's repository.")


def _check_optimizer_name(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {name}")
    return name


class OptimizerSection(Section):
    """How weights are updated."""

    name: Annotated[str, AfterValidator(_check_optimizer_name)] = Field(
        next(iter(OPTIMIZERS)),
        description="; ".join(f"{name}: {spec.summary}" for name, spec in OPTIMIZERS.items()) + ".",
        json_schema_extra=lambda schema: schema.update(enum=list(OPTIMIZERS)),
    )
    learning_rates: dict[str, PositiveFloat] = Field(
        {},
        description="Peak learning rate by name or pattern of weights; the first match counts. {lora_B: 3.2e-3} beside "
        "a learning_rate of 2e-4 is LoRA+ with ratio 16.",
    )
    part_learning_rates: dict[PartName, PositiveFloat] = Field(
        {},
        description="Peak learning rate of trained parts of a model of text and images, such as {vision: 1e-5, "
        "projector: 1e-3}; others have `learning_rate`, and patterns of `learning_rates` take precedence.",
    )
    learning_rate: PositiveFloat | Auto = Field(
        "auto", description="Peak learning rate; auto is 2e-4 for lora and 2e-5 for full."
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Weight decay, on matrices only (not norms, biases or, unless `decay_embeddings`, embeddings)."
    )
    decay_embeddings: bool = Field(
        False, description="Weight decay on embeddings too, as transformers' Trainer has it."
    )
    beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(0.999, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    max_grad_norm: NonNegativeFloat = Field(
        1.0,
        description="Clip gradients to this 2-norm; 0 does not clip: on one GPU, weights in "
        "host memory (`parallel.offload: all`) are then updated beside the backward pass.",
    )


class ScheduleSection(Section):
    """The learning rate schedule."""

    name: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warmup; wsd is warmup-stable-decay."
    )
    warmup_ratio: Fraction | None = Field(None, description="Warmup as a fraction of all steps; 0.03 if not given.")
    warmup_steps: NonNegativeInt | None = Field(None, description="Warmup in steps; excludes warmup_ratio.")
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: fraction of all steps in which the learning rate decays."
    )
    min_ratio: Share = Field(0.0, description="Final learning rate as a fraction of the peak.")


class StopSection(Section):
    """When the run ends: at whichever limit comes first."""

    epochs: PositiveFloat = Field(1.0, description="Epochs over the training data.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps.")
    max_tokens: PositiveInt | None = Field(None, description="Tokens processed in training, with or without a loss.")
    max_time_s: PositiveFloat | None = Field(None, description="Seconds of training, including those before a resume.")
    patience: PositiveInt | None = Field(None, description="Evaluations in a row without a lower validation loss.")
    divergence: Literal["fail", "warn"] = Field(
        "fail",
        description="If training diverges (a gradient of exactly 0, a loss far above its best for `divergence_steps` "
        "steps or above `loss_above`, a validation loss far above the one before training): fail the "
        "run, or warn in log and report. A loss that is not finite is a matter of `guards`.",
    )
    divergence_factor: Annotated[float, Field(gt=1)] = Field(
        3.0, description="Far above: by more than this factor and more than 1 nat."
    )
    divergence_steps: PositiveInt = Field(20, description="Steps in a row with a training loss far above its best.")
    loss_above: PositiveFloat | None = Field(
        None,
        description="Training has also diverged if its loss is above this bound for `loss_above_steps` steps in a row.",
    )
    loss_above_steps: PositiveInt = Field(3, description="Steps in a row with a training loss above `loss_above`.")


class ParallelSection(Section):
    """How the work is distributed over GPUs."""

    gpus: PositiveInt | Auto = Field(
        "auto",
        description="Number of GPUs on all machines, one process each; auto is all. On CPUs: processes (auto: 1 each).",
    )
    nodes: PositiveInt | Auto = Field(
        "auto",
        description="Number of machines; a start on another number is refused. auto: those started together.",
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Device to train on; auto is GPUs if there are any."
    )
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"] = Field(
        "auto",
        description="single (one process), ddp (replicated on each GPU), fsdp (weights, gradients and optimizer states "
        "sharded by FSDP2), hsdp (sharded within groups of `shard_degree` ranks, replicated between them), zero1, "
        "zero2, zero3 (DeepSpeed's ZeRO: optimizer states sharded, gradients too, weights too; extra `deepspeed`).",
    )
    shard_degree: PositiveInt | Auto = Field("auto", description="hsdp: ranks per shard group; auto is one machine's.")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="Keep in host memory: optimizer states (zero1 to zero3: master weights and gradients too), or all "
        "(weights, gradients and optimizer states).",
    )
    offload_activations: bool | Auto = Field(
        "auto",
        description="Keep saved activations in host memory, copied during compute; auto does on GPUs with activation "
        "checkpointing if the host has enough memory.",
    )
    reshard_after_forward: bool | Auto = Field(
        "auto", description="fsdp: free unsharded parameters after the forward pass (less memory), or keep them."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "except_attention", "full"] = Field(
        "auto",
        description="Recompute activations in the backward pass: none, cheap operations (selective), all of a block "
        "except_attention, or all of it (full). auto takes the first that fits in memory, and a lighter one for as "
        "many blocks as possible.",
    )
    ddp_bucket_mb: PositiveInt | Auto = Field(
        "auto",
        description="ddp: megabytes of gradients that are reduced at once during the backward pass; auto is 100, and "
        "all of them for adapters.",
    )
    compile: bool | Auto = Field("auto", description="Compile each block with torch.compile; auto does on GPUs.")
    timeout_s: PositiveInt = Field(600, description="Seconds without progress of a rank after which the run fails.")


class LaunchSection(Section):
    """What `manyhands train` does beside starting the processes; torchrun and accelerate have their own options."""

    restarts: NonNegativeInt = Field(
        3,
        description="Restarts from the newest checkpoint after a process died, hung or failed unexpectedly: at most so "
        "many without a newer checkpoint in between, at once, then 1 s, 2 s, 4 s ... later; never where the same error "
        "comes at the same step again. 0 also ends a run whose memory runs out, which otherwise continues "
        "with a smaller plan. Under torchrun and accelerate --max-restarts counts instead.",
    )
    min_gpus: PositiveInt | None = Field(
        None,
        description="Fewest GPUs (on CPUs: processes) with which the run continues, the MIN of torchrun's MIN:MAX: "
        "where one of a single machine, or a whole machine of several, is lost, the restart plans for those that are "
        "left, with the same samples in each step. A start on one machine takes fewer than parallel.gpus. Unset: all "
        "are needed.",
    )


class KernelsSection(Section):
    """Fast kernels: `auto` uses one on GPUs if it passes a self-test (see the log), `reference` never does."""

    lora: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="LoRA layers of an attention or MLP module as one autograd function, or layer by layer.",
    )
    loss: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="Cross-entropy fused with the LM head, or chunked with recomputed logits (reference).",
    )
    attention: Literal["auto", "reference"] = Field(
        "auto",
        description="The fastest kernel that passes a self-test (FlashAttention 4 if installed, cuDNN), or torch's "
        "varlen attention (reference).",
    )
    linear: Literal["compute_dtype", "fp8"] = Field(
        "compute_dtype",
        description="Linear layers of the blocks in training: in model.dtype, or fp8 matmuls (different numerics, "
        "checked before step 1).",
    )
    optimizer: Literal["auto", "reference"] = Field(
        "auto",
        description="full, one process: AdamW with clipping and the cast to bfloat16 in one kernel; or torch's AdamW "
        "(reference).",
    )
    nf4: Literal["auto", "reference"] = Field(
        "auto",
        description="qlora: dequantization in one kernel, bit-identical to bitsandbytes' (reference).",
    )
    deterministic: bool = Field(
        False,
        description="On GPUs too the same run has the same losses, bit for bit, also after a restart (on CPUs it has "
        "anyway): kernels that sum in a fixed order, so no cuDNN attention. What has no such kernel is an error.",
    )


class EvaluateSection(Section):
    """Evaluation on validation data."""

    data: dict[str, str] = Field(
        {},
        description="Further evaluation sets by name, {test: test.jsonl}, each with losses of its own: a path as in "
        "`data.train`. Without other validation data they are the validation data.",
    )
    every_steps: NonNegativeInt | PartOfRun | Auto = Field(
        "auto",
        description="Steps between evaluations, or below 1 a share of all steps; auto: five per run; 0: at start and "
        "end.",
    )
    per_epoch: PositiveInt | None = Field(
        None, description="Evenly spaced evaluations in each epoch, the last at its end; excludes every_steps."
    )
    at_start: bool = Field(True, description="Evaluate once before the first step.")
    max_tokens: PositiveInt | None = Field(
        None, description="Evaluate on at most this many tokens, always the same samples."
    )
    prompts: NonNegativeInt = Field(2, description="Validation prompts answered in each evaluation, in the log.")
    max_new_tokens: PositiveInt = Field(64, description="Maximum tokens generated per prompt.")


class OutputSection(Section):
    """The files written at the end."""

    dir: str = Field("runs", description="Folder in which the run's folder is created.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Dtype of saved weights, including vision and audio towers; weights that float16 does not reach "
        "are an error. auto: float32 for adapters; "
        "model.dtype for a merged model; for other models that of the source, or bfloat16 with "
        "model.master_dtype=bfloat16.",
    )
    merge: bool = Field(False, description="lora: also write the model with the adapter merged into its weights.")


def _check_task_name(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"no task is called {name}")
    return name


class RunConfig(Section):
    """One fine-tuning run: what was asked for, never what was derived."""

    name: str = Field(
        description="The run's name; its folder is output.dir/name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
    )
    task: Annotated[str, AfterValidator(_check_task_name)] = Field(
        DEFAULT_TASK,
        description="; ".join(f"{name}: {task.summary}" for name, task in TASKS.items()) + ".",
        json_schema_extra=lambda schema: schema.update(enum=list(TASKS)),
    )
    seed: NonNegativeInt = Field(0, description="Seed of sample order, held-out samples, new weights and dropout.")
    model: ModelSection
    method: MethodSection = MethodSection()
    data: DataSection
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    preference: PreferenceSection = PreferenceSection()
    stop: StopSection = StopSection()
    guards: GuardsSection = GuardsSection()
    parallel: ParallelSection = ParallelSection()
    launch: LaunchSection = LaunchSection()
    kernels: KernelsSection = KernelsSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()
    submit: SubmitSection = SubmitSection()

    @property
    def digest(self) -> str:
        """Hash of all keys; two runs with the same digest are the same run."""
        return digest_json(self.model_dump_json().encode())


def digest_json(text: bytes) -> str:
    """The digest of a configuration in JSON without white space."""
    return hashlib.sha256(text).hexdigest()[:16]
