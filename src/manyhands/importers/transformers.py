"""Keys of transformers' ``TrainingArguments``, which several tools take over as they are (TRL, LLaMA-Factory).

Defaults are those of transformers 5.17 (training_args.py). Each function gives its keys their outcomes and is called by
an importer once; an importer that reads a key differently leaves out its function.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.config.text import names, nearest_name, show
from manyhands.core.units import count_of
from manyhands.importers.deepspeed import map_deepspeed
from manyhands.importers.fsdp import fsdp_keys, fsdp_options, map_fsdp, map_words, read_words
from manyhands.importers.shared import TRACKER_OPTIONS, map_fp16, map_tracker_options, map_trackers
from manyhands.importers.translation import UNKNOWN_GPUS, Translator, look_up
from manyhands.optim.registry import OPTIMIZERS, names_in

SCHEDULES: Mapping[str, str] = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
# What is so here for some values of a key (None: for all), and why any other one changes nothing.
SO: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    "do_train": (None, "`manyhands train` trains"),
    "do_predict": ((False,), "predictions are no part of training: `manyhands generate` answers prompts"),
    "overwrite_output_dir": (
        (False,), "the same run resumes from its checkpoints, and no folder is overwritten: `--fresh` begins another"
    ),
    "past_index": ((-1,), "no states of a step before are passed on"),
    # distribution
    "local_rank": (None, "the launcher's"),
    "ddp_backend": (("nccl",), "processes use nccl on GPUs, gloo on CPUs"),
    "ddp_broadcast_buffers": ((False,), "no buffer changes in training"),
    "ddp_find_unused_parameters": ((False,), "every trained weight gets a gradient in each step"),
    "ddp_static_graph": (None, ""),
    "xpu_backend": ((), "processes use nccl on GPUs, gloo on CPUs"),
    "mp_parameters": ((), "SageMaker's launcher alone reads it"),
    **dict.fromkeys(("tpu_num_cores", "tpu_metrics_debug"), ((False,), "TPUs alone read it")),
    "ray_scope": (None, "a search for hyperparameters alone reads it"),
    "use_mps_device": ((False,), "transformers itself ignores it"),
    # data
    "dataloader_pin_memory": ((True,), "batches reach a GPU from pinned memory"),
    "dataloader_persistent_workers": ((True,), "workers live as long as the run"),
    "dataloader_prefetch_factor": ((), "batches are prepared ahead"),
    "dataloader_multiprocessing_context": ((), "the run starts its workers in its own way"),
    "dataloader_in_order": ((True,), "batches come in order"),
    **dict.fromkeys(("dataset_num_proc", "preprocessing_num_workers"), ((), "data are prepared on all cores")),
    "dataset_batch_size": ((), "data are prepared in parts of a size of their own"),
    "remove_unused_columns": (None, "columns that no format reads are left out"),
    "length_column_name": (None, "lengths are counted"),
    "label_names": ((["labels"],), "labels are made from the rows"),
    "ignore_data_skip": ((False,), "a run that resumes continues with the samples that come next"),
    # memory and speed
    "auto_find_batch_size": (None, "the plan's micro-batch fits, and is halved where memory runs out"),
    "torch_empty_cache_steps": ((), "memory is planned"),
    "tf32": ((False,), "matmuls are in model.dtype"),
    **dict.fromkeys(
        ("use_liger", "use_liger_kernel"), (None, "fused kernels are used where they pass a self-test")
    ),
    "liger_kernel_config": ((), "fused kernels are used where they pass a self-test"),
    "use_cache": (None, "training keeps no cache of keys and values"),
    "gradient_checkpointing_kwargs": (None, "block by block, without reentering autograd"),
    "gradient_checkpointing_use_reentrant": ((False,), "block by block, without reentering autograd"),
    **dict.fromkeys(
        ("fp16_opt_level", "fp16_backend", "half_precision_backend"), (None, "float16 is not available")
    ),
    # evaluation
    **dict.fromkeys(
        ("fp16_full_eval", "bf16_full_eval", "jit_mode_eval", "use_ipex"),
        ((False,), "evaluation computes as training does"),
    ),
    **dict.fromkeys(
        (
            "batch_eval_metrics", "eval_accumulation_steps", "prediction_loss_only", "eval_do_concat_batches",
            "eval_use_gather_object", "use_legacy_prediction_loop", "include_inputs_for_metrics",
        ),
        (None, "evaluation sums losses and keeps no predictions"),
    ),
    "include_for_metrics": (([],), "evaluation sums losses and keeps no predictions"),
    "eval_delay": ((0,), "evaluations begin with the run"),
    "per_gpu_eval_batch_size": (None, "evaluation uses the micro-batches of training"),
    "do_eval": (None, "`eval_strategy` decides"),
    # checkpoints
    "save_only_model": ((False,), "checkpoints always hold what a run resumes from"),
    "save_safetensors": ((True,), "weights are always saved as safetensors"),
    "save_on_each_node": ((False,), "all nodes write into one folder"),
    "restore_callback_states_from_checkpoint": (None, "a run that resumes has all of its state"),
    "enable_jit_checkpoint": ((True,), "a signal saves a checkpoint"),
    # what is shown
    **dict.fromkeys(
        (
            "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "skip_memory_metrics",
            "include_num_input_tokens_seen", "include_tokens_per_second",
        ),
        ((), "what a run shows is its own"),
    ),
    "logging_first_step": ((), "`log.every_steps` decides"),
    "logging_strategy": (("steps",), "`log.every_steps` decides"),
    "logging_nan_inf_filter": ((False,), "a loss that is not finite is a matter of `guards.nonfinite`"),
    "logging_dir": ((), "TensorBoard's files are in the run's folder"),
    "debug": (([],), "`guards.nonfinite` watches losses and gradients"),
    "run_name": ((), "the run is named after `output_dir`"),
    "plot_loss": (None, "the run's report has the curves"),
}  # fmt: skip

# What ``report_to`` may name.
INTEGRATIONS = names(
    """
    none all azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard
    trackio wandb
    """
)
A_DAY_S = 86_400
UPLOADS = names(
    """
    push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision hub_always_push push_to_hub_model_id
    push_to_hub_organization
    """
)
SECRETS = names("hub_token push_to_hub_token")
A_SECRET = "a secret in a run file is copied with it: remove it, and use `hf auth login`"

KEYS = frozenset(SO) | TRACKER_OPTIONS.keys() | UPLOADS | SECRETS | fsdp_keys("fsdp_config") | names(
    """
    output_dir seed data_seed per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size
    gradient_accumulation_steps
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args adafactor
    optim_target_modules lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps num_train_epochs max_steps
    logging_steps save_steps save_strategy save_total_limit eval_steps report_to project wandb_project
    eval_strategy evaluation_strategy evaluate_during_training load_best_model_at_end metric_for_best_model
    greater_is_better bf16 average_tokens_across_devices accelerator_config split_batches dispatch_batches
    full_determinism fp16 gradient_checkpointing torch_compile torchdynamo eval_on_start use_cpu no_cuda
    torch_compile_backend torch_compile_mode deepspeed fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap
    fsdp_min_num_params sharded_ddp resume_from_checkpoint neftune_noise_alpha group_by_length ddp_bucket_cap_mb
    train_sampling_strategy label_smoothing_factor dataloader_num_workers dataloader_drop_last parallelism_config
    ddp_timeout
    """
)  # fmt: skip
OPEN = frozenset({"lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "accelerator_config",
                  "liger_kernel_config", "optim_args", "deepspeed", "parallelism_config"})  # fmt: skip


ADAM: Mapping[str, str] = {
    "learning_rate": "learning_rate", "weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2",
    "adam_epsilon": "eps", "max_grad_norm": "max_grad_norm",
}  # fmt: skip


def note_so(t: Translator, so: Mapping[str, tuple[tuple[Any, ...] | None, str]]) -> None:
    """Keys that change nothing of a run: already so for their values in ``so``, else ignored, with the reason."""
    for key, (values, why) in so.items():
        if not t.has(key):
            continue
        value = t.get(key)
        value = {"true": True, "false": False}.get(str(value).lower(), value)
        if values is None or value in values:
            t.no_op(key, why if values is None else "")
        else:
            t.ignore(key, why)


def map_bystanders(t: Translator) -> None:
    """What does not change training: true by construction, trackers, uploads; and how data are loaded."""
    note_so(t, SO)
    map_report_to(t)
    map_uploads(t, "push_to_hub", UPLOADS)
    for key in SECRETS & t.values.keys():
        t.only(key, (None,), A_SECRET)
    t.only(
        "average_tokens_across_devices", (True, None), "a mean of means depends on the number of GPUs: set it to true"
    )
    split = isinstance(options := t.get("accelerator_config"), Mapping) and options.get("split_batches")
    t.only("accelerator_config", () if split else (options,), "`split_batches` is not available: remove it")
    t.only("split_batches", (False,), "a batch counts one GPU: remove it, and write what one GPU gets")
    t.only("dispatch_batches", (False, True), "write true or false")
    t.map("full_determinism", "kernels.deterministic", t.flag("full_determinism"))
    if t.integer("data_seed") not in (None, t.integer("seed", 42)):
        t.substitute("data_seed", {}, "order, weights and dropout have one seed: samples are drawn by `seed`")
    t.no_op("data_seed")
    if t.flag("dataloader_drop_last"):
        t.substitute("dataloader_drop_last", {}, "every sample is trained, also those of an epoch's last, smaller step")
    t.no_op("dataloader_drop_last")
    t.only("resume_from_checkpoint", (False, True, None, "auto", "latest"), "a run resumes from its own newest "
           "checkpoint; to begin from trained weights name their folder as the model")  # fmt: skip
    for key, native in (("dataloader_num_workers", "data.workers"), ("ddp_bucket_cap_mb", "parallel.ddp_bucket_mb")):
        t.map(key, native, t.integer(key))
    map_timeout(t)
    for key in ("use_cpu", "no_cuda"):
        t.switch(key, "parallel.device", "cpu")
    t.map("eval_on_start", "evaluate.at_start", t.flag("eval_on_start"))


def map_timeout(t: Translator) -> None:
    """``ddp_timeout``: seconds that a rank waits for the others in a collective."""
    if seconds := t.integer("ddp_timeout"):
        t.map("ddp_timeout", "parallel.timeout_s", min(seconds, A_DAY_S), "a day at most" * (seconds > A_DAY_S))
    t.no_op("ddp_timeout")


def map_report_to(t: Translator) -> None:
    """``report_to``: trackers by name, with their projects; and the keys that only a tracker reads."""
    key, value = "report_to", t.get("report_to")
    asked = [str(one) for one in (value if isinstance(value, (list, tuple)) else [] if value is None else [value])]
    unknown = next((one for one in asked if one not in INTEGRATIONS), None)
    if unknown is not None:
        near = nearest_name(unknown, sorted(INTEGRATIONS))
        instead = f"did you mean {near}?" if near else f"write one of {', '.join(sorted(INTEGRATIONS))}"
        t.refuse(key, f"{show(unknown)} is not a tracker that transformers knows: {instead}")
    else:
        map_trackers(
            t, {key: [one for one in asked if one != "none"]}, {"wandb": "wandb_project", "trackio": "project"}
        )
    map_tracker_options(t, asked)


def map_uploads(t: Translator, switch: str, keys: Iterable[str]) -> None:
    """Uploads to the hub. ``switch``: the key that asks for one; ``keys``: those that say how."""
    uploads = t.flag(switch)
    if uploads:
        t.substitute(switch, {}, "nothing is uploaded by itself: `manyhands push RUN` does it once the run has ended")
    t.no_op(switch)
    for key in keys:
        if uploads and key != switch and t.get(key) not in (None, False):
            t.ignore(key, "`manyhands push` has options of its own")
        t.no_op(key, f"only {switch} reads it" if t.has(key) and key != switch else "")


def choose_optimizer(t: Translator, key: str, known: Mapping[str, tuple[str, str]], default: str = "") -> None:
    """``optimizer.name`` from a tool's name of it. ``known``: our name, and a note where it differs."""
    asked = t.get(key, default)
    ours, note = known.get(str(asked), ("", ""))
    if not ours:
        t.refuse(key, f"{show(asked)} is not available: write one of {', '.join(known)}")
    elif note:
        t.substitute(key, {"optimizer.name": ours}, note)
    else:
        t.map(key, "optimizer.name", ours)


