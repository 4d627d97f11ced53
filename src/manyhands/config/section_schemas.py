"""Sections of a run file that stand alone: ``method`` (which weights are trained, and how), ``preference`` (a loss),
``checkpoint`` and ``log`` (what is written while a run trains), ``guards`` (against bad numbers; see docs/hangs.md) and
``submit`` (what a cluster is asked for).

Part of the schema (``schema.py``), under its rules: no torch, no file, no side effect; every key has a description.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from manyhands.config.data_schema import (
    Auto,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

PartName = Literal["vision", "projector", "language"]  # of a model of text and images
PartOfRun = Annotated[float, Field(gt=0, lt=1)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\n\r]*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Duration = Annotated[str, Field(pattern=r"^((\d+-)?\d{1,3}:\d\d:\d\d|\d+d(\d+h)?(\d+m)?|\d+h(\d+m)?|\d+m)$")]


class MethodSection(Section):
    """Which weights are trained, and how."""

    name: Literal["full", "lora", "qlora", "patterns"] = Field(
        "lora",
        description="`full` trains all weights, `lora` low-rank adapters on frozen weights, `qlora` the same on 4-bit "
        "(NF4) weights, `patterns` the weights selected by `train` and `freeze`.",
    )
    parts: dict[PartName, Literal["auto", "left_out", "frozen", "trained", "full", "lora", "qlora"]] = Field(
        {},
        description="Parts of a model of text and images, such as {projector: trained, vision: frozen, language: "
        "lora}. `vision` and `projector` are left_out, frozen or trained; `language` is frozen, or what `name` is. "
        "auto: vision and projector are left out where no sample has an image, else vision is frozen, and the "
        "projector trained with full and frozen with lora and qlora.",
    )
    train: tuple[str, ...] = Field(
        (),
        description="patterns: weights to train, by name, glob pattern, slice (`layers[-2:]`: the last two) or `re:` "
        "expression; all if empty.",
    )
    freeze: tuple[str, ...] = Field((), description="patterns: weights to freeze; takes precedence over `train`.")
    rank: PositiveInt = Field(16, description="LoRA: rank r of the matrices A and B.")
    alpha: float = Field(32.0, gt=0, description="LoRA: the update is scaled by alpha / rank.")
    dropout: Fraction = Field(0.0, description="LoRA: dropout probability of the adapter's input.")
    target_modules: Literal["all-linear", "peft-default"] | tuple[str, ...] = Field(
        "all-linear",
        description="LoRA: modules by name, glob or `re:` expression; `all-linear`: all linear layers of the blocks; "
        "`peft-default`: those that PEFT adapts in models of this type if none are named.",
    )
    rslora: bool = Field(False, description="LoRA: scale by alpha / sqrt(rank) instead of alpha / rank.")
    dora: bool = Field(False, description="LoRA: train magnitude and direction of the weights separately (DoRA).")
    init: Literal["zero", "loftq"] = Field(
        "zero",
        description="qlora: initial LoRA matrices: B is zero, or A and B approximate the NF4 quantization error "
        "(loftq; the adapter then needs the same 4-bit weights).",
    )
    double_quant: bool = Field(
        True,
        description="qlora: quantize the scales of the 4-bit weights too (4.13 bits a weight), or keep them in float32 "
        "(4.5 bits; bitsandbytes' own default).",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="LoRA: modules that are fully trained and saved with the adapter, such as lm_head.",
    )
    neftune_alpha: float = Field(
        0.0,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="NEFTune: uniform noise of alpha / sqrt(tokens of the document x hidden size) on the input "
        "embeddings while training; 5 to 15 in the paper, 0: none.",
    )
    adapter: str | None = Field(
        None, description="LoRA: continue from this PEFT adapter, or from a finished run's folder."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_by_language(cls, values: Any) -> Any:
        """``parts.language`` is the method where ``name`` is not given: `full` where other parts alone are trained."""
        parts = values.get("parts") if isinstance(values, dict) else None
        language = parts.get("language") if isinstance(parts, dict) else None
        if language in ("frozen", "full", "lora", "qlora") and "name" not in values:
            return {**values, "name": "full" if language == "frozen" else language}
        return values

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained on frozen weights; otherwise the model's own weights, and a model is saved."""
        return self.name in ("lora", "qlora")


class CheckpointSection(Section):
    """Checkpoints of the run."""

    every_steps: NonNegativeInt | PartOfRun | Auto = Field(
        "auto",
        description="Steps between checkpoints, or below 1 a share of all steps; 0: only at the end. auto: where what "
        "checkpoints cost and what faults undo is least in sum, by hours_between_faults; ten per run where the seconds "
        "of a step are not known, as on a CPU.",
    )
    hours_between_faults: PositiveFloat = Field(
        24.0,
        description="Hours that a machine of the run is assumed to train before a fault ends it; of several machines "
        "one fails so much sooner. Cloud machines that may be taken back fail more often, most clusters less: a wrong "
        "guess by a factor of four costs little.",
    )
    per_epoch: PositiveInt | None = Field(
        None, description="Evenly spaced checkpoints in each epoch, the last at its end; excludes every_steps."
    )
    every_minutes: PositiveFloat | None = Field(
        None, description="Also a checkpoint when so many minutes have passed since the one before."
    )
    asynchronous: bool | Auto = Field(
        "auto",
        description="Copy checkpoints to host memory and write them from another process while training continues. "
        "auto: if the host has enough memory, and not under ZeRO.",
    )
    copy_to: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://[^@\s]*$",
        description="URL of a folder to copy each checkpoint to, under the run's name, once it is complete: s3://, "
        "gs://, az://, file://, or whatever else fsspec opens. A start without a local checkpoint resumes from there.",
    )
    keep_last: PositiveInt | Literal["all"] = Field(
        2, description="Number of newest checkpoints to keep; all: every one."
    )
    keep_best: bool = Field(False, description="Keep and export the checkpoint with the lowest validation loss.")


