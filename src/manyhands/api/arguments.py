"""``TrainingArguments``, and what the parameters of the trainer mean as keys of a run.

The parameters are those of Unsloth's ``FastLanguageModel`` and of TRL's and transformers' training arguments, so they
are translated as a file of TRL is, with the same outcomes: mapped, already so, substituted (said at the start), or
refused by name. Imports no torch.
"""

import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

from manyhands.api.runs import read_keys
from manyhands.config.patterns import REGEX
from manyhands.config.read import ParsedFile
from manyhands.config.text import names, nearest_name, show
from manyhands.core.errors import UserError
from manyhands.facts.host import read_host_facts
from manyhands.importers import preferences, trl
from manyhands.importers import transformers as hf
from manyhands.importers.load import LoadedRun
from manyhands.importers.recognize import replace_conflicting
from manyhands.importers.translation import ImportContext, Translation, Translator

WHERE = "the trainer's arguments"
OWN = names("enable_distributed_training distributed_backend overwrite")
SFT = names(
    "max_length max_seq_length packing packing_strategy completion_only_loss assistant_only_loss dataset_text_field "
    "dataset_kwargs dataset_num_proc eos_token pad_token activation_offloading shuffle_dataset loss_type padding_free "
    "eval_packing pad_to_multiple_of chat_template_path model_init_kwargs"
)
ARGUMENTS = frozenset(key for key in hf.KEYS if "." not in key) | SFT | OWN
# Of FastLanguageModel, by the name that TRL has for it.
RENAMED = {
    "model_name_or_path": "model_name",
    "model_revision": "revision",
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "dataset_name": "train_dataset",
}
ADAPTER = names(
    "r target_modules lora_alpha lora_dropout bias layers_to_transform layers_pattern use_gradient_checkpointing "
    "random_state use_rslora use_dora modules_to_save init_lora_weights loftq_config"
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
UNSLOTH_ADAPTER = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": list(PROJECTIONS)}
MODEL = names("model_name revision dtype load_in_4bit load_in_8bit full_finetuning device_map trust_remote_code")
KEYS = (
    trl.KEYS
    | ARGUMENTS
    | ADAPTER
    | MODEL
    | names("eval_dataset train_dataset new_tokens adapter finetune_vision_layers")
)
OPEN = trl.OPEN | {"device_map", "loftq_config"}
# Of from_pretrained in TRL's model_init_kwargs, by the names that these have here; the others have the same.
MODEL_INIT = {"torch_dtype": "dtype", "pretrained_model_name_or_path": "model_name"}
QUANTIZATION = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}  # of transformers' BitsAndBytesConfig
DEFAULTS = names(
    "learning_rate num_train_epochs per_device_train_batch_size lr_scheduler_type logging_steps save_steps seed"
)
NAME_OR_PATTERN = re.compile(rf"{REGEX}|\*?[\w.]+$")
SHARDING = "parallel.strategy fsdp shards the model over all GPUs where it does not fit on one"