def keep_offloaded_states_in_32_bits(t: Translator, run: Mapping[str, Any]) -> None:
    """Replace 8-bit AdamW of the file, or of the ``run`` that it distributes, where states are in host memory."""
    own = look_up(t.mapping, "optimizer.name")
    asked = OPTIMIZERS.get(own or look_up(run, "optimizer.name"))
    offload = look_up(run, "parallel.offload") or look_up(t.mapping, "parallel.offload")
    if asked is None or asked.arguments.get("bits") != 8 or offload in (None, "none"):
        return
    why = f"optimizer states in host memory have 32 bits (parallel.offload: {offload})"
    if own:
        t.replace("optimizer.name", {"optimizer.name": "adamw"}, why)
    else:
        t.replace("parallel.offload", {"parallel.offload": offload, "optimizer.name": "adamw"}, why)
        t.replaces.add("optimizer.name")


def map_revision(t: Translator) -> None:
    """``model_revision``, whose default is the main branch, and ``trust_remote_code``."""
    if t.get("model_revision") == "main":
        t.no_op("model_revision")
    else:
        t.map("model_revision", "model.revision")
    t.switch("trust_remote_code", "model.trust_remote_code")


def map_adam(t: Translator) -> None:
    for key, native in ADAM.items():
        t.map(key, f"optimizer.{native}", t.number(key))


