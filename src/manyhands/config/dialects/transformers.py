"""Keys of transformers' ``TrainingArguments``, which several tools take over as they are (TRL, LLaMA-Factory).

Defaults are those of transformers 5.17 (training_args.py). Each function gives its keys their fates and is called by a
dialect once; a dialect that reads a key differently leaves out its function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.config.dialects.deepspeed import map_deepspeed
from manyhands.config.dialects.fsdp import fsdp_keys, fsdp_options, map_fsdp
from manyhands.config.dialects.translation import UNKNOWN_GPUS, Translator, names
from manyhands.config.keys import nearest_name, show
from manyhands.core.units import count_of

OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    # their name: ours, and what is said where it is not the same
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), ("adamw", "")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), ("adamw_8bit", "")),
    "paged_adamw_32bit": ("paged_adamw", ""),
    "paged_adamw": ("paged_adamw", ""),
    "paged_adamw_8bit": ("paged_adamw_8bit", ""),
    "adamw_torch_8bit": ("adamw_8bit", "8-bit states are bitsandbytes' here, torchao's there"),
    "adamw_torch_4bit": ("adamw_8bit", "there are no 4-bit optimizer states: 8-bit ones"),
    "adafactor": ("adafactor", ""),
    "muon": ("muon", ""),
}  # fmt: skip

NEVER_ACTS = names(
    """
    do_train do_predict overwrite_output_dir local_rank ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_find_unused_parameters dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    remove_unused_columns disable_tqdm log_level log_level_replica logging_dir logging_first_step
    logging_nan_inf_filter log_on_each_node save_safetensors save_on_each_node past_index tf32 skip_memory_metrics
    auto_find_batch_size torch_empty_cache_steps eval_on_start fp16_full_eval bf16_full_eval use_cpu no_cuda
    use_mps_device batch_eval_metrics eval_accumulation_steps prediction_loss_only eval_delay label_names
    use_liger_kernel liger_kernel_config include_num_input_tokens_seen
    include_tokens_per_second dataset_num_proc ddp_timeout
    """
)
"""True here by construction, or without effect on what is trained."""

TRACKERS = frozenset({"report_to", "run_name", "project", "trackio_space_id", "plot_loss"})
# What ``report_to`` may name.
INTEGRATIONS = names(
    """
    none all azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard
    trackio wandb
    """
)
UPLOADS = names(
    """
    push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_revision
    """
)

KEYS = NEVER_ACTS | TRACKERS | UPLOADS | fsdp_keys("fsdp_config") | names(
    """
    output_dir seed data_seed per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args
    optim_target_modules lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps num_train_epochs max_steps
    logging_steps logging_strategy save_steps save_strategy save_total_limit save_only_model eval_steps
    eval_strategy evaluation_strategy do_eval load_best_model_at_end metric_for_best_model greater_is_better bf16
    average_tokens_across_devices accelerator_config full_determinism
    fp16 fp16_opt_level fp16_backend gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode deepspeed fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap
    fsdp_min_num_params resume_from_checkpoint ignore_data_skip neftune_noise_alpha group_by_length
    length_column_name train_sampling_strategy label_smoothing_factor dataloader_num_workers dataloader_drop_last
    restore_callback_states_from_checkpoint jit_mode_eval use_ipex parallelism_config
    """
)  # fmt: skip
OPEN = frozenset({"lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "accelerator_config",
                  "liger_kernel_config", "optim_args", "deepspeed", "parallelism_config"})  # fmt: skip


def map_bystanders(t: Translator) -> None:
    """What does not change training: true by construction, trackers, uploads."""
    for key in NEVER_ACTS & t.values.keys():
        t.already(key)
    for key in TRACKERS & t.values.keys():
        if key == "plot_loss":
            t.already(key, "the run's report has the curves")
        elif key == "report_to" and not set(asked := _as_list(t.get(key))) <= INTEGRATIONS:
            unknown = next(one for one in asked if one not in INTEGRATIONS)
            near = nearest_name(unknown, sorted(INTEGRATIONS))
            instead = f"did you mean {near}?" if near else f"write one of {', '.join(sorted(INTEGRATIONS))}"
            t.refuse(key, f"{show(unknown)} is not a tracker that transformers knows: {instead}")
        elif t.get(key) in (None, "none", "tensorboard", ["tensorboard"], ["none"], []):
            t.already(key)
        else:
            t.ignore(key, "trackers are opened by log.wandb, log.mlflow and log.trackio alone")
    for key in UPLOADS & t.values.keys():
        if t.get(key) in (None, False):
            t.already(key)
        else:
            t.ignore(key, "nothing is uploaded: `hf upload` takes the run's folder")
    t.only(
        "average_tokens_across_devices", (True, None), "a mean of means depends on the number of GPUs: set it to true"
    )
    split = isinstance(options := t.get("accelerator_config"), Mapping) and options.get("split_batches")
    t.only("accelerator_config", () if split else (options,), "`split_batches` is not available: remove it")
    if t.has("full_determinism"):
        t.map("full_determinism", "kernels.deterministic", t.flag("full_determinism"))
    t.only("dataloader_drop_last", (False, None), "every sample is trained: set it to false")
    t.only("resume_from_checkpoint", (False, True, None, "auto", "latest"), "a run resumes from its own newest "
           "checkpoint; to begin from trained weights name their folder as the model")  # fmt: skip


def _as_list(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, (list, tuple)) else [] if value is None else [value])]


def choose_optimizer(t: Translator, key: str, known: Mapping[str, tuple[str, str]], default: str = "") -> None:
    """``optimizer.name`` from a tool's name of it. ``known``: our name, and what is said where it is not the same."""
    asked = t.get(key, default)
    ours, note = known.get(str(asked), ("", ""))
    if not ours:
        t.refuse(key, f"{show(asked)} is not available: write one of {', '.join(known)}")
    elif note:
        t.substitute(key, {"optimizer.name": ours}, note)
    else:
        t.map(key, "optimizer.name", ours)


