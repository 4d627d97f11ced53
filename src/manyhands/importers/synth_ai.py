"""synth-ai's TOML for ``train --type sft``. Its several numbers of GPUs must agree with the global batch."""

import re
from collections.abc import Mapping

from manyhands.config.text import names, show
from manyhands.core.units import count_of
from manyhands.importers.deepspeed import map_stage
from manyhands.importers.fsdp import map_fsdp
from manyhands.importers.shared import map_all_linear, map_fp16
from manyhands.importers.translation import Translator, check_product

TOOL = "synth-ai"
REFUSES_UNKNOWN = False
PARALLEL = "hyperparameters.parallelism."
VALIDATION = "training.validation."
COUNTS = (  # each is the number of GPUs
    "compute.gpu_count", "data.topology.total_gpus", "data.topology.container_count", "compute.variant",
    "data.topology.variant", "compute.gpus_per_node", "data.topology.gpus_per_node", "hyperparameters.world_size",
)  # fmt: skip
DATA_PARALLEL = "data.topology.data_parallel"
TOTALS = ("data.topology.total_gpus", "hyperparameters.world_size", DATA_PARALLEL)  # on all machines
PER_NODE = ("compute.gpus_per_node", "data.topology.gpus_per_node")
NODES = ("compute.nodes", "data.topology.nodes")
ALREADY: Mapping[str, str] = {
    "type": "supervised fine-tuning",
    "algorithm.type": "supervised fine-tuning",
    "algorithm.method": "supervised fine-tuning",
    PARALLEL + "fsdp_use_orig_params": "always so",
    PARALLEL + "fsdp_auto_wrap_policy": "every block is a unit",
    PARALLEL + "fsdp_version": "FSDP2",
}
METHODS: Mapping[str, str] = {
    "lora": "lora", "peft": "lora", "qlora": "qlora", "full_finetune": "full", "fft": "full", "full": "full",
    "sft_offline": "", "sft": "",
}  # fmt: skip
LORA: Mapping[str, str] = {"r": "rank", "rank": "rank", "alpha": "alpha", "dropout": "dropout"}
LORA_KEYS = tuple(
    (f"{section}{name}", native)
    for section in ("lora.", "hyperparameters.lora_", "training.lora.")
    for name, native in (*LORA.items(), ("target_modules", "target_modules"))
)
KEYS = frozenset(ALREADY) | frozenset(COUNTS) | frozenset(key for key, _ in LORA_KEYS) | names(
    """
    algorithm.variety job.model job.data job.data_path job.validation_data compute.gpu_type compute.nodes
    data.topology.nodes data.topology.tensor_parallel data.topology.data_parallel data.topology.pipeline_parallel
    training.mode training.use_qlora training.seed hyperparameters.n_epochs hyperparameters.train_kind
    hyperparameters.per_device_batch hyperparameters.gradient_accumulation_steps hyperparameters.sequence_length
    hyperparameters.learning_rate hyperparameters.warmup_ratio hyperparameters.weight_decay hyperparameters.seed
    hyperparameters.global_batch hyperparameters.batch_size metadata tags
    """
) | frozenset(PARALLEL + name for name in (
    "fsdp", "fsdp_sharding_strategy", "fsdp_cpu_offload", "fsdp_activation_checkpointing", "tensor_parallel_size",
    "pipeline_parallel_size", "bf16", "fp16", "use_deepspeed", "deepspeed_stage", "activation_checkpointing",
)) | frozenset(VALIDATION + name for name in (
    "enabled", "evaluation_strategy", "eval_steps", "save_best_model_at_end", "metric_for_best_model",
    "greater_is_better",
))  # fmt: skip
MARKS = names(
    """
    job.model job.data compute.gpu_type compute.gpu_count hyperparameters.n_epochs hyperparameters.per_device_batch
    hyperparameters.learning_rate hyperparameters.sequence_length hyperparameters.train_kind training.use_qlora
    training.validation.enabled
    """
)
OPEN = names("metadata tags")