def map_optimizer(t: Translator) -> None:
    """Learning rate, AdamW's constants, decay, clipping, which optimizer."""
    map_adam(t)
    if t.is_null("max_grad_norm"):
        t.set_tool_default("optimizer.max_grad_norm", 0, "`max_grad_norm: null`: transformers does not clip")
    if t.flag("adafactor"):
        t.map("adafactor", "optimizer.name", "adafactor")
        t.no_op("optim", "`adafactor` takes precedence")
    elif t.has("optim"):
        choose_optimizer(t, "optim", names_in("transformers"))
    t.no_op("adafactor")
    if t.number("weight_decay"):
        t.set_tool_default("optimizer.decay_embeddings", True, "transformers decays embeddings too")
    for key in ("optim_args", "optim_target_modules"):
        t.only(key, (None,), "optimizers with arguments of their own (GaLore, APOLLO, ...) are not available")
    map_neftune(t, "neftune_noise_alpha")
    t.only("label_smoothing_factor", (0, 0.0, None), "label smoothing is not available: set it to 0")


def map_neftune(t: Translator, key: str) -> None:
    """NEFTune's alpha; null and 0 are none."""
    if alpha := t.number(key):
        t.map(key, "method.neftune_alpha", alpha, "by each document's own length; there by the padded row's")
    t.no_op(key, "no noise on the embeddings")


