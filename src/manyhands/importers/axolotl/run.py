"""Axolotl's run files (``axolotl train FILE``), as its schemas, builders and loaders of July 2026 read them.

Defaults that are carried over: cosine after a warm-up of min(3 %, 100 steps), one epoch, seed 42, `sequence_len` 512,
longer samples dropped, nothing held out, all weights where there is no `adapter`, four checkpoints kept, one sample per
GPU and step. Numbers per GPU (`micro_batch_size`, `gradient_accumulation_steps`) are multiplied by the GPUs.
"""

import difflib
import math

from manyhands.config.text import show
from manyhands.importers import deepspeed, preferences, shared
from manyhands.importers import transformers as hf
from manyhands.importers.axolotl import keys, rl
from manyhands.importers.axolotl.data import limit_stream, map_data
from manyhands.importers.axolotl.model import map_images, map_method, map_model
from manyhands.importers.fsdp import fsdp_options, map_fsdp, map_words, read_words
from manyhands.importers.names import find_key
from manyhands.importers.shared import map_dtype, map_fp16
from manyhands.importers.transformers import choose_optimizer, map_neftune
from manyhands.importers.translation import UNKNOWN_GPUS, Translator, split_output
from manyhands.optim.registry import names_in

TOOL = "Axolotl"
REFUSES_UNKNOWN = False
MARKS = frozenset({"base_model", "sequence_len", "sample_packing", "lora_target_linear"})
KEYS, OPEN = keys.KEYS, keys.OPEN

LIKENESS = 0.8  # of a misspelt key to the one that is meant
KEPT_CHECKPOINTS = 4


def translate(t: Translator) -> None:
    """Every key of an Axolotl file; a file of another kind of training has one reason, for its whole."""
    for key in t.values:
        if key in keys.NOT_READ_THERE or (key not in keys.KEYS and _is_no_misspelling(key)):
            t.ignore(key, "Axolotl has no such key and ignores it")
    if _is_out_of_scope(t):
        return
    t.aliases = {"num_train_epochs": "num_epochs"}
    _check_shapes(t)
    map_model(t)
    map_method(t)
    map_images(t)
    map_data(t)
    if rl.asked(t):
        rl.map_loss(t)
    _map_batch(t)
    limit_stream(t)
    _map_optimizer(t)
    _map_schedule(t)
    hf.map_length(t, epochs=1)
    _map_precision(t)
    _map_sharding(t)
    _map_intervals(t)
    output = split_output(t.get("output_dir", "./model-out"))
    t.map("output_dir", output)
    for key, value in output.items():
        t.set_tool_default(key, value, "Axolotl's default")
    _map_trackers(t)
    t.switch("merge_lora", "output.merge")
    _map_rest(t)


def _is_no_misspelling(key: str) -> bool:
    """Whether an unknown key is one of transformers' or TRL's, or looks like none that changes the run."""
    ours = find_key(key)
    if "." in key or (ours and any(find_key(known) == ours for known in keys.KEYS)):
        return False
    return key in hf.KEYS or not difflib.get_close_matches(key.lower(), keys.ACTING, n=1, cutoff=LIKENESS)


def _check_shapes(t: Translator) -> None:
    """A mapping where one value belongs, and one value where a mapping belongs."""
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    for key in t.values:
        head = key.partition(".")[0]
        if head != key and head in KEYS and head not in sections:
            t.refuse(key, f"`{head}` takes one value, not a mapping")
        elif key in sections and t.get(key) not in (None, {}, []):
            t.refuse(key, f"got {show(t.get(key))}, allowed: a mapping of keys")