def translate(t: Translator) -> None:
    """Every key of a synth-ai file."""
    for key, why in ALREADY.items():
        t.no_op(key, why)
    t.only("algorithm.method", ("sft", "supervised_finetune"), "only supervised fine-tuning is available: write sft")
    for key in ("metadata", "tags"):
        t.ignore(key, "labels of synth-ai's service")
    t.map("job.model", "model.name")
    for key in ("job.data", "job.data_path"):
        t.map(key, "data.train")
    t.map("job.validation_data", "data.validation")
    gpus = _map_gpus(t)
    _map_batch(t, gpus)
    _map_method(t)
    _map_numbers(t)
    _map_parallelism(t)
    _map_validation(t)


def _map_gpus(t: Translator) -> int | None:
    """The number of GPUs on all machines, on which all keys must agree."""
    found: dict[str, int] = {}
    for key in COUNTS:
        if not t.has(key):
            continue
        number = _count(t, key) if key.endswith("variant") else t.integer(key)
        if number is not None:
            found[key] = number
    nodes = _map_nodes(t)
    if not found and t.has(DATA_PARALLEL):  # nothing else divides the GPUs
        number = t.integer(DATA_PARALLEL)
        found = {} if number is None else {DATA_PARALLEL: number}
    total = _map_total(t, found, nodes) if found else None
    if t.has("compute.gpu_type"):
        asked = str(t.get("compute.gpu_type"))
        others = t.context.other_gpus(asked) if t.context.other_gpus else None
        gpus = f"{f'{nodes}x' if nodes > 1 else ''}{8 if total is None else total // nodes}x{asked}"
        plan = f"`manyhands plan FILE --gpus {gpus}` plans for {asked}, `manyhands submit` asks a cluster for them"
        if others:
            t.substitute(
                "compute.gpu_type", {"submit.gpus": gpus}, f"this machine has {others}, which are taken; {plan}"
            )
        else:
            t.map("compute.gpu_type", "submit.gpus", gpus, f"training takes this machine's GPUs; {plan}")
    return total


def _map_nodes(t: Translator) -> int:
    """The number of machines, which must be the same in both places."""
    found = {key: number for key in NODES if (number := t.integer(key)) is not None}
    nodes = max(1, next(iter(found.values()), 1))
    for key, number in found.items():
        if number < 1:
            t.refuse(key, f"got {number}, allowed: 1 or more")
        elif number != nodes:
            t.contradict(
                key, f"{count_of(number, 'machine')}, but {t.place(next(iter(found)))} is {nodes}: correct one of them"
            )
        elif nodes == 1:
            t.no_op(key)
        else:
            t.map(key, "parallel.nodes", nodes)
    return nodes


def _map_total(t: Translator, found: Mapping[str, int], nodes: int) -> int | None:
    """The number of GPUs on all machines; a key that names neither may count one machine's or all."""
    first = next((key for key in found if nodes == 1 or key in (*TOTALS, *PER_NODE)), None)
    if first is None:
        for key in found:
            t.refuse(key, f"GPUs of one of {nodes} machines, or of all: write `total_gpus` below [data.topology], too")
        return None
    total = found[first] * (nodes if first in PER_NODE else 1)
    if total % nodes:
        t.contradict(
            first, f"{count_of(total, 'GPU')}, which {nodes} machines cannot share equally: correct one of them"
        )
    for key, number in found.items():
        is_total, is_part = key not in PER_NODE and number == total, key not in TOTALS and number * nodes == total
        if not is_total and not is_part:
            several = f" with {nodes} machines" if nodes > 1 else ""
            t.contradict(
                key, f"{count_of(number, 'GPU')}, but {t.place(first)} is {found[first]}{several}: correct one of them"
            )
        else:
            t.map(key, "parallel.gpus", total)
    if total < 1:
        t.refuse(first, f"got {total}, allowed: 1 or more")
        return None
    t.set_gpus(total)
    if t.has(DATA_PARALLEL) and t.integer(DATA_PARALLEL) != total:
        t.contradict(DATA_PARALLEL, f"{t.get(DATA_PARALLEL)}, but the number of GPUs is {total}, and nothing else "
                     "divides them: correct one of them")  # fmt: skip
    t.no_op(DATA_PARALLEL)
    return total