def map_schedule(t: Translator, *, default: str, warmup: tuple[str, float] = ("warmup_steps", 0)) -> None:
    """The learning rate's shape and warm-up. ``default``, ``warmup``: the tool's own where the file has none."""
    kind = str(t.get("lr_scheduler_type", default))
    if kind not in SCHEDULES:
        t.refuse("lr_scheduler_type", f"{show(kind)} is not available: write one of {', '.join(SCHEDULES)}")
    elif t.has("lr_scheduler_type"):
        t.map("lr_scheduler_type", "schedule.name", SCHEDULES[kind])
    else:
        t.set_tool_default("schedule.name", SCHEDULES[kind], f"{t.tool}'s default")
    if kind == "constant":  # transformers' get_scheduler passes none on
        for key in ("warmup_steps", "warmup_ratio"):
            if t.number(key):
                t.ignore(key, "transformers' `constant` has no warm-up: constant_with_warmup has")
            t.no_op(key)
        t.set_tool_default("schedule.warmup_steps", 0, "transformers' `constant` has no warm-up")
    else:
        _map_warmup(t, warmup)
    map_schedule_options(t, kind)


def _map_warmup(t: Translator, default: tuple[str, float]) -> None:
    steps, ratio = t.number("warmup_steps"), t.number("warmup_ratio")
    for key, number in (("warmup_steps", steps), ("warmup_ratio", ratio)):
        if number is not None and number < 0:
            t.refuse(key, f"got {show(number)}, allowed: 0 or more")
    if steps and steps >= 1:
        t.map("warmup_steps", "schedule.warmup_steps", int(steps))
        if ratio:  # transformers takes the steps
            t.ignore("warmup_ratio", "`warmup_steps` takes precedence")
    elif steps:  # transformers 5: below 1 it is a ratio
        t.map("warmup_steps", "schedule.warmup_ratio", steps)
        t.ignore("warmup_ratio", "`warmup_steps` takes precedence")
    elif ratio:
        t.map("warmup_ratio", "schedule.warmup_ratio", ratio)
    else:
        given = t.has("warmup_steps") or t.has("warmup_ratio")
        name, value = ("warmup_steps", 0) if given else default
        t.set_tool_default(f"schedule.{name}", value, f"{t.tool}'s default")
    for key in ("warmup_steps", "warmup_ratio"):
        if t.number(key) == 0:
            t.no_op(key)


