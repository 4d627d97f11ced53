"""The files of LLaMA-Factory's rewrite (``USE_V1=1 llamafactory-cli sft FILE``, examples/v1): supervised fine-tuning of
text models. Few flat keys, and a mapping with a ``name`` for each part: ``peft_config``, ``dist_config``, ...

Data sets stand in a YAML file that ``train_dataset`` names. What it does and we do not do alike, in every run, is
listed in docs/coming-from.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.config.read import read_run_file
from manyhands.config.text import nearest_name, show
from manyhands.core.errors import UserError
from manyhands.core.units import count_of
from manyhands.importers import transformers as hf
from manyhands.importers.deepspeed import map_deepspeed
from manyhands.importers.llamafactory import map_output
from manyhands.importers.llamafactory_data import find_file
from manyhands.importers.llamafactory_method import map_freeze, split_names
from manyhands.importers.translation import UNKNOWN_GPUS, Translator, names

TOOL = "LLaMA-Factory v1"
REFUSES_UNKNOWN = True
MARKS = names(
    """
    train_dataset model_class batching_strategy sample_backend dist_config quant_config init_config dist_config.name
    quant_config.name peft_config.name peft_config.export_dir
    """
)
OPEN = names("kernel_config init_config lr_scheduler_config")
LORA = names(
    """
    peft_config.r peft_config.lora_alpha peft_config.lora_dropout peft_config.target_modules peft_config.use_rslora
    peft_config.use_dora peft_config.modules_to_save
    """
)
FREEZE = names(
    """
    peft_config.freeze_trainable_layers peft_config.freeze_trainable_modules peft_config.freeze_extra_modules
    peft_config.cast_trainable_params_to_fp32
    """
)
MUON = names(
    """
    optim_config.wd optim_config.momentum optim_config.nesterov optim_config.ns_steps optim_config.adamw_betas
    optim_config.adamw_eps
    """
)
NO_EFFECT = names(
    """
    flash_attn kernel_config init_config batching_workers cp_mode dist_timeout pref_loss pref_beta
    pref_ftx simpo_gamma dpo_label_smoothing ld_alpha sample_backend max_new_tokens dist_config.pin_memory
    peft_config.export_size peft_config.export_hub_model_id peft_config.infer_dtype peft_config.export_legacy_format
    quant_config.compute_dtype
    """
)
KEYS = (
    LORA
    | MUON
    | FREEZE
    | NO_EFFECT
    | names(
        """
        model custom_chat_template trust_remote_code model_class peft_config quant_config dist_config optim_config
        lr_scheduler_config train_dataset eval_dataset output_dir micro_batch_size global_batch_size cutoff_len
        learning_rate num_train_epochs max_steps max_grad_norm bf16 batching_strategy enable_activation_checkpointing
        dp_size cp_size mp_replicate_size mp_shard_size seed resume_from_checkpoint save_steps save_epochs
        save_ckpt_as_hf save_total_limit logging_steps full_determinism
        peft_config.name peft_config.adapter_name_or_path peft_config.export_dir
        quant_config.name quant_config.quantization_bit quant_config.double_quantization quant_config.quantization_type
        dist_config.name dist_config.config_file dist_config.dcp_path dist_config.reshard_after_forward
        dist_config.offload_params dist_config.ep_size dist_config.ep_dispatcher
        optim_config.name optim_config.lr
        """
    )
)
PARTS = ("peft_config", "quant_config", "dist_config", "optim_config")
ENTRY_KEYS = ("path", "source", "converter", "split", "size", "weight", "streaming")
DEFAULT = f"{TOOL}'s default"
JOINED = "instruction and input are joined by a line break; there they are not"
TURNS = (
    "there each answer of a conversation is a sample of its own; here a conversation is one sample with all its answers"
)
DRAWN = "`size` and `weight` draw rows there, some of them twice; here each is taken once"


def translate(t: Translator) -> None:
    """Every key of a v1 file."""
    if t.has("peft_config.export_dir") and not t.has("train_dataset"):
        for key in t.values:
            if key in KEYS and key != "peft_config.export_dir":
                t.ignore(key, "not looked at, as `peft_config.export_dir` is refused")
        t.refuse("peft_config.export_dir", "this file merges an adapter: `manyhands export RUN --merge` does that")
        return
    for part in PARTS:
        if t.has(part):
            t.refuse(part, "write it as a mapping with a `name`")
        elif any(key.startswith(f"{part}.") for key in t.values) and not t.has(f"{part}.name"):
            t.refuse(f"{part}.name", f"it is missing: name what {part} is about")
    _map_model(t)
    _map_method(t)
    _map_data(t)
    _map_optimizer(t)
    _map_batch(t)
    _map_run(t)
    _map_sharding(t)
    for key in NO_EFFECT & t.values.keys():
        t.no_op(key)
    map_output(t, "output_dir")


def _map_model(t: Translator) -> None:
    t.map("model", "model.name")
    t.set_tool_default("model.name", "Qwen/Qwen3-4B-Instruct-2507", DEFAULT)
    t.map("custom_chat_template", "model.chat_template")
    if t.flag("trust_remote_code"):
        t.map("trust_remote_code", "model.trust_remote_code", True)
    t.no_op("trust_remote_code")
    t.only("model_class", ("llm", None), "only language models are trained: write llm")
    if t.flag("bf16", True):
        t.map("bf16", "model.dtype", "bfloat16")
        t.set_tool_default("model.dtype", "bfloat16", DEFAULT)
    else:
        t.map("bf16", "model.dtype", "float32")


def _map_method(t: Translator) -> None:
    kind, bits = t.get("peft_config.name"), _find_bits(t)
    if kind != "lora" and bits is not None:
        t.contradict("quant_config.name", "quantized weights are trained by lora only: write peft_config.name: lora")
    if kind is None:
        t.set_tool_default("method.name", "full", "without peft_config all weights are trained")
    elif kind == "lora":
        _map_lora(t, bits)
    elif kind == "freeze":
        t.map("peft_config.name", "method.name", "patterns")
        map_freeze(t, *(f"peft_config.freeze_{part}" for part in
                        ("trainable_layers", "trainable_modules", "extra_modules")))  # fmt: skip
        t.only("peft_config.cast_trainable_params_to_fp32", (True, None), "trained weights are float32: set it to true")
    else:
        t.refuse("peft_config.name", f"{show(kind)} is not available: write lora or freeze")
    for key in (LORA | {"peft_config.adapter_name_or_path"}) & t.values.keys() if kind != "lora" else ():
        t.refuse(key, f"peft_config.name is {kind}, which has no such key: remove it")
    for key in FREEZE & t.values.keys() if kind != "freeze" else ():
        t.refuse(key, f"peft_config.name is {kind}, which has no such key: remove it")
    t.no_op("peft_config.export_dir", "only a merge reads it")


def _map_lora(t: Translator, bits: int | None) -> None:
    t.map("peft_config.name", "method.name", "qlora" if bits == 4 else "lora")
    if t.has("peft_config.adapter_name_or_path"):
        adapters = split_names(t.get("peft_config.adapter_name_or_path"))
        t.map("peft_config.adapter_name_or_path", "method.adapter", adapters[0])
        if len(adapters) > 1:
            t.refuse("peft_config.adapter_name_or_path", "one adapter is trained on: merge the others first")
        for key in LORA & t.values.keys():
            t.no_op(key, "the adapter that is trained on has its own")
        return
    for key, native, default in (("r", "rank", 8), ("lora_alpha", "alpha", 16), ("lora_dropout", "dropout", 0.05)):
        number = t.number(f"peft_config.{key}")
        if number is not None:
            t.map(f"peft_config.{key}", f"method.{native}", number)
        t.set_tool_default(f"method.{native}", default, DEFAULT)
    asked = t.get("peft_config.target_modules", "all")
    targets = "all-linear" if asked == "all" else asked if isinstance(asked, list) else [asked]
    t.map("peft_config.target_modules", "method.target_modules", targets)
    t.set_tool_default("method.target_modules", "all-linear", DEFAULT)
    t.map("peft_config.modules_to_save", "method.modules_to_save")
    for key, native in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if t.flag(f"peft_config.{key}"):
            t.map(f"peft_config.{key}", f"method.{native}", True)
        t.no_op(f"peft_config.{key}")


def _find_bits(t: Translator) -> int | None:
    """Bits of the base weights; gives ``quant_config`` its outcomes."""
    kind, bits = t.get("quant_config.name"), t.integer("quant_config.quantization_bit")
    if kind == "bnb" and bits is None:
        bits = 4
    t.only("quant_config.name", ("bnb", "auto"), "weights are quantized by bitsandbytes: write bnb")
    t.only("quant_config.quantization_type", ("nf4",), "4-bit weights are NF4: write nf4")
    if not t.flag("quant_config.double_quantization", True) and bits == 4:
        t.map("quant_config.double_quantization", "method.double_quant", False)
    t.no_op("quant_config.double_quantization")
    if bits == 8:
        t.substitute("quant_config.quantization_bit", {}, "weights in 8 bits are not available: the base stays in 16")
    elif bits not in (None, 4):
        t.refuse("quant_config.quantization_bit", f"{bits} bits are not available: write 4")
    t.no_op("quant_config.quantization_bit")
    return bits


def _map_data(t: Translator) -> None:
    if not t.has("train_dataset"):
        t.refuse("train_dataset", "it is missing: write the YAML file that lists data sets")
        return
    asked = str(t.get("train_dataset"))
    found = find_file(t, asked)
    if found is None or found[0].suffix not in (".yaml", ".yml"):
        t.refuse("train_dataset", f"{asked} is no YAML file here that lists data sets: write one, with a path and a "
                 "converter (alpaca, sharegpt) for each")  # fmt: skip
    else:
        _map_sources(t, *found)
    t.ignore("eval_dataset", f"{TOOL} reads no validation data")
    t.set_tool_default("data.validation_fraction", 0, f"{TOOL} holds nothing out")
    t.map("cutoff_len", "data.max_length", t.count("cutoff_len", 2048))
    t.set_tool_default("data.max_length", 2048, DEFAULT)
    t.set_tool_default("data.too_long", "truncate", f"{TOOL} cuts the end off")
    t.set_tool_default(
        "data.chat_template_kwargs", {"enable_thinking": False}, "answers without thoughts are rendered so there"
    )


def _map_sources(t: Translator, path: Path, root: str) -> None:
    try:
        read = read_run_file(path)
    except UserError as error:
        t.refuse("train_dataset", f"{error.where or path}: {error.why or error.what}")
        return
    sources: list[dict[str, Any]] = []
    differences: list[str] = []
    for name, entry in read.mapping.items():
        place = f"{path}, line {read.lines.get(str(name), 1)}, `{name}`"
        found = _make_source(str(name), entry, root, differences)
        if isinstance(found, str):
            t.refuse("train_dataset", f"{place}: {found}")
            return
        sources.append(found)
    t.map("train_dataset", "data.train", sources, f"entries of {path}")
    if differences:
        t.substitute("train_dataset", {"data.train": sources}, "; ".join(dict.fromkeys(differences)))


def _make_source(name: str, entry: Any, root: str, differences: list[str]) -> dict[str, Any] | str:
    """A source in our keys, or why there is none."""
    if not isinstance(entry, Mapping) or not entry.get("path"):
        return f"got {show(entry)}, allowed: a mapping with a path"
    for key in entry:
        if key not in ENTRY_KEYS:
            near = nearest_name(str(key), ENTRY_KEYS)
            return f"unknown key `{key}`: " + (f"did you mean `{near}`?" if near else f"it has {', '.join(ENTRY_KEYS)}")
    converter = entry.get("converter")
    if converter == "pair":
        return "data of preferences (DPO) cannot be trained here"
    if converter not in ("alpaca", "sharegpt"):
        return f"converter: got {show(converter)}, allowed: alpaca, sharegpt (rows in its own form are not read)"
    if entry.get("streaming"):
        return "streaming: rows are read completely: set it to false"
    is_hub = entry.get("source", "hf_hub") == "hf_hub"
    where = f"hub:{entry['path']}" if is_hub else os.path.join(root, str(entry["path"]))
    source: dict[str, Any] = {"path": where, "name": name}
    source["format"] = str(converter)
    source["ignore"] = ["history", "weight"] if converter == "alpaca" else ["system", "weight"]
    differences.append(JOINED if converter == "alpaca" else TURNS)
    if entry.get("split", "train") != "train":
        source["split"] = str(entry["split"])
    for key, native in (("size", "max_samples"), ("weight", "weight")):
        if entry.get(key):
            source[native] = entry[key]
            differences.append(DRAWN)
    return source


def _map_optimizer(t: Translator) -> None:
    t.map("learning_rate", "optimizer.learning_rate", t.number("learning_rate"))
    t.set_tool_default("optimizer.learning_rate", 1e-4, DEFAULT)
    t.map("max_grad_norm", "optimizer.max_grad_norm", t.number("max_grad_norm"))
    if t.get("optim_config.name") is None:
        t.set_tool_default("optimizer.weight_decay", 0.01, "torch's AdamW's default")
    elif t.get("optim_config.name") == "muon":
        betas = t.get("optim_config.adamw_betas", [0.9, 0.95])
        t.map("optim_config.name", "optimizer.name", "muon")
        t.map("optim_config.wd", "optimizer.weight_decay", t.number("optim_config.wd"))
        t.map("optim_config.adamw_eps", "optimizer.eps", t.number("optim_config.adamw_eps"))
        if isinstance(betas, list) and len(betas) == 2:
            t.map("optim_config.adamw_betas", {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]})
            t.set_tool_default("optimizer.beta2", 0.95, DEFAULT)
        else:
            t.refuse("optim_config.adamw_betas", f"got {show(betas)}, allowed: two numbers")
        t.set_tool_default("optimizer.weight_decay", 0.1, DEFAULT)
        t.only("optim_config.momentum", (0.95,), "Muon's momentum is 0.95")
        t.only("optim_config.nesterov", (True,), "Muon's momentum is Nesterov's: set it to true")
        t.only("optim_config.ns_steps", (5,), "Muon takes 5 Newton-Schulz iterations")
    else:
        t.refuse("optim_config.name", f"{show(t.get('optim_config.name'))} is not available: write muon, or leave out "
                 "optim_config for AdamW")  # fmt: skip
    for key in MUON & t.values.keys():
        t.no_op(key)
    if t.has("optim_config.lr"):
        t.ignore("optim_config.lr", f"`learning_rate` takes precedence in {TOOL}")
    if t.get("peft_config.name") != "lora":
        t.set_tool_default("optimizer.decay_embeddings", True, f"{TOOL} decays every weight")
    t.only("lr_scheduler_config", (None,), "there is no schedule of that name: remove it; the rate is constant")
    t.set_tool_default("schedule.name", "constant", DEFAULT)
    t.set_tool_default("schedule.warmup_steps", 0, DEFAULT)


def _map_batch(t: Translator) -> None:
    """A step is ``global_batch_size`` samples, without it one micro-batch a GPU; or as many as a number of tokens."""
    micro = t.count("micro_batch_size", 1)
    total = t.count("global_batch_size", micro) if t.has("global_batch_size") else None
    for key in ("dp_size", "mp_shard_size"):
        if t.integer(key) is not None:
            t.set_gpus(t.count(key, 1) * (t.count("mp_replicate_size", 1) if key != "dp_size" else 1))
    gpus = t.num_gpus()
    strategy = str(t.get("batching_strategy", "normal"))
    if gpus is None:
        t.refuse("micro_batch_size", UNKNOWN_GPUS)
        return
    if total is not None and total % (micro * gpus):
        t.contradict(
            "global_batch_size",
            f"{total} is no multiple of {micro} per GPU × {count_of(gpus, 'GPU')} = {micro * gpus}",
        )
    size, why = total or micro * gpus, f"{micro} per GPU × {count_of(gpus, 'GPU')}"
    if strategy in ("normal", "padding_free"):
        native: dict[str, Any] = {"batch.samples": size}
        if strategy == "padding_free":
            t.map("batching_strategy", "data.packing", True)
        t.no_op("batching_strategy")
    elif strategy in ("dynamic_batching", "dynamic_padding_free"):
        native = {"batch.packs": size}
        t.substitute(
            "batching_strategy",
            {"data.packing": True},
            f"a step is what {size} packs of {t.integer('cutoff_len', 2048)} tokens hold, laid over all GPUs at once",
        )
        if strategy == "dynamic_batching" and not t.integer("max_steps"):
            t.contradict("batching_strategy", "it needs a number of steps: write max_steps")
    else:
        t.refuse("batching_strategy", f"got {show(strategy)}, allowed: normal, padding_free, dynamic_batching, "
                 "dynamic_padding_free")  # fmt: skip
        return
    for key in ("micro_batch_size", "global_batch_size"):
        t.map(key, native, why=why if total is None else "")
    for key, value in native.items():
        t.set_tool_default(key, value, f"{DEFAULT}: {why}")


def _map_run(t: Translator) -> None:
    steps = t.integer("max_steps")
    if steps is not None and steps > 0:
        t.map("max_steps", "stop.max_steps", steps)
        t.no_op("num_train_epochs", "`max_steps` takes precedence")
        t.set_tool_default("stop.epochs", 1_000_000, "`max_steps` alone ends the run")
    else:
        number = t.integer("num_train_epochs")
        t.map("num_train_epochs", "stop.epochs", number and t.count("num_train_epochs", 3))
        t.set_tool_default("stop.epochs", 3, DEFAULT)
    t.no_op("max_steps")
    t.map("seed", "seed", t.integer("seed"))
    t.set_tool_default("seed", 42, DEFAULT)
    t.map("logging_steps", "log.every_steps", t.count("logging_steps", 1))
    t.map("full_determinism", "kernels.deterministic", t.flag("full_determinism"))
    share = t.number("save_epochs")
    if share and share <= 1 and abs(1 / share - round(1 / share)) < 1e-6:
        t.map("save_epochs", "checkpoint.per_epoch", round(1 / share))
        t.no_op("save_steps", "`save_epochs` takes precedence")
    elif share:
        t.refuse("save_epochs", f"{share:g} is no even part of an epoch: write 1, 0.5, 0.25, ... or save_steps")
    else:
        t.map("save_steps", "checkpoint.every_steps", t.integer("save_steps"))
        t.set_tool_default("checkpoint.every_steps", 0, f"{TOOL} saves at the end")
    hf.map_limit(t)
    t.no_op("save_ckpt_as_hf", "any checkpoint can be exported")
    t.only("resume_from_checkpoint", (None, "auto"), "a run resumes from its own newest checkpoint: write auto")
    if t.flag("enable_activation_checkpointing", True):
        t.no_op("enable_activation_checkpointing", "the plan decides what is recomputed")
    else:
        t.map("enable_activation_checkpointing", "parallel.activation_checkpointing", "none")


def _map_sharding(t: Translator) -> None:
    kind, copies = t.get("dist_config.name"), t.integer("mp_replicate_size", 1) or 1
    if kind == "fsdp2" and copies > 1:
        t.map("dist_config.name", "parallel.strategy", "hsdp")
        if t.num_gpus():
            t.map("mp_replicate_size", "parallel.shard_degree", max(1, (t.num_gpus() or 1) // copies))
    elif kind == "fsdp2":
        t.map("dist_config.name", "parallel.strategy", "fsdp")
    elif kind == "deepspeed":
        if t.has("dist_config.config_file"):
            map_deepspeed(t, "dist_config.config_file")
            t.no_op("dist_config.name")
        else:
            t.refuse("dist_config.config_file", "it is missing: name DeepSpeed's JSON file, or write name: fsdp2")
    elif kind is not None:
        t.refuse("dist_config.name", f"{show(kind)} is not available: write fsdp2")
    if t.flag("dist_config.offload_params"):
        t.map("dist_config.offload_params", "parallel.offload", "all")
    t.map("dist_config.reshard_after_forward", "parallel.reshard_after_forward")
    t.only("dist_config.dcp_path", (None,), "weights are read from safetensors: set it to null")
    t.only("dist_config.ep_size", (1,), "experts are not distributed: set it to 1")
    t.only("cp_size", (1,), "sequences are not divided over GPUs: set it to 1")
    for key in ("dp_size", "mp_replicate_size", "mp_shard_size", "dist_config.offload_params",
                "dist_config.ep_dispatcher", "dist_config.config_file"):  # fmt: skip
        t.no_op(key)