def _count(t: Translator, key: str) -> int | None:
    """``H100-4x``: 4; its kind of GPU must be ``gpu_type``."""
    match = re.fullmatch(r"(.+)-(\d+)x", str(t.get(key)))
    if match is None:
        t.refuse(key, f"got {show(t.get(key))}, allowed: kind and number of GPUs, such as H100-4x")
        return None
    if t.has("compute.gpu_type") and str(t.get("compute.gpu_type")).lower() != match[1].lower():
        kind = t.get("compute.gpu_type")
        t.contradict(key, f"{match[1]}, but {t.place('compute.gpu_type')} is {kind}: correct one of them")
    return int(match[2])


def _map_batch(t: Translator, gpus: int | None) -> None:
    micro, steps = "hyperparameters.per_device_batch", "hyperparameters.gradient_accumulation_steps"
    total = "hyperparameters.global_batch"
    t.map("hyperparameters.batch_size", "batch.samples", t.integer("hyperparameters.batch_size"))
    t.micro, t.accumulation = t.integer(micro), t.integer(steps)
    if not t.has(micro) and not t.has(steps):
        t.map(total, "batch.samples", t.integer(total))
        return
    gpus = gpus if gpus is not None else t.num_gpus()
    if gpus is None:
        t.refuse(micro if t.has(micro) else steps, "the number of GPUs is not known: write `gpu_count` below [compute]")
        return
    parts = (("per_device_batch", t.micro or 1), ("GPUs", gpus), ("gradient_accumulation_steps", t.accumulation or 1))
    product = parts[0][1] * gpus * parts[2][1]
    for key in (micro, steps):
        t.map(key, "batch.samples", product, f"{parts[0][1]} × {gpus} × {parts[2][1]}")
    if t.has(total):
        check_product(t, total, parts)
        t.no_op(total, "the product of the other three")


def _map_method(t: Translator) -> None:
    """Three keys and a switch name the method; they must agree."""
    first: tuple[str, str] | None = None
    qlora = t.flag("training.use_qlora")
    for key in ("training.mode", "hyperparameters.train_kind", "algorithm.variety"):
        if not t.has(key):
            continue
        name = str(t.get(key))
        if name not in METHODS:
            t.refuse(key, f"got {show(name)}, allowed: {', '.join(METHODS)}")
            continue
        method = METHODS[name]
        if not method:
            t.no_op(key, "supervised fine-tuning")
            continue
        method = "qlora" if qlora and method == "lora" else method
        if first is not None and (first[1] == "full") != (method == "full"):
            t.contradict(key, f"{name}, but {t.place(first[0])} is {t.get(first[0])}: correct one of them")
            continue
        first = first or (key, method)
        t.map(key, "method.name", method)
    if qlora and first is not None and first[1] == "full":
        t.contradict("training.use_qlora", f"true, but {t.place(first[0])} is {t.get(first[0])}: correct one of them")
    elif qlora:
        t.map("training.use_qlora", "method.name", "qlora")
    t.no_op("training.use_qlora")
    for key, native in LORA_KEYS:
        if not t.has(key):
            continue
        if first is not None and first[1] == "full":
            t.ignore(key, "all weights are trained")
        elif native != "target_modules":
            t.map(key, f"method.{native}", t.number(key))
        else:
            modules = t.get(key)
            if modules in (["all-linear"], ["all"], "all-linear", "all"):
                map_all_linear(t, key)
            else:
                t.map(key, "method.target_modules", modules)