class TrainingArguments:
    """Arguments of a training run, by the names of transformers' ``TrainingArguments`` and TRL's ``SFTConfig``.

    ``per_device_train_batch_size`` counts one GPU: a step has that times the GPUs times ``gradient_accumulation_steps``
    samples. What is not given has TRL's default (learning rate 2e-5, linear, 3 epochs, 8 samples a GPU). Arguments can
    be set later; one that does not exist is a ``UserError`` that names the nearest.
    """

    given: dict[str, Any]

    def __init__(self, output_dir: str = "trainer_output", **arguments: Any) -> None:
        object.__setattr__(self, "given", {})
        for name, value in {"output_dir": output_dir, **arguments}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ARGUMENTS:
            near = nearest_name(name, sorted(ARGUMENTS))
            raise UserError(
                f"there is no training argument {name!r}",
                where="TrainingArguments",
                why=preferences.NOT_HERE if name in preferences.TRL else "",
                fix=f"did you mean {near}?" if near else "see the training arguments of transformers and TRL",
            )
        self.given[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in ARGUMENTS:  # not given: decided by the translation, or by the plan
            return self.given.get(name)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"TrainingArguments({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments that differ from their default, by name: ours, a dict, or an object of transformers or TRL."""
    if arguments is None:
        return TrainingArguments().given
    if isinstance(arguments, TrainingArguments):
        return dict(arguments.given)
    if isinstance(arguments, Mapping):
        return TrainingArguments(**arguments).given
    if is_dataclass(arguments) and hasattr(arguments, "to_dict") and hasattr(arguments, "output_dir"):
        kind: Any = type(arguments)
        given, default = arguments.to_dict(), kind(output_dir=arguments.output_dir).to_dict()
        if own := sorted(given.keys() & preferences.TRL):
            raise UserError(
                f"the arguments are a {kind.__name__}, which has {own[0]}",
                why=preferences.NOT_HERE,
                fix="give manyhands.TrainingArguments(...), or those of transformers or TRL's SFTConfig",
            )
        # its own defaults where the translation has TRL's
        changed = {name: value for name, value in given.items() if value != default[name] or name in DEFAULTS}
        return TrainingArguments(**{"output_dir": arguments.output_dir, **changed}).given
    raise UserError(
        f"the arguments are a {type(arguments).__name__}",
        fix="give manyhands.TrainingArguments(...), or those of transformers or TRL",
    )


def read_model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``model_init_kwargs`` by the names of ``FastLanguageModel``, a ``quantization_config`` in them too."""
    if not isinstance(options, Mapping):
        raise UserError(f"model_init_kwargs is a {type(options).__name__}", fix="give a dict")
    found = {MODEL_INIT.get(name, name): value for name, value in options.items() if name != "quantization_config"}
    return found | read_quantization(options.get("quantization_config"))


def read_quantization(config: Any) -> dict[str, Any]:
    """transformers' ``BitsAndBytesConfig``. UserError for another one."""
    if config is None:
        return {}
    if type(config).__name__ != "BitsAndBytesConfig":
        raise UserError(
            f"quantization_config is a {type(config).__name__}",
            fix="leave it out: load_in_4bit=True trains an adapter beside NF4 weights, and a model that is stored "
            "quantized is read as it is",
        )
    return {ours: getattr(config, name) for name, ours in QUANTIZATION.items() if getattr(config, name, False)}


def as_file(given: Mapping[str, Any]) -> ParsedFile:
    """The parameters of model, adapter and training as the keys of a file."""
    keys = {name: _as_json(value) for name, value in given.items()}
    asked = keys.get("target_modules")
    if isinstance(asked, str) and asked != "all-linear" and not NAME_OR_PATTERN.match(asked):
        keys["target_modules"] = [f"{REGEX}{asked}"]  # PEFT reads a text as a regular expression for the full name
    return ParsedFile(keys, WHERE, text=json.dumps(keys, indent=2) + "\n")


def load_given(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> LoadedRun:
    """The run that parameters by the names of ``FastLanguageModel``, ``SFTConfig`` and ``TrainingArguments`` mean;
    those that are None are left out. Raises ``UserError``.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("dataset_text_field") == "":  # as Unsloth has it for rows of messages
        del given["dataset_text_field"]
    if given.get("load_in_4bit") and "r" not in given:
        given |= UNSLOTH_ADAPTER
    given = {"use_bnb_nested_quant": True, **given, "use_peft": "r" in given}
    num_gpus = len(read_host_facts().gpus)
    return read_keys(as_file(given), overrides, read=partial(translate, num_gpus=num_gpus))


def translate(source: ParsedFile, context: ImportContext, num_gpus: int) -> Translation:
    """The run that the parameters mean, on a machine with so many GPUs. UserError names all that is refused."""
    t = Translator(source, context, tool="the trainer", known=KEYS, open=OPEN)
    t.aliases = {**RENAMED, **dict.fromkeys(_translate_own(t, num_gpus), "-")}
    trl.translate(t)
    replace_conflicting(t)
    translation = t.finish(refuse_unknown=True)
    found = translation.findings()
    if found:
        raise UserError(
            f"the trainer's arguments cannot be run as they are, for {len(found)} reason{'s' * (len(found) > 1)}",
            where="FastLanguageModel, TrainingArguments",
            details=found[:20],
            fix="change or remove these arguments",
        )
    return replace(translation, tool="the trainer", where="arguments.json")


def _translate_own(t: Translator, num_gpus: int) -> Iterator[str]:
    """Records outcomes of parameters that TRL lacks or gives another meaning; yields names to hide from TRL's table."""
    _map_processes(t, num_gpus)
    why = "every trained weight gets a gradient in each step: set it to false"
    t.only("ddp_find_unused_parameters", (False, None), why)
    t.only("ddp_broadcast_buffers", (False, None), "no buffer changes in training: set it to false")
    pinned = (True, None) if num_gpus else (True, False, None)
    t.only("dataloader_pin_memory", pinned, "batches reach a GPU from pinned memory: set it to true")
    yield from _map_memory(t)
    yield from _map_adapter(t)
    _map_method(t)
    t.no_op("overwrite", "of the folder")
    t.map("eval_dataset", "data.validation")
    t.map("new_tokens", "model.new_tokens")
    t.map("adapter", "method.adapter")


def _map_processes(t: Translator, num_gpus: int) -> None:
    if t.has("enable_distributed_training") and not t.flag("enable_distributed_training"):
        t.map("enable_distributed_training", "parallel.gpus", 1)
        t.context = replace(t.context, gpus=1)
    t.no_op("enable_distributed_training", "every GPU has a process")
    backend = t.get("distributed_backend")
    if backend == "nccl" and not num_gpus:
        t.ignore("distributed_backend", "there is no GPU here, and processes on a CPU use gloo")
    elif backend == "gloo" and num_gpus:
        t.refuse("distributed_backend", "gloo is for CPUs, and GPUs use nccl: write nccl, or remove it")
    else:
        t.only("distributed_backend", ("nccl", "gloo", None), "write nccl for GPUs, gloo for CPUs")
    split = t.get("device_map")
    places = set(split.values()) if isinstance(split, Mapping) else {split}
    if split in (None, "auto"):
        t.no_op("device_map", f"each rank has its GPU; {SHARDING}")
    elif isinstance(split, Mapping) and len(places) == 1:
        t.no_op("device_map", "all on one GPU, which is each rank's own")
    elif num_gpus <= 1 and not isinstance(split, Mapping):
        t.no_op("device_map", "there is nothing to split over")
    else:
        t.refuse(
            "device_map",
            f"{show(split)} splits the layers over GPUs that one process uses in turn, so that all but one wait: "
            f"write auto, with which each GPU has a process, and {SHARDING}; for answers such a map can be used",
        )


def _map_memory(t: Translator) -> Iterator[str]:
    """Recomputation of activations, which two parameters ask for."""
    for key in ("gradient_checkpointing", "use_gradient_checkpointing"):
        if t.get(key) == "unsloth":
            t.no_op(key, "the plan recomputes as many blocks as memory requires")
        elif t.has(key):
            asked = "full" if t.flag(key) else "none"
            t.map(key, "parallel.activation_checkpointing", asked)
        yield key


def _map_adapter(t: Translator) -> Iterator[str]:
    t.only("bias", ("none", None), "biases are not trained beside an adapter: write none")
    for key in ("layers_to_transform", "layers_pattern"):
        t.only(key, (None,), "name the layers in target_modules: `re:.*layers\\.(30|31)\\..*_proj`")
    if str(t.get("init_lora_weights")).lower() == "loftq":
        t.map("init_lora_weights", "method.init", "loftq")
    else:
        t.only("init_lora_weights", (True, None), "B begins at zero, or write loftq")
    t.only("loftq_config", (None, {}), "init_lora_weights: loftq needs no further options")
    if t.flag("finetune_vision_layers"):
        t.substitute("finetune_vision_layers", {}, "adapters are for the language model alone: the vision tower stays "
                     "frozen; overrides={'method.parts': {'vision': 'trained'}} trains its own weights")  # fmt: skip
    t.no_op("finetune_vision_layers")
    if t.has("random_state") and t.has("seed") and t.get("seed") != t.get("random_state"):
        t.ignore("random_state", "`seed` is the one seed of weights, order and dropout")
    elif t.has("random_state"):
        t.map("random_state", "seed", t.integer("random_state"))
        yield "seed"


def _map_method(t: Translator) -> None:
    if t.flag("full_finetuning"):
        if any(t.has(key) for key in ADAPTER - {"use_gradient_checkpointing", "random_state"}):
            t.contradict("full_finetuning", "all weights would be trained, and there is an adapter: keep one of them")
        t.no_op("full_finetuning", "all weights are trained")
    t.no_op("full_finetuning")


def _as_json(value: Any) -> Any:
    """Values as a file has them: dtypes and enumerations by name."""
    if isinstance(value, enum.Enum):
        return _as_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")