def map_revision(t: Translator) -> None:
    """``model_revision``, whose default is the main branch, and ``trust_remote_code``."""
    if t.get("model_revision") == "main":
        t.already("model_revision")
    else:
        t.map("model_revision", "model.revision")
    if t.flag("trust_remote_code"):
        t.map("trust_remote_code", "model.trust_remote_code", True)
    else:
        t.already("trust_remote_code")


def map_optimizer(t: Translator) -> None:
    """Learning rate, AdamW's constants, decay, clipping, which optimizer."""
    for key, native in (
        ("learning_rate", "learning_rate"),
        ("weight_decay", "weight_decay"),
        ("adam_beta1", "beta1"),
        ("adam_beta2", "beta2"),
        ("adam_epsilon", "eps"),
        ("max_grad_norm", "max_grad_norm"),
    ):
        number = t.number(key)
        if number is not None:
            t.map(key, f"optimizer.{native}", number)
    if t.has("optim"):
        choose_optimizer(t, "optim", OPTIMIZERS)
    if t.number("weight_decay"):
        t.carry("optimizer.decay_embeddings", True, "transformers decays embeddings too")
    for key in ("optim_args", "optim_target_modules"):
        t.only(key, (None,), "optimizers with arguments of their own (GaLore, APOLLO, ...) are not available")
    t.only("neftune_noise_alpha", (None, 0), "NEFTune is not available: remove it")
    t.only("label_smoothing_factor", (0, 0.0, None), "label smoothing is not available: set it to 0")


def map_schedule(t: Translator, *, default: str, warmup: tuple[str, float] = ("warmup_steps", 0)) -> None:
    """The learning rate's shape and warm-up. ``default``, ``warmup``: the tool's own where the file has none."""
    kind, options = str(t.get("lr_scheduler_type", default)), t.get("lr_scheduler_kwargs") or {}
    names = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
             "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}  # fmt: skip
    if kind not in names:
        t.refuse("lr_scheduler_type", f"{show(kind)} is not available: write one of {', '.join(names)}")
    elif t.has("lr_scheduler_type"):
        t.map("lr_scheduler_type", "schedule.name", names[kind])
    else:
        t.carry("schedule.name", names[kind], f"{t.tool}'s default")
    steps, ratio = t.number("warmup_steps"), t.number("warmup_ratio")
    if kind == "constant" and not steps and not ratio:
        t.carry("schedule.warmup_steps", 0, "a constant rate has no warm-up")
    elif steps and steps >= 1:
        t.map("warmup_steps", "schedule.warmup_steps", int(steps))
        if ratio:  # transformers takes the steps
            t.ignore("warmup_ratio", "`warmup_steps` takes precedence")
    elif steps:  # transformers 5: below 1 it is a ratio
        t.map("warmup_steps", "schedule.warmup_ratio", steps)
    elif ratio:
        t.map("warmup_ratio", "schedule.warmup_ratio", ratio)
    else:
        given = t.has("warmup_steps") or t.has("warmup_ratio")
        name, value = ("warmup_steps", 0) if given else warmup
        t.carry(f"schedule.{name}", value, f"{t.tool}'s default")
    for key in ("warmup_steps", "warmup_ratio"):
        if t.number(key) == 0:
            t.already(key)
    _map_schedule_options(t, kind, options)