class LogSection(Section):
    """Metrics written during training."""

    every_steps: PositiveInt = Field(1, description="Steps between entries in metrics.jsonl and TensorBoard.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files to the run's folder.")
    wandb: str | None = Field(
        None, min_length=1, description="Project of Weights & Biases; account and offline mode by its own variables."
    )
    mlflow: str | None = Field(None, min_length=1, description="Experiment of MLflow, on MLFLOW_TRACKING_URI.")
    trackio: str | None = Field(None, min_length=1, description="Project of Trackio.")


class PreferenceSection(Section):
    """The loss of `task: preference`; model/preference.py has the formulas."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "cpo", "simpo", "orpo"] = Field(
        "sigmoid",
        description="Loss of a pair. Compared with the model before training: sigmoid (DPO), robust, hinge, ipo and "
        "sigmoid_norm (DPO by token). Without a reference: cpo, simpo, orpo.",
    )
    beta: PositiveFloat = Field(0.1, description="Scale of the rewards; of orpo, weight of the odds ratio.")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs taken to be labeled the wrong way round."
    )
    margin: NonNegativeFloat = Field(0.5, description="simpo: the margin that rewards are to reach (gamma).")
    sft_weight: Auto | NonNegativeFloat = Field(
        "auto",
        description="Weight of the chosen answers' cross-entropy, added to the loss. auto: 1 for cpo and orpo, else 0.",
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model before training."""
        return self.loss not in ("cpo", "simpo", "orpo")

    @property
    def sft_share(self) -> float:
        """``sft_weight`` as a number."""
        return float(self.loss in ("cpo", "orpo")) if self.sft_weight == "auto" else self.sft_weight


class GuardsSection(Section):
    """What is done about losses and gradients that are not finite, sudden losses, and replicas that differ."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient that is not finite: stop the run, skip the update of that step, or roll back "
        "to the newest checkpoint and leave the last steps out. The batch's samples are written to logs/.",
    )
    spike: Literal["off", "warn", "skip", "rollback"] = Field(
        "warn",
        description="A training loss above the median of the last `spike_window` by `spike_mads` deviations and 0.5 "
        "nats: warn, or as above.",
    )
    spike_mads: PositiveFloat = Field(
        10.0, description="Median absolute deviations, scaled to a standard deviation, above which a loss is a spike."
    )
    spike_window: Annotated[int, Field(ge=16)] = Field(64, description="Losses that a step's loss is compared with.")
    max_in_a_row: PositiveInt = Field(
        5, description="Steps skipped in a row, or rollbacks in all, after which the run fails."
    )
    leave_out: PositiveInt = Field(
        1, description="rollback: steps left out, the last of them the one at which the fault showed."
    )
    replicas_every: NonNegativeInt = Field(
        100,
        description="Steps between comparisons of the trained weights of ranks that hold the same ones; a rank that "
        "differs ends the run. 0: never.",
    )


class SubmitSection(Section):
    """What `manyhands submit` asks of a cluster; no other command reads it."""

    gpus: Text | None = Field(
        None, description="GPUs to ask for, as --gpus takes them: 8xH100, 2x8xH100-80GB (2 machines with 8 each)."
    )
    gpu_type: Text | None = Field(
        None,
        description="What the cluster calls these GPUs: SLURM's GRES type, the node label nvidia.com/gpu.product, "
        "SkyPilot's accelerator; null: derived from the kind (SLURM: also from sinfo).",
    )
    time_limit: PositiveInt | Duration | None = Field(
        None, description="Longest time a job may take: 24:00:00, 2-00:00:00, 36h, 90m, or seconds; null: no limit."
    )
    save_before_s: PositiveInt | Auto = Field(
        "auto",
        description="SLURM: seconds before the time limit at which the run saves, ends and is queued again; auto: 120 "
        "and the time that a checkpoint takes at 0.5 GB/s.",
    )
    cpus_per_gpu: PositiveInt | Auto = Field(
        "auto", description="CPU cores for each process; auto: 8, or fewer where machines of this class have fewer."
    )
    partition: Text | None = Field(None, description="SLURM: partition.")
    account: Text | None = Field(None, description="SLURM: account to charge.")
    options: tuple[Text, ...] = Field(
        (), description="Further options: of sbatch (written as #SBATCH lines), `kubectl create`, `sky jobs launch`."
    )
    namespace: Text | None = Field(None, description="Kubernetes: namespace; null is that of kubectl's context.")
    runtime: Text = Field("torch-distributed", description="Kubernetes: the ClusterTrainingRuntime of the TrainJob.")
    image: Text | None = Field(
        None,
        description="Container image in which manyhands is installed. SLURM: through srun's --container-image (pyxis).",
    )
    volumes: dict[str, Text] = Field(
        {},
        description="Disks that outlive the job, by the path at which they are mounted: a PersistentVolumeClaim, "
        "a SkyPilot volume or bucket (s3://...), a folder of the node (SLURM with an image).",
    )
    python: Text | None = Field(
        None,
        description="Python that has manyhands; null: this one with SLURM (a shared disk), python3 in an image or on a "
        "rented machine, or where setup may choose one.",
    )
    setup: tuple[str, ...] = Field((), description="Shell commands before the run, such as `module load cuda`.")
    environment: dict[Name, str] = Field({}, description="Environment variables of the job; none that are secret.")
    secrets: dict[Name, Text] = Field(
        {},
        description="Secret environment variables and, for Kubernetes, the Secret that has each under this name: "
        "{HF_TOKEN: my-secret}. sbatch and sky take their values from this shell.",
    )