def map_schedule_options(t: Translator, kind: str, kind_key: str = "lr_scheduler_type") -> None:
    """``lr_scheduler_kwargs`` of the schedule ``kind``, which the key ``kind_key`` names."""
    key = "lr_scheduler_kwargs"
    options = t.get(key) or {}
    missing = {"cosine_with_min_lr": "min_lr_rate", "warmup_stable_decay": "num_decay_steps"}.get(kind)
    if not isinstance(options, Mapping):
        t.refuse(key, f"got {show(options)}, allowed: a mapping")
    elif missing and not options:
        t.refuse(kind_key, f"transformers' {kind} needs options: write lr_scheduler_kwargs: {{{missing}: ...}}")
    elif not options:
        t.no_op(key)
    elif kind == "constant" or kind == "constant_with_warmup":
        t.ignore(key, f"{kind} reads none")
    elif kind == "cosine" and set(options) == {"num_cycles"} and options["num_cycles"] == 0.5:
        t.no_op(key, "half a wave")
    elif kind == "cosine_with_min_lr" and set(options) == {"min_lr_rate"}:
        t.map(key, "schedule.min_ratio", options["min_lr_rate"])
    elif kind == "cosine_with_min_lr" and set(options) == {"min_lr"} and t.number("learning_rate"):
        t.map(key, "schedule.min_ratio", options["min_lr"] / float(t.number("learning_rate") or 1))
    elif kind == "warmup_stable_decay" and (native := _read_decay(t, options)):
        t.map(key, native)
    else:
        t.refuse(key, f"{show(options)} cannot be expressed: `min_lr_rate` of cosine_with_min_lr can, and "
                 "`num_decay_steps` of warmup_stable_decay beside max_steps with decay_type: linear")  # fmt: skip