def _map_schedule_options(t: Translator, kind: str, options: Any) -> None:
    if not options:
        t.already("lr_scheduler_kwargs")
    elif kind == "cosine_with_min_lr" and set(options) == {"min_lr_rate"}:
        t.map("lr_scheduler_kwargs", "schedule.min_ratio", options["min_lr_rate"])
    elif kind == "cosine_with_min_lr" and set(options) == {"min_lr"} and t.number("learning_rate"):
        t.map("lr_scheduler_kwargs", "schedule.min_ratio", options["min_lr"] / float(t.number("learning_rate") or 1))
    else:
        t.refuse("lr_scheduler_kwargs", f"{show(options)} cannot be expressed: `min_lr_rate` of cosine_with_min_lr can")


def map_length(t: Translator, *, epochs: float) -> None:
    """Epochs and steps, seed. ``epochs``: the tool's default."""
    steps = t.integer("max_steps")
    if steps is not None and steps > 0:
        t.map("max_steps", "stop.max_steps", steps)
        t.already("num_train_epochs", "`max_steps` takes precedence")
        t.carry("stop.epochs", 1_000_000, "`max_steps` alone ends the run")
    else:
        t.already("max_steps", "no limit")
        number = t.number("num_train_epochs")
        if number is not None:
            t.map("num_train_epochs", "stop.epochs", number)
        else:
            t.carry("stop.epochs", epochs, f"{t.tool}'s default")
    if t.integer("seed") is not None:
        t.map("seed", "seed", t.integer("seed"))
    else:
        t.carry("seed", 42, f"{t.tool}'s default")
    t.only("data_seed", (None, t.get("seed", 42)), "order and weights have one seed: remove it, or make it `seed`'s")


def map_batch(t: Translator, *, per_device: int, accumulation: int = 1, packs: bool = False) -> None:
    """Per-device batch x GPUs x accumulation: samples, or packs of max_length. ``per_device``, ``accumulation``: the
    tool's defaults.
    """
    micro = t.integer("per_device_train_batch_size", per_device) or per_device
    steps = t.integer("gradient_accumulation_steps", accumulation) or accumulation
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (asked := t.integer(key)) is not None and asked < 1:
            t.refuse(key, f"got {asked}, allowed: a whole number above 0")
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
        t.carry(native, total, f"{t.tool}'s default: {sum_}")
    t.already("per_device_eval_batch_size", "evaluation uses the micro-batches of training")


def map_precision(t: Translator) -> None:
    """bf16, fp16, recomputation, compilation."""
    if t.flag("fp16"):
        t.substitute("fp16", {"model.dtype": "bfloat16"}, "float16 is not available: bfloat16")
    elif t.has("fp16"):
        t.already("fp16")
    if t.flag("bf16"):
        t.map("bf16", "model.dtype", "bfloat16")
    elif t.has("bf16"):
        t.already("bf16", "model.dtype stays auto")
    for key in ("fp16_opt_level", "fp16_backend", "jit_mode_eval", "use_ipex"):
        t.already(key)
    if t.has("gradient_checkpointing"):
        if t.flag("gradient_checkpointing"):
            t.already("gradient_checkpointing", "the plan recomputes as many blocks as memory requires")
        else:
            t.map("gradient_checkpointing", "parallel.activation_checkpointing", "none")
    t.already("gradient_checkpointing_kwargs")
    if t.has("torch_compile"):
        t.map("torch_compile", "parallel.compile", t.flag("torch_compile"))
    for key in ("torch_compile_backend", "torch_compile_mode"):
        t.already(key)


