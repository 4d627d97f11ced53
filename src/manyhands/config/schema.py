"""The schema of a run file. Knows no torch, reads no file, has no validator with a side effect.

Every key has a description with its unit; unknown keys are refused. Checks that involve more than one key are in
``checks.py``. A value ``auto`` is decided by the plan and stays ``auto`` here: the config is what was asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from manyhands.config.tasks import DEFAULT_TASK, TASKS
from manyhands.optim.registry import OPTIMIZERS

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
MOST_PIXELS = 178_956_970  # of an image: what Pillow decodes at most
PixelCount = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NumSamples = Annotated[int, Field(ge=1, strict=True)]  # strict: 1.0 would be a share
Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt", "question", "query", "preference", "rejected_response", "label",
    "text", "tokens", "segments",
]  # fmt: skip
TooLong = Literal["error", "truncate", "split", "drop"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(Section):
    """Where rows come from: a file, a folder of files, or a dataset on the hub."""

    path: str = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet or .txt file (also .gz), a folder, or hub:OWNER/NAME.",
        min_length=1,
    )
    name: str | None = Field(None, description="The source's name in statistics; null is that of the file or dataset.")
    subset: str | None = Field(None, description="hub: configuration (subset) of the dataset.")
    split: str = Field(
        "train",
        description="Split of a hub dataset or saved folder, or rows in the given order, of files too: train[:20%], "
        "train[100:200], train[-50:], train+test. Of a hub dataset, train[:1000] fetches only those rows.",
    )
    revision: str | None = Field(None, description="hub: branch, tag or commit; null is the default branch.")
    files: tuple[str, ...] | None = Field(
        None, description="hub: read these files of the dataset (names or glob patterns), not those of its splits."
    )
    format: Format | None = Field(None, description="Format of the rows; null is data.format.")
    fields: dict[str, str] | None = Field(None, description="Column names by field; null is data.fields.")
    ignore: tuple[str, ...] | None = Field(None, description="Columns to ignore; null is data.ignore.")
    roles: dict[str, Role] = Field(
        {},
        description="Roles by the names that rows have for them where these are not known, such as {visitor: user, "
        "agent: assistant}.",
    )
    drop_system: bool = Field(False, description="Leave out the system prompts of conversations.")
    too_long: TooLong | None = Field(None, description="Samples over max_length; null is data.too_long.")
    weight: float = Field(
        1.0,
        gt=0,
        description="Passes over the source per epoch: 0.5 takes a different half in each epoch, 2 every sample twice.",
    )
    max_samples: PositiveInt | None = Field(None, description="Use at most this many samples, chosen by the seed.")


def default_cache(environ: Mapping[str, str]) -> str:
    """``data.cache``, as the XDG base directory specification has it: a relative path is not one."""
    folder = environ.get("XDG_CACHE_HOME", "")
    return f"{folder if folder.startswith('/') else '~/.cache'}/manyhands/data"


class DataSection(Section):
    """Training and validation data."""

    train: str | tuple[str | Source, ...] = Field(
        description="Training data: a path (see data.train.path), or a list of paths and sources with weights.",
        min_length=1,
    )
    validation: str | tuple[str | Source, ...] | None = Field(
        None, description="Validation data, as in `train`; without it a part of `train` is held out."
    )
    validation_fraction: Fraction | NumSamples = Field(
        0.02,
        description="Fraction of the training data held out if `validation` is not given: at least 20 samples, or a "
        "tenth if that is fewer; 0 holds out none. A whole number is the number of samples.",
    )
    format: Format = Field(
        "auto",
        description="Format of the rows: messages; sharegpt (conversations); alpaca (instruction, input, output); "
        "prompt + completion; question + answer; query + response; preference (chosen, rejected); "
        "label (an answer and whether it is good); rejected_response "
        "(beside messages); text; tokens (input_ids, labels); segments (text and label of each). "
        "auto looks at the first rows.",
    )
    fields: dict[str, str] = Field(
        {},
        description="Columns by field where names differ, such as {prompt: frage, completion: antwort}.",
    )
    ignore: tuple[str, ...] = Field(
        (),
        description="Columns to ignore, such as those that are refused otherwise (rejected, label, images).",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Loss tokens of a conversation: all assistant turns, the last one, or all tokens."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Arguments of the chat template, such as {enable_thinking: false}; a row's own, in its column "
        "chat_template_kwargs, take precedence.",
    )
    date: str = Field(
        "2026-01-01",
        description="The date shown by chat templates that include today's date.",
        pattern=r"^\d{4}-\d{2}-\d{2}$",
    )
    max_samples: PositiveInt | None = Field(None, description="Use at most this many samples, chosen by the seed.")
    max_length: PositiveInt = Field(2048, description="Maximum length of a sample in tokens.")
    too_long: TooLong = Field(
        "error",
        description="Samples over max_length: error, truncate at the end, split texts into several (task cpt or "
        "mixed), or drop (they are counted).",
    )
    min_length: PositiveInt = Field(1, description="Samples with fewer tokens are dropped and counted.")
    deduplicate: bool = Field(
        False,
        description="Of samples with the same token ids keep the first, in training data, in validation data and in "
        "each set of `evaluate.data`.",
    )
    order: Literal["shuffled", "as_given"] = Field(
        "shuffled",
        description="Order of the samples: shuffled by the seed, differently in each epoch, or as given in each, "
        "one source after another.",
    )
    packing: bool | Auto = Field(
        "auto",
        description="Pack samples into one sequence, without attention between them; auto: if the model allows.",
    )
    images: bool | Auto = Field(
        "auto",
        description="Train rows with images: auto if one of the first 100 rows of a source has one and the model takes "
        "them; false refuses rows with images.",
    )
    image_folder: str | None = Field(
        None,
        description="Folder of images that rows name by relative paths, or a .zip file with them, also of the hub "
        "(hub:OWNER/NAME/images.zip), which is unpacked into data.cache; null is the folder of the data file.",
    )
    image_urls: bool | tuple[str, ...] = Field(
        False,
        description="Fetch images that rows name by http(s) addresses: true from public hosts, a list of host names "
        "from these alone, which may be of an inner network.",
    )
    bad_images: Literal["refuse", "skip"] = Field(
        "refuse",
        description="Rows with an image that is missing, damaged or too large: refuse them all, or skip these rows "
        "(they are counted).",
    )
    max_image_pixels: PixelCount = Field(89_478_485, description="An image with more pixels is bad; it is not decoded.")
    shrink_images_above: PixelCount | None = Field(
        None,
        description="Images with more pixels are made smaller, to this many in proportion, before the model's "
        "processor resizes and cuts them; null: none.",
    )
    enlarge_images_below: PixelCount | None = Field(
        None, description="Images with fewer pixels are made larger, likewise; null: none."
    )
    image_cache_gb: NonNegativeFloat = Field(
        4.0, description="Prepared images that are kept in `cache`, in GB on disk, for later epochs and runs; 0: none."
    )
    image_memory_gb: NonNegativeFloat = Field(
        0.25, description="Prepared images that each process keeps in memory, in GB; 0: none."
    )
    cache_features: bool | Auto = Field(
        "auto",
        description="Compute what a frozen vision tower makes of each image once, and keep that in `cache`: auto where "
        "images are trained more than once, it fits into `feature_cache_gb` and reading it is faster; false computes "
        "it in every epoch.",
    )
    feature_cache_gb: NonNegativeFloat = Field(
        50.0,
        description="Features of images that are kept in `cache`, in GB on disk, of all runs together; those that were "
        "not used for the longest time go first.",
    )
    workers: NonNegativeInt | Auto = Field(
        "auto",
        description="Data loader processes per rank; 0 is one thread, auto takes as many as the batches need.",
    )
    cache: str = Field(
        default_cache(os.environ),
        description="Folder of tokenized data, shared between runs; by default in $XDG_CACHE_HOME where that is set.",
    )


class BatchSection(Section):
    """The size of a step. The global batch is the same on any number of GPUs."""

    samples: PositiveInt | Auto = Field(
        "auto", description="Samples in the global batch, over all GPUs and accumulation."
    )
    loss_tokens: PositiveInt | None = Field(
        None,
        description="Instead of samples: loss tokens in the global batch, which ends with the sample that reaches it.",
    )
    packs: PositiveInt | None = Field(
        None,
        description="Instead of samples: packs of data.max_length tokens in the global batch, over all GPUs; a step "
        "trains the samples that they hold.",
    )
    micro_samples: PositiveInt | Auto = Field("auto", description="Without packing: samples per GPU and micro-batch.")
    micro_tokens: PositiveInt | Auto = Field(
        "auto", description="With packing: tokens per GPU and micro-batch, >= data.max_length."
    )
    accumulation: PositiveInt | Auto = Field("auto", description="Without packing: micro-batches per GPU and step.")


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
        description="Steps between checkpoints, or below 1 a share of all steps; 0: only at the end. auto: the "
        "interval at which writing checkpoints and repeating what faults undo cost least together, for "
        "hours_between_faults; ten per run where the seconds of a step are not known, as on a CPU.",
    )
    hours_between_faults: PositiveFloat = Field(
        24.0,
        description="Hours that a machine is assumed to train before a fault ends the run; with N machines the first "
        "fault comes N times sooner. Preemptible cloud machines fail more often, most clusters less often; a guess "
        "that is wrong by a factor of four costs little.",
    )
    per_epoch: PositiveInt | None = Field(
        None, description="Evenly spaced checkpoints in each epoch, the last at its end; excludes every_steps."
    )
    every_minutes: PositiveFloat | None = Field(
        None, description="Also save a checkpoint when this many minutes have passed since the last one."
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
    """The loss of `task: preference` and of `task: kto`; model/preference.py has the formulas."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "cpo", "simpo", "orpo"] = Field(
        "sigmoid",
        description="Loss of a pair. Compared with the model before training: sigmoid (DPO), robust, hinge, ipo and "
        "sigmoid_norm (DPO by token). Without a reference: cpo, simpo, orpo.",
    )
    reference: Auto | Literal["adapters", "stored"] = Field(
        "auto",
        description="Log-probabilities under the model before training: adapters (computed at each step with the "
        "adapters switched off) or stored (computed once before the first step and kept in data.cache). auto: adapters "
        "for one epoch, stored for more and where adapters are not all that is trained.",
    )
    share_prompts: Auto | bool = Field(
        "auto",
        description="Compute the prompt of a pair once for both answers, where all layers of the model have plain full "
        "attention. auto: where that saves an eighth of the tokens or more.",
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

    desirable_weight: NonNegativeFloat = Field(1.0, description="kto: weight of the loss of good answers.")
    undesirable_weight: NonNegativeFloat = Field(1.0, description="kto: weight of the loss of bad answers.")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model before training."""
        return self.loss not in ("cpo", "simpo", "orpo")

    @property
    def sft_share(self) -> float:
        """``sft_weight`` as a number."""
        return float(self.loss in ("cpo", "orpo")) if self.sft_weight == "auto" else self.sft_weight


class MoeSection(Section):
    """Mixtures of experts."""

    balance: NonNegativeFloat = Field(
        0.0,
        description="Coefficient of the routers' balance loss: of each document, 1 where its tokens use all experts "
        "evenly and experts / experts per token where all use the same, as a mean over tokens and layers. 0: none.",
    )


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


def _one_of(table: Collection[str], what: str) -> AfterValidator:
    """A name in ``table``; else ValueError."""

    def check(name: str) -> str:
        if name not in table:
            raise ValueError(f"no {what} is called {name}")
        return name

    return AfterValidator(check)


class OptimizerSection(Section):
    """How weights are updated."""

    name: Annotated[str, _one_of(OPTIMIZERS, "optimizer")] = Field(
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
    context_degree: PositiveInt | Auto = Field(
        "auto",
        description="Ranks that divide the tokens of each pack (context parallelism). auto is 1, the fewest that fit "
        "samples too long for one GPU, or more where a step is estimated to be a tenth faster.",
    )
    expert_degree: PositiveInt | Auto = Field(
        "auto",
        description="Mixtures of experts: neighboring ranks that divide every block's experts, each holding its part "
        "whole; tokens are sent to them. A divisor of the ranks and of the experts. 1: each rank computes all experts. "
        "auto is 1, or more on one machine's GPUs where nothing else fits or a step is estimated to be a tenth faster.",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="Keep in host memory: optimizer states (zero1 to zero3: master weights and gradients too), or all "
        "(weights, gradients and optimizer states).",
    )
    offload_activations: bool | Auto = Field(
        "auto",
        description="Keep saved activations in host memory, copied during compute; auto does on GPUs with activation "
        "checkpointing, and of the fewest blocks that fit where the host lacks memory for all.",
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
    cuda_graphs: bool | Auto = Field(
        "auto",
        description="Launch the kernels of compiled blocks as CUDA graphs, with packs padded to one size; auto does "
        "where launching the kernels of a small model one by one takes longer than running them.",
    )
    timeout_s: PositiveInt = Field(600, description="Seconds without progress of a rank after which the run fails.")

    @property
    def context_ranks(self) -> int:
        """``context_degree``, which the planner sets for auto; 1 where it has not."""
        return 1 if self.context_degree == "auto" else self.context_degree

    @property
    def expert_ranks(self) -> int:
        """The same of ``expert_degree``."""
        return 1 if self.expert_degree == "auto" else self.expert_degree


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


class RunConfig(Section):
    """One fine-tuning run: what was asked for, never what was derived."""

    name: str = Field(
        description="The run's name; its folder is output.dir/name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
    )
    task: Annotated[str, _one_of(TASKS, "task")] = Field(
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
    moe: MoeSection = MoeSection()
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