def _read_decay(t: Translator, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ours for the options of transformers' ``get_wsd_schedule``; none where they mean another shape."""
    steps, total = options.get("num_decay_steps"), t.integer("max_steps") or 0
    is_same = options.get("decay_type", "cosine") == "linear" and options.get("warmup_type", "linear") == "linear"
    known = {"num_decay_steps", "decay_type", "warmup_type", "min_lr_ratio"}
    if not is_same or set(options) - known or not isinstance(steps, int) or not 0 < steps <= total:
        return {}
    return {"schedule.decay_ratio": steps / total, "schedule.min_ratio": options.get("min_lr_ratio", 0)}


def map_length(t: Translator, *, epochs: float) -> None:
    """Epochs and steps, seed. ``epochs``: the tool's default."""
    steps = t.integer("max_steps")
    if steps is not None and steps > 0:
        t.map("max_steps", "stop.max_steps", steps)
        t.no_op("num_train_epochs", "`max_steps` takes precedence")
        t.set_tool_default("stop.epochs", 1_000_000, "`max_steps` alone ends the run")
    else:
        t.no_op("max_steps", "no limit")
        number = t.number("num_train_epochs", epochs)
        if number is not None and number <= 0:
            t.refuse("num_train_epochs", f"got {show(number)}, allowed: a number above 0")
        t.map_or_default("num_train_epochs", "stop.epochs", number)
    t.map_or_default("seed", "seed", t.integer("seed", 42))


def map_batch(t: Translator, *, per_device: int, accumulation: int = 1, packs: bool = False) -> None:
    """Per-device batch x GPUs x accumulation: samples, or packs of max_length. Defaults are the tool's."""
    micro = t.count("per_device_train_batch_size", per_device)
    steps = t.count("gradient_accumulation_steps", accumulation)
    gpus = t.num_gpus()
    t.micro, t.accumulation = micro, steps
    key = "per_device_train_batch_size"
    if gpus is None:
        t.refuse(key if t.has(key) else "gradient_accumulation_steps", UNKNOWN_GPUS)
        return
    native = "batch.packs" if packs else "batch.samples"
    total, sum_ = micro * gpus * steps, f"{micro} per GPU × {count_of(gpus, 'GPU')} × {steps} accumulation"
    found = [name for name in (key, "gradient_accumulation_steps") if t.has(name)]
    for name in found:
        t.map(name, native, total, sum_)
    if not found:
        t.set_tool_default(native, total, f"{t.tool}'s default: {sum_}")
    t.no_op("per_device_eval_batch_size", "evaluation uses the micro-batches of training")
    t.only("per_gpu_train_batch_size", (None,), "write per_device_train_batch_size")


def map_held_out(t: Translator, key: str, *, least_rows: int) -> bool:
    """Holds out what ``train_test_split`` of datasets does: a share below 1 or a number. Whether it is any."""
    size = t.number(key)
    if not size or size < 0:
        return False
    if size < 1:
        t.map(key, "data.validation_fraction", size, "other rows, chosen by the seed")
    elif size >= least_rows:
        t.map(key, "data.validation_fraction", int(size), "a number of rows, at most half of all; chosen by the seed")
    else:
        t.refuse(key, f"{show(size)} is all rows to {t.tool}: write a share below 1, or a number of rows from "
                 f"{least_rows} on")  # fmt: skip
    return True


def map_precision(t: Translator) -> None:
    """bf16, fp16, recomputation, compilation."""
    if t.flag("fp16") and t.flag("bf16"):
        t.contradict("fp16", f"and {t.place('bf16')} are both true: keep one")
    else:
        map_fp16(t, "fp16")
    if t.flag("bf16"):
        t.map("bf16", "model.dtype", "bfloat16")
    else:
        t.no_op("bf16", "model.dtype stays auto")
    if t.flag("gradient_checkpointing"):
        t.no_op("gradient_checkpointing", "the plan recomputes as many blocks as memory requires")
    else:
        t.map("gradient_checkpointing", "parallel.activation_checkpointing", "none")
    backend = t.get("torch_compile_backend") or t.get("torchdynamo")
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo"):
        if t.has(key):  # a backend or a mode alone compiles too
            t.map(key, "parallel.compile", t.flag("torch_compile") or key != "torch_compile" or backend is not None)
    if backend not in (None, "inductor"):
        key = "torch_compile_backend" if t.has("torch_compile_backend") else "torchdynamo"
        t.substitute(key, {}, "torch.compile's backend is inductor")


def map_intervals(
    t: Translator,
    *,
    save_steps: int,
    logging_steps: int,
    save_strategy: str = "steps",
    limit: int | None = None,
) -> None:
    """Logging, evaluation and saving by steps or epochs. ``limit``: checkpoints kept; all are the tool's defaults."""
    logging = t.number("logging_steps")
    if logging is not None and (logging <= 0 or (logging > 1 and logging != int(logging))):
        t.refuse("logging_steps", f"got {show(logging)}, allowed: a number of steps above 0, or a share below 1")
    elif logging is not None:
        share = "a share of the run there: every step is logged" if logging < 1 else ""
        t.map("logging_steps", "log.every_steps", max(1, int(logging)), share)
    _map_interval(t, "save_strategy", "save_steps", "checkpoint", save_strategy, save_steps)
    old, key = "evaluation_strategy", "eval_strategy"
    if t.has(old) and t.has(key) and t.get(old) != t.get(key):
        t.contradict(old, f"{show(t.get(old))}, and {t.place(key)} is {show(t.get(key))}: keep one")
    follows = "`eval_steps` is not written: evaluations follow `logging_steps`"
    evaluate = old if t.has(old) and not t.has(key) else key
    _map_interval(t, evaluate, "eval_steps", "evaluate", "no", logging or logging_steps, follows)
    t.no_op(old)
    t.only("evaluate_during_training", (False,), "write eval_strategy: steps")
    map_limit(t, limit)
    _map_best(t)


def map_limit(t: Translator, default: int | None = None) -> None:
    """``save_total_limit``: without one, or with 0 or less, transformers keeps all. ``default``: the tool's own."""
    limit = t.integer("save_total_limit")
    if t.mapping.get("checkpoint", {}).get("every_steps") == 0:
        t.no_op("save_total_limit", "there is one checkpoint, at the end")
    elif limit is None and default is not None and not t.is_null("save_total_limit"):
        t.set_tool_default("checkpoint.keep_last", default, f"{t.tool}'s default")
    elif limit is None:
        t.set_tool_default("checkpoint.keep_last", "all", f"without `save_total_limit` {t.tool} keeps every checkpoint")
    else:
        t.map("save_total_limit", "checkpoint.keep_last", limit if limit > 0 else "all")


def _map_best(t: Translator) -> None:
    """Which checkpoint is the best: that of the lowest validation loss."""
    wants = t.flag("load_best_model_at_end")
    if t.has("load_best_model_at_end"):
        t.map("load_best_model_at_end", "checkpoint.keep_best", wants)
    metric = t.get("metric_for_best_model")
    is_loss = metric in ("loss", "eval_loss", "val.loss", "val_loss", None)
    if not wants and not is_loss:
        for key in ("metric_for_best_model", "greater_is_better"):
            if t.has(key):
                t.ignore(key, "only `load_best_model_at_end` reads it")
    elif not is_loss:
        why = f"{show(metric)} is not measured: the best checkpoint is that of the lowest validation loss"
        t.substitute("metric_for_best_model", {"checkpoint.keep_best": True}, why)
        t.no_op("greater_is_better", f"of {show(metric)}")
    t.no_op("metric_for_best_model")
    t.only("greater_is_better", (False, None) if wants and is_loss else (True, False, None), "a lower loss is better: "
           "set it to false")  # fmt: skip


def _map_interval(
    t: Translator, strategy_key: str, steps_key: str, section: str, default: str, steps: float, why: str = ""
) -> None:
    """no, steps or epoch. ``steps``: the default interval, and ``why``. `no` still evaluates and saves at the end."""
    strategy = str(t.get(strategy_key, default)).lower()
    every, per_epoch = f"{section}.every_steps", f"{section}.per_epoch"
    if strategy in ("no", "false"):
        t.map(strategy_key, every, 0)
        t.no_op(steps_key, f"`{strategy_key}` is no")
        if not t.has(strategy_key):
            t.set_tool_default(every, 0, f"{t.tool}'s default")
    elif strategy == "epoch":
        t.map(strategy_key, per_epoch, 1)
        t.set_tool_default(per_epoch, 1, f"{t.tool}'s default")
        t.no_op(steps_key, f"`{strategy_key}` is epoch")
    elif strategy == "steps":
        number = t.number(steps_key)
        t.no_op(strategy_key)
        if number is not None and number <= 0 and section == "checkpoint":
            t.map(steps_key, every, 0, "no checkpoint before the end")
        elif number is not None and (number < 0 or (number > 1 and number != int(number))):
            t.refuse(steps_key, f"got {show(number)}, allowed: a number of steps above 0, or a share below 1")
        elif number:
            t.map(steps_key, every, int(number) if number >= 1 else number)
        else:
            t.map(steps_key, every, steps if steps < 1 else int(steps), why)
            t.set_tool_default(every, steps if steps < 1 else int(steps), why or f"{t.tool}'s default")
    elif strategy == "best" and section == "checkpoint":
        t.refuse(strategy_key, "checkpoints come at intervals: write steps, and load_best_model_at_end: true")
    else:
        t.refuse(strategy_key, f"{show(strategy)}: write no, steps or epoch")


def map_sharding(t: Translator) -> None:
    """``fsdp`` (true, or a list or text of options) with ``fsdp_config``; DeepSpeed."""
    words = read_words(t.get("fsdp"))
    options = fsdp_options(t, "fsdp_config")
    if words:
        map_words(t, "fsdp", words, "hsdp" if "hybrid_shard" in words else "fsdp")
        map_fsdp(t, options, version=2)
    else:
        t.no_op("fsdp")
        for key in options.values():
            t.ignore(key, f"{t.tool} reads it with `fsdp` only")
    t.only("fsdp_config", (None, {}), "write its options here, not the path of another file")
    t.no_op(("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"), "every block is a unit")
    order = t.get("train_sampling_strategy", "random")
    for key in ("group_by_length", "train_sampling_strategy"):
        if order == "group_by_length" if key != "group_by_length" else t.flag(key):
            t.substitute(key, {}, "samples of one length are not put together: the order is drawn from all of them")
    if order == "sequential":
        t.map("train_sampling_strategy", "data.order", "as_given")
    elif order not in ("random", "group_by_length"):
        t.refuse("train_sampling_strategy", f"{show(order)}: write random or sequential")
    t.no_op(("group_by_length", "train_sampling_strategy"))
    t.only("parallelism_config", (None,), "not available: remove it")
    t.only("sharded_ddp", (None, False), "write fsdp: full_shard")
    map_deepspeed(t, "deepspeed")