def map_intervals(t: Translator, *, save_steps: int, eval_key: str = "eval_strategy") -> None:
    """Logging, evaluation and saving by steps or epochs. ``save_steps``: the tool's default interval."""
    if t.number("logging_steps", 1) == 0:  # transformers refuses it too
        t.refuse("logging_steps", "got 0, allowed: a number of steps above 0")
    elif t.has("logging_steps"):
        number = t.number("logging_steps", 1) or 1
        t.map("logging_steps", "log.every_steps", max(1, int(number)))
    t.already("logging_strategy")
    _map_interval(t, "save_strategy", "save_steps", "checkpoint", "steps", save_steps)
    old = "evaluation_strategy"
    if t.has(old) and t.has(eval_key) and t.get(old) != t.get(eval_key):
        t.contradict(old, f"{show(t.get(old))}, and {t.place(eval_key)} is {show(t.get(eval_key))}: keep one")
    _map_interval(t, old if t.has(old) and not t.has(eval_key) else eval_key, "eval_steps", "evaluate", "no", None)
    t.already(old)
    t.already("do_eval")
    if t.has("save_total_limit"):
        t.map("save_total_limit", "checkpoint.keep_last", t.integer("save_total_limit"))
    t.already("save_only_model", "checkpoints always hold what a run resumes from")
    if t.has("load_best_model_at_end"):
        t.map("load_best_model_at_end", "checkpoint.keep_best", t.flag("load_best_model_at_end"))
    best = t.get("metric_for_best_model")
    t.only("metric_for_best_model", ("loss", "eval_loss", "val.loss", "val_loss", None), f"{show(best)}: the best "
           "checkpoint is that of the lowest validation loss: write loss")  # fmt: skip
    t.only("greater_is_better", (False, None), "a lower loss is better: set it to false")


def _map_interval(
    t: Translator, strategy_key: str, steps_key: str, section: str, default: str, steps: int | None
) -> None:
    """One of no, steps, epoch. With `no`, evaluation is at start and end, and there is a checkpoint at the end."""
    strategy = str(t.get(strategy_key, default)).lower()
    every, per_epoch = f"{section}.every_steps", f"{section}.per_epoch"
    if strategy in ("no", "false"):
        t.map(strategy_key, every, 0)
        t.already(steps_key, f"`{strategy_key}` is no")
        if not t.has(strategy_key):
            t.carry(every, 0, f"{t.tool}'s default")
    elif strategy == "epoch":
        t.map(strategy_key, per_epoch, 1)
        t.already(steps_key, f"`{strategy_key}` is epoch")
    elif strategy == "steps":
        number = t.number(steps_key)
        t.already(strategy_key)
        if number is not None and number >= 1:
            t.map(steps_key, every, int(number))
        elif number is not None and number > 0:
            t.map(steps_key, every, number)
        elif number is not None:
            t.refuse(steps_key, f"got {show(number)}, allowed: a number of steps above 0")
        elif steps is not None:
            t.carry(every, steps, f"{t.tool}'s default")
    else:
        t.refuse(strategy_key, f"{show(strategy)}: write no, steps or epoch")


def map_sharding(t: Translator) -> None:
    """``fsdp`` (true, or a list or text of options) with ``fsdp_config``; DeepSpeed."""
    asked = t.get("fsdp")
    words = " ".join(map(str, asked)).split() if isinstance(asked, list) else str(asked or "").replace(",", " ").split()
    options = fsdp_options(t, "fsdp_config")
    if asked is True or words:
        native: dict[str, Any] = {"parallel.strategy": "hsdp" if "hybrid_shard" in words else "fsdp"}
        if "shard_grad_op" in words:
            native["parallel.reshard_after_forward"] = False
        if "offload" in words:
            native["parallel.offload"] = "all"
        t.map("fsdp", native)
        map_fsdp(t, options, version=2)
    else:
        t.already("fsdp")
        for key in options.values():
            t.ignore(key, f"{t.tool} reads it with `fsdp` only")
    t.only("fsdp_config", (None, {}), "write its options here, not the path of another file")
    for key in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        t.already(key, "every block is a unit")
    for key in ("group_by_length", "train_sampling_strategy", "parallelism_config"):
        t.only(key, (None, False, "random"), "not available: remove it")
    for key in ("length_column_name", "ignore_data_skip", "restore_callback_states_from_checkpoint"):
        t.already(key)
    map_deepspeed(t, "deepspeed")
    if t.has("dataloader_num_workers"):
        t.already("dataloader_num_workers", "`data.workers: auto` takes as many as the batches need")