def _is_out_of_scope(t: Translator) -> bool:
    """Online training, rewards: one refusal; every other key is said not to have been looked at."""
    found = [key for key in keys.OUT_OF_SCOPE if t.get(key) not in (None, False)]
    if rl.asked(t) in rl.HERE:
        found.remove("rl")
    if t.has("model_type") and "SequenceClassification" in str(t.get("model_type")):
        found.append("model_type")
    if not found:
        return False
    why = keys.OUT_OF_SCOPE.get(found[0], "classifiers are not available: only causal language models")
    t.refuse(found[0], preferences.REWARD if rl.asked(t) == "reward" else why)
    for key in t.values:
        if key != found[0]:
            t.ignore(key, f"not looked at, because of `{found[0]}`")
    return True


def _map_batch(t: Translator) -> None:
    """micro-batch x accumulation x GPUs (or groups of them that divide samples): samples, or packs of ``sequence_len``
    tokens. How many of them a GPU takes at once changes no result: the plan decides it from memory.
    """
    if t.flag("use_ray") and t.integer("ray_num_workers"):
        t.set_gpus(int(t.integer("ray_num_workers") or 1))
    t.no_op(("use_ray", "ray_num_workers"), "the number of GPUs that the batch is counted for")
    context = _count_mesh(t)
    packs, older = t.flag("sample_packing") and not rl.asked(t), "max_packed_sequence_len"
    if t.integer(older) and t.integer(older) == t.integer("sequence_len"):
        packs = packs or not t.has("sample_packing")
        t.substitute(older, {}, "read as `sample_packing: true`, which took its place: today's Axolotl refuses it")
    elif t.integer(older):
        t.refuse(older, "Axolotl itself refuses this key: remove it, and write sample_packing: true")
    t.no_op(older)
    if packs and t.has("sample_packing"):
        t.map("sample_packing", {}, why="a step is counted in packs of sequence_len tokens")
    elif not packs:
        t.no_op("sample_packing", "packed or not, a step has the same samples")
    micro, accumulation, gpus = t.integer("micro_batch_size", 1) or 0, _accumulation(t), t.num_gpus()
    t.micro, t.accumulation = micro, accumulation
    if gpus is not None and gpus % context:
        t.refuse("context_parallel_size", f"it does not divide the {gpus} GPUs of the run")
    ranks = None if gpus is None else max(1, gpus // context)
    if micro < 1:
        t.refuse("micro_batch_size", f"got {micro}, allowed: a whole number above 0")
    elif ranks is None:
        t.refuse("micro_batch_size", UNKNOWN_GPUS)
    elif accumulation is not None:
        each = "GPU" if context == 1 else f"group of {context} GPUs"
        sum_ = f"{micro} per {each} × {ranks} {each.split()[0]}{'s' if ranks > 1 else ''} × {accumulation} accumulation"
        native = "batch.packs" if packs else "batch.samples"
        for key in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"):
            t.map(key, native, micro * ranks * accumulation, sum_)
        t.set_tool_default(native, micro * ranks * accumulation, f"Axolotl's default: {sum_}")
    t.no_op(("micro_batch_size", "gradient_accumulation_steps", "batch_size"))


def _accumulation(t: Translator) -> int | None:
    """``gradient_accumulation_steps``, or as many as ``batch_size`` (of one GPU) has micro-batches; 1 by default."""
    micro, steps, total = (t.integer(key) for key in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"))
    if steps and total:
        t.contradict("batch_size", f"{t.place('gradient_accumulation_steps')} is set too: Axolotl takes one of them")
    elif total and not micro:
        t.refuse("batch_size", "it is of one GPU: write `micro_batch_size` too, as Axolotl wants it")
    elif total and micro and total % micro:
        t.contradict("batch_size", f"{total} is no multiple of `micro_batch_size: {micro}`")
    elif total and micro:
        if "gradient_accumulation_steps" not in t.values:
            t.substitute("batch_size", {}, "read as `gradient_accumulation_steps`: today's Axolotl takes 1 where that "
                         "is not written, even as null")  # fmt: skip
        return total // micro
    return steps or 1


def _map_optimizer(t: Translator) -> None:
    if not t.has("learning_rate"):
        t.refuse("learning_rate", "it is missing: Axolotl has no default")
    hf.map_adam(t)
    if t.number("weight_decay") and not t.has("adapter"):
        t.map("weight_decay", "optimizer.decay_embeddings", True)
    choose_optimizer(t, "optimizer", names_in("transformers", "axolotl"), "adamw_torch_fused")
    if t.has("neftune_noise_alpha") and t.has("noisy_embedding_alpha"):
        t.contradict("noisy_embedding_alpha", "it is the older name of `neftune_noise_alpha`: keep one")
    for key in ("neftune_noise_alpha", "noisy_embedding_alpha"):
        map_neftune(t, key)
    t.set_tool_default("optimizer.name", "adamw", "Axolotl's default")
    ratio, rate = t.number("loraplus_lr_ratio"), t.number("learning_rate")
    if ratio and rate:
        t.map("loraplus_lr_ratio", "optimizer.learning_rates", {"lora_B": rate * ratio}, "LoRA+: the rate of B")
    t.no_op("loraplus_lr_ratio")
    t.no_op("loraplus_lr_embedding", "no embedding has LoRA matrices")


def _map_schedule(t: Translator) -> None:
    kind = str(t.get("lr_scheduler", "cosine"))
    if kind not in hf.SCHEDULES:
        t.refuse("lr_scheduler", f"{show(kind)} is not available: write one of {', '.join(hf.SCHEDULES)}")
    t.map("lr_scheduler", "schedule.name", hf.SCHEDULES.get(kind, "cosine"))
    t.set_tool_default("schedule.name", "cosine", "Axolotl's default")
    _map_warmup(t, has_none=kind == "constant")
    low, flat = t.number("cosine_min_lr_ratio"), t.number("cosine_constant_lr_ratio")
    if kind != "cosine":
        t.no_op(("cosine_min_lr_ratio", "cosine_constant_lr_ratio"), f"`lr_scheduler` is {kind}")
    elif low and flat:
        t.refuse("cosine_constant_lr_ratio", "a constant rate before the end of a cosine is not available: set it to 0")
    elif low:
        t.map("cosine_min_lr_ratio", "schedule.min_ratio", low, "the rate does not fall at all" if low == 1 else "")
    t.no_op(("cosine_min_lr_ratio", "cosine_constant_lr_ratio"))
    if low and kind == "cosine":  # Axolotl's own schedule
        t.no_op("lr_scheduler_kwargs", "`cosine_min_lr_ratio` takes precedence")
    else:
        hf.map_schedule_options(t, kind, "lr_scheduler")
    if t.flag("lr_quadratic_warmup") and kind == "cosine":
        t.refuse("lr_quadratic_warmup", "a quadratic warm-up is not available: remove it for a linear one")
    t.no_op("lr_quadratic_warmup")


def _map_warmup(t: Translator, *, has_none: bool) -> None:
    steps, ratio, limit = t.number("warmup_steps"), t.number("warmup_ratio"), _step_limit(t)
    if has_none:
        t.no_op(("warmup_steps", "warmup_ratio"), "transformers' `constant` has no warm-up; `constant_with_warmup` has")
        t.set_tool_default("schedule.warmup_steps", 0, "transformers' `constant` has no warm-up")
    elif steps and ratio:
        t.contradict("warmup_ratio", f"{t.place('warmup_steps')} is set too: keep one")
    elif steps is not None and 0 < steps < 1:
        why = "read as a share of all steps; Axolotl itself refuses a part of a step"
        t.substitute("warmup_steps", {"schedule.warmup_ratio": steps}, why)
    elif steps is not None:
        t.map("warmup_steps", "schedule.warmup_steps", _axolotl_warmup(steps))
        t.no_op("warmup_ratio", "`warmup_steps` is set")
    elif ratio is not None and limit:
        t.map("warmup_ratio", "schedule.warmup_steps", _axolotl_warmup(ratio * limit), f"of {limit} steps")
    elif ratio is not None:
        t.map("warmup_ratio", "schedule.warmup_ratio", ratio)
    elif limit:
        t.set_tool_default(
            "schedule.warmup_steps", _axolotl_warmup(min(0.03 * limit, 100)), "Axolotl's default: min(3 %, 100)"
        )
    else:
        why = "Axolotl's default, which ends at 100 steps: write `warmup_steps: 100` for a run of more than 3,333"
        t.set_tool_default("schedule.warmup_ratio", 0.03, why)
    t.no_op(("warmup_steps", "warmup_ratio"))


def _axolotl_warmup(steps: float) -> int:
    """Whole steps as Axolotl counts them: rounded down, and two in place of one."""
    whole = int(steps)
    return 2 if whole == 1 else whole


def _step_limit(t: Translator) -> int | None:
    """``max_steps``; None for none: null, 0 and -1."""
    limit = t.integer("max_steps", 0) or 0
    return limit if limit > 0 else None


def _map_intervals(t: Translator) -> None:
    """Evaluations and checkpoints: a number a run's epoch, steps, or a share of the run."""
    if t.has("logging_steps"):
        t.map("logging_steps", "log.every_steps", max(1, t.integer("logging_steps", 1) or 1))
    for steps, per_epoch in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        if t.number(steps) and t.number(per_epoch):
            t.contradict(steps, f"{t.place(per_epoch)} is set too: keep one")
    _map_interval(t, "checkpoint", "save_steps", "saves_per_epoch", "save_strategy", default=1)
    strategy = "evaluation_strategy" if t.has("evaluation_strategy") and not t.has("eval_strategy") else "eval_strategy"
    validates = t.has("test_datasets") or bool(t.number("val_set_size"))
    if validates:
        _map_interval(t, "evaluate", "eval_steps", "evals_per_epoch", strategy, default=None)
        _map_best(t)
    for key in ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy", "early_stopping_patience",
                "load_best_model_at_end", "metric_for_best_model"):  # fmt: skip
        t.no_op(key, "" if validates or not t.has(key) else "there is no validation data")
    keep = t.integer("save_total_limit")
    native = t.mapping.get("checkpoint", {})
    if keep and native.get("every_steps") != 0:
        t.map("save_total_limit", "checkpoint.keep_last", keep if keep > 0 else "all")
    elif native.get("every_steps") != 0:
        t.set_tool_default("checkpoint.keep_last", KEPT_CHECKPOINTS, "Axolotl's default")
    t.no_op("save_total_limit")


def _map_interval(
    t: Translator, section: str, steps_key: str, per_epoch_key: str, strategy_key: str, *, default: int | None
) -> None:
    """``default``: how often an epoch where the file says nothing; None: only at start and end."""
    every, per_epoch = f"{section}.every_steps", f"{section}.per_epoch"
    steps, times, limit = t.number(steps_key), t.integer(per_epoch_key), _step_limit(t)
    strategy = str(t.get(strategy_key, "")).lower()
    if strategy in ("no", "false"):
        t.map(strategy_key, every, 0)
    elif times and limit:
        share = 1 / (times * (t.number("num_epochs", 1) or 1))
        t.map(per_epoch_key, every, max(1, math.ceil(limit * share)), f"a share of `max_steps: {limit}`")
    elif times:
        t.map(per_epoch_key, per_epoch, times)
    elif steps:
        t.map(steps_key, every, int(steps) if steps >= 1 else steps)
    elif strategy == "best":
        t.map(strategy_key, {per_epoch: 1, "checkpoint.keep_best": True})
    elif strategy == "epoch":
        t.map(strategy_key, per_epoch, 1)
    elif strategy == "steps" and section == "checkpoint":
        t.map(strategy_key, every, 500, f"transformers' default of `{steps_key}`")
    elif strategy == "steps":  # transformers takes `logging_steps`, Axolotl's default of which is at most 10
        t.map(
            strategy_key, every, t.integer("logging_steps", 10) or 10, f"`{steps_key}` is missing: at `logging_steps`"
        )
    elif default:
        t.set_tool_default(per_epoch, default, "Axolotl's default")
    else:
        t.set_tool_default(every, 0, "Axolotl's default: no evaluations during the run")
    t.no_op((steps_key, per_epoch_key, strategy_key))


def _map_best(t: Translator) -> None:
    """Early stopping, and the best checkpoint as the result."""
    patience = t.integer("early_stopping_patience")
    if patience:
        t.map("early_stopping_patience", "stop.patience", patience)
    save, evaluate = _share(t, "save_steps", "saves_per_epoch"), _share(t, "eval_steps", "evals_per_epoch")
    if patience or t.flag("load_best_model_at_end"):
        key = "load_best_model_at_end" if t.flag("load_best_model_at_end") else "early_stopping_patience"
        if save and evaluate and save % evaluate == 0:
            t.map(key, "checkpoint.keep_best", True)
            t.only("greater_is_better", (False,), "a lower loss is better: set it to false")
        else:
            t.ignore(key, "the last checkpoint is the result, as in Axolotl unless `eval_steps` divides `save_steps`")
    t.only("metric_for_best_model", ("loss", "eval_loss"), "the best checkpoint is that of the lowest validation loss")


def _share(t: Translator, steps_key: str, per_epoch_key: str) -> float | None:
    """Steps between two, or their share of the run, as ``normalize_config`` makes it of a number an epoch."""
    times = t.integer(per_epoch_key)
    share = 1.0 / (times * (t.number("num_epochs", 1) or 1)) if times else 1.0
    return share if share < 1 else t.number(steps_key)


def _map_trackers(t: Translator) -> None:
    """Trackers, each with its switch; the name of a project opens one, too."""
    asked: dict[str, list[str]] = {}
    for tracker, (switch, project) in keys.TRACKERS.items():
        if tracker == "wandb" and t.get("wandb_mode") == "disabled":
            continue
        if t.flag(switch) or t.has(project):
            asked[switch if t.flag(switch) else project] = [tracker]
    projects = {tracker: project for tracker, (_, project) in keys.TRACKERS.items() if tracker in shared.SINKS}
    shared.map_trackers(t, asked, projects)
    opened = [tracker for named in asked.values() for tracker in named]
    shared.map_tracker_options(t, opened, keys.TRACKER_OPTIONS)
    for key in keys.OF_TRACKERS & t.values.keys():
        t.no_op(key, f"only {key.removeprefix('use_').partition('_')[0]} reads it" if t.get(key) else "")


def _map_rest(t: Translator) -> None:
    """Keys that no other key decides: by construction, reported, or refused where they are on."""
    if t.number("loss_watchdog_threshold"):
        t.map("loss_watchdog_threshold", "stop.loss_above", t.number("loss_watchdog_threshold"))
        steps = t.integer("loss_watchdog_patience", 3) or 3
        t.map_or_default("loss_watchdog_patience", "stop.loss_above_steps", steps)
    t.no_op(("loss_watchdog_threshold", "loss_watchdog_patience"))
    hf.map_timeout(t)
    t.only("dataloader_drop_last", (False,), "every sample is trained: set it to false")
    t.only("resume_from_checkpoint", (False,), "the same command resumes a run from its newest checkpoint; to begin "
           "from trained weights name their folder in `base_model`")  # fmt: skip
    kernels = [t.flag(key) for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel") if t.has(key)]
    for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"):
        if t.has(key) and not any(kernels):
            t.map(key, "kernels.lora", "reference")
        t.no_op(key)
    _map_plugins(t)
    for key in ("attn_implementation", "sage_attention"):
        if t.get(key) in ("sage", "fp8", True):
            t.refuse(key, "attention in lower precision is not available: write flash_attention_2")
    hf.note_so(t, keys.SO)
    if t.get("tf32") is True and t.mapping.get("model", {}).get("dtype") == "float32":
        t.ignore("tf32", "matmuls are in float32")
    t.no_op("tf32")
    t.only("pretrain_multipack_attn", (True,), keys.REFUSED["pretraining_sample_concatenation"])
    options = t.get("accelerator_config")
    if isinstance(options, dict) and options.get("split_batches"):
        t.refuse("accelerator_config", "`split_batches` is not available: remove it")
    t.no_op(keys.ALREADY & t.values.keys())
    t.no_op(keys.ONLY_WITH_RL & t.values.keys(), "this kind of training does not read it")
    off: tuple[object, ...] = (None, False, 0, "", "false", [], {})
    hf.note_so(t, {key: (off, why) for key, why in keys.IGNORED.items()})
    for key in keys.REFUSED.keys() & t.values.keys():
        parent = keys.PART_OF.get(key)
        if t.get(key) in off or (key == "skip_prepare_dataset" and t.has("processor_type")):
            t.no_op(key)
        elif parent and t.get(parent) in off:
            t.no_op(key, f"`{parent}` is not set")
        else:
            t.refuse(key, keys.REFUSED[key])
    t.no_op(keys.OUT_OF_SCOPE.keys() & t.values.keys())


def _map_plugins(t: Translator) -> None:
    asked = t.get("plugins", [])
    if not isinstance(asked, list):
        t.refuse("plugins", f"got {show(asked)}, allowed: a list")
        return
    for plugin in asked:
        parts = str(plugin).split(".")
        known = next((part for part in parts if part in keys.PLUGINS), None)
        if known is None:
            t.refuse("plugins", f"{plugin} is not available: remove it")
        elif why := keys.PLUGINS[known]:
            t.refuse("plugins", f"{parts[-1]}: {why}")
    t.no_op("plugins", "fused kernels are used where they pass a self-test" if asked else "")


def _count_mesh(t: Translator) -> int:
    """``dp_shard_size`` x ``dp_replicate_size`` x ``context_parallel_size`` x ``expert_parallel_size`` are the GPUs of
    the run, and all but the third have samples of their own; returns it (``sequence_parallel_degree`` before).
    """
    named = [key for key in ("context_parallel_size", "sequence_parallel_degree") if t.integer(key, 1) not in (None, 1)]
    context = int(t.integer(named[0]) or 1) if named else 1
    if named:
        t.map(named[0], "parallel.context_degree", context)
    if len({t.integer(key) for key in named}) > 1:
        t.contradict(named[1], f"`{named[0]}` is {context}: keep one")
    t.no_op(("context_parallel_size", "sequence_parallel_degree"))
    shard, replicate = t.integer("dp_shard_size", 1) or 1, t.integer("dp_replicate_size", 1) or 1
    experts = t.integer("expert_parallel_size", 1) or 1
    if experts > 1 and context > 1:
        why = f"ranks that divide a sample (`{named[0]}`) cannot divide experts: remove one of them"
        t.refuse("expert_parallel_size", why)
    elif experts > 1 and replicate > 1:
        t.refuse("expert_parallel_size", "Axolotl does not combine it with replicas: set dp_replicate_size to 1")
    elif experts > 1:
        t.map("expert_parallel_size", "parallel.expert_degree", experts)
    t.no_op("expert_parallel_size")
    if shard * replicate * experts > 1:
        t.set_gpus(shard * replicate * context * experts)
    if shard > 1 and replicate > 1:
        t.map("dp_replicate_size", "parallel.strategy", "hsdp")
        t.map("dp_shard_size", "parallel.shard_degree", shard * context)
    t.no_op(("dp_shard_size", "dp_replicate_size"), "the GPUs of the run" if shard * replicate > 1 else "")
    return context


def _map_precision(t: Translator) -> None:
    """``bf16`` is auto where it is not set; Axolotl trains in float32 only where all of them are off."""
    bf16, others = t.get("bf16", "auto"), [key for key in ("fp16", "float16") if t.flag(key)]
    on = bf16 in (True, "full", "true") or t.flag("bfloat16")
    if on:
        for key in ("bf16", "bfloat16"):
            if t.get(key) not in (None, False, "false"):
                t.map(key, "model.dtype", "bfloat16")
    elif bf16 == "auto":
        t.no_op("bf16", "`model.dtype` is auto: bfloat16 where the GPU has it")
        if t.flag("fp16"):  # then Axolotl turns bf16 off
            map_fp16(t, "fp16")
    elif bf16 not in (False, "false"):
        t.refuse("bf16", f"got {show(bf16)}, allowed: auto, true or false")
    elif others:
        map_dtype(t, others[0], "fp16")
    else:
        t.map("bf16", "model.dtype", "float32")
    if t.flag("fp8"):
        t.substitute("fp8", {"kernels.linear": "fp8"}, "another recipe than torchao's, which is checked before step 1")
    t.no_op("fp8_enable_fsdp_float8_all_gather", "weights are gathered in bfloat16" if t.flag("fp8") else "")
    t.no_op(("bf16", "bfloat16", "fp16", "float16", "fp8"))
    _map_checkpointing(t)
    if t.get("torch_compile") == "auto":
        t.no_op("torch_compile")
    else:
        t.map("torch_compile", "parallel.compile", t.flag("torch_compile"))


def _map_checkpointing(t: Translator) -> None:
    """Recomputed and offloaded activations; FSDP has a key of its own for the same thing."""
    native = "parallel.activation_checkpointing"
    asked, offload = t.get("gradient_checkpointing"), t.get("activation_offloading")
    in_fsdp = fsdp_options(t, "fsdp_config").get("activation_checkpointing")
    if asked in ("offload", "offload_disk"):
        t.map("gradient_checkpointing", native, "full")
        offload = "disk" if asked == "offload_disk" else True
    elif t.flag("gradient_checkpointing") and t.get("selective_checkpointing") not in (None, False):
        t.map("selective_checkpointing", native, "selective")
    elif t.flag("gradient_checkpointing"):
        t.no_op("gradient_checkpointing", "the plan recomputes as many blocks as memory requires")
    elif t.has("gradient_checkpointing") and not (in_fsdp and t.flag(in_fsdp)):
        t.map("gradient_checkpointing", native, "none")
    if offload not in (None, False, "false"):
        if not asked:
            t.contradict("activation_offloading", "Axolotl also needs `gradient_checkpointing: true`")
        for key in ("gradient_checkpointing",) * (asked in ("offload", "offload_disk")) + ("activation_offloading",):
            if offload == "disk":
                why = "activations go to the host's memory, not to its disk"
                t.substitute(key, {"parallel.offload_activations": True}, why)
            else:
                t.map(key, "parallel.offload_activations", True)
    t.no_op(("gradient_checkpointing", "selective_checkpointing", "activation_offloading"))


def _map_sharding(t: Translator) -> None:
    words = read_words(t.get("fsdp"))
    configured = [key for key in t.values if key.startswith("fsdp_config.") and t.has(key)]
    if (words or configured) and t.has("deepspeed"):
        t.contradict("deepspeed", f"{t.place('fsdp' if words else configured[0])} asks for FSDP: keep one")
    if words or configured:
        hybrid = "hybrid_shard" in words or t.mapping.get("parallel", {}).get("shard_degree")
        strategy = "ddp" if "no_shard" in words else "hsdp" if hybrid else "fsdp"
        map_words(t, "fsdp" if words else configured[0], words, strategy)
    t.no_op("fsdp")
    options = {name: key for name, key in fsdp_options(t, "fsdp_config").items() if name in keys.FSDP}
    map_fsdp(t, options, version=t.integer("fsdp_version", 1) or 1, strategy=None)
    for key in t.values:
        if key.startswith("fsdp_config.") and key not in options.values():
            t.ignore(key, "Axolotl's `fsdp_config` has no such key and ignores it")
    t.no_op("fsdp_config")
    deepspeed.map_deepspeed(t, "deepspeed")
    t.only("tensor_parallel_size", (1,), "splitting a layer over GPUs is not available: set it to 1")