def _map_numbers(t: Translator) -> None:
    for key, native in (
        ("hyperparameters.n_epochs", "stop.epochs"),
        ("hyperparameters.learning_rate", "optimizer.learning_rate"),
        ("hyperparameters.weight_decay", "optimizer.weight_decay"),
        ("hyperparameters.warmup_ratio", "schedule.warmup_ratio"),
    ):
        t.map(key, native, t.number(key))
    for key, native in (
        ("hyperparameters.sequence_length", "data.max_length"),
        ("hyperparameters.seed", "seed"),
        ("training.seed", "seed"),
    ):
        t.map(key, native, t.integer(key))


def _map_parallelism(t: Translator) -> None:
    fsdp, deepspeed, stage = PARALLEL + "fsdp", PARALLEL + "use_deepspeed", PARALLEL + "deepspeed_stage"
    strategy = PARALLEL + "fsdp_sharding_strategy"
    offload = PARALLEL + "fsdp_cpu_offload"
    if t.flag(fsdp) and t.flag(deepspeed):
        t.contradict(deepspeed, f"true, but {t.place(fsdp)} is true, too: keep one")
    elif t.flag(fsdp):
        t.map(fsdp, "parallel.strategy", "fsdp")
        options = {"sharding_strategy": strategy, "offload_params": offload}
        map_fsdp(t, {name: key for name, key in options.items() if t.has(key)}, strategy=None)
    elif t.flag(deepspeed):
        number = t.integer(stage, 2) or 0
        t.no_op(deepspeed)
        map_stage(t, stage if t.has(stage) else deepspeed, number)
    t.no_op((fsdp, deepspeed))
    for key in (strategy, offload, PARALLEL + "fsdp_activation_checkpointing"):
        if not t.flag(fsdp) or t.flag(deepspeed):
            t.no_op(key, "FSDP is not asked for")
    t.no_op(stage, "" if t.flag(deepspeed) else "`use_deepspeed` is false")
    for key in (PARALLEL + "tensor_parallel_size", PARALLEL + "pipeline_parallel_size",
                "data.topology.tensor_parallel", "data.topology.pipeline_parallel"):  # fmt: skip
        t.only(key, (1,), "tensor and pipeline parallelism are not available: write 1")
    map_fp16(t, PARALLEL + "fp16")
    t.switch(PARALLEL + "bf16", "model.dtype", "bfloat16")
    for key in (PARALLEL + "activation_checkpointing", PARALLEL + "fsdp_activation_checkpointing"):
        if t.has(key):
            t.map(key, "parallel.activation_checkpointing", "full" if t.flag(key) else "none")


def _map_validation(t: Translator) -> None:
    steps, kind, best = VALIDATION + "eval_steps", VALIDATION + "evaluation_strategy", "save_best_model_at_end"
    t.only(VALIDATION + "metric_for_best_model", ("val.loss", "val_loss", "eval_loss", "loss"),
           "the best checkpoint is that of the lowest validation loss: write val.loss")  # fmt: skip
    t.only(VALIDATION + "greater_is_better", (False,), "a lower loss is better: set it to false")
    if not t.flag(VALIDATION + "enabled"):
        if t.has(VALIDATION + "enabled"):
            t.map(VALIDATION + "enabled", "data.validation_fraction", 0)
        else:
            t.set_tool_default("data.validation_fraction", 0, "without [training.validation] nothing is held out")
        t.no_op((steps, kind, VALIDATION + best), "validation is not enabled")
        return
    t.no_op(VALIDATION + "enabled", "a part of the data is held out, unless `job.validation_data` names others")
    asked = str(t.get(kind, "steps"))
    if asked == "steps":
        t.no_op(kind)
        t.map(steps, "evaluate.every_steps", t.integer(steps))
    elif asked == "epoch":
        t.map(kind, "evaluate.per_epoch", 1)
        t.no_op(steps, "once an epoch")
    elif asked == "no":
        t.map(kind, "evaluate.every_steps", 0)
        t.no_op(steps)
    else:
        t.refuse(kind, f"got {show(asked)}, allowed: no, steps, epoch")
    t.map(VALIDATION + best, "checkpoint.keep_best", t.flag(VALIDATION + best))
