"""TRL's ``trl sft --config FILE``: the keys of SFTConfig, ModelConfig and ScriptArguments (TRL 1.15), and those of the
alignment handbook's recipes, which today's TRL would ignore (``torch_dtype``, ``max_seq_length``, ``chat_template``,
``dataset_mixture``): they are read as of their time.

What TRL trains depends on the columns of the data: the completion of prompt and completion, otherwise every token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyhands.config.text import names, show
from manyhands.importers import preferences, shared
from manyhands.importers import transformers as hf
from manyhands.importers.shared import (
    add_target_parameters,
    map_all_linear,
    map_dtype,
    map_router_loss,
    row_has_images,
    split_projector,
    takes_images,
)
from manyhands.importers.translation import Translator, split_output

TOOL = "TRL"
REFUSES_UNKNOWN = True
MARKS = names(
    "dataset_name dataset_mixture datasets use_peft assistant_only_loss completion_only_loss dataset_train_split "
    "dataset_text_field packing_strategy max_seq_length"
) | (preferences.KEYS & preferences.TRL)
OPEN = hf.OPEN | {"dataset_kwargs", "model_init_kwargs", "env"}
SO: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    "attn_implementation": (None, "the fastest attention kernel that passes a self-test is used"),
    "padding_free": (None, "no sample sees another's padding"),
    "pad_to_multiple_of": ((), "padding is not trained"),
    "eval_packing": (None, "evaluation measures the same samples, packed or not"),
    "pad_token": ((), "padding is not trained"),
    "lora_task_type": (("CAUSAL_LM",), "a language model is trained"),
    "bnb_4bit_quant_storage": ((), "how 4-bit weights are stored is the engine's"),
    "ignore_bias_buffers": (None, "no buffer is reduced"),
    "dataset_mixture.seed": ((), "`seed` is the one seed of a run"),
    "num_of_sequences": ((), "samples are packed into blocks of max_length"),
    "chars_per_token": ((), "tokens are counted"),
}
KEYS = (
    hf.KEYS
    | SO.keys()
    | preferences.TRL
    | names(
        "model_name_or_path model_revision model_init_kwargs use_peft lora_r lora_alpha lora_dropout "
        "lora_target_modules lora_target_parameters lora_modules_to_save use_rslora use_dora load_in_8bit load_in_4bit "
        "bnb_4bit_quant_type use_bnb_nested_quant dataset_name dataset_config dataset_train_split dataset_streaming "
        "streaming datasets test_split_size dataset_mixture dataset_mixture.datasets dataset_mixture.test_split_size "
        "dataset_text_field dataset_kwargs max_length max_seq_length truncation_mode shuffle_dataset packing "
        "packing_strategy completion_only_loss assistant_only_loss loss_type chat_template chat_template_path "
        "eos_token activation_offloading router_aux_loss_coef env dataset_test_split torch_dtype dtype num_processes "
        "trust_remote_code hub_model_revision"
    )
)
UNLIMITED = 1_000_000  # tokens of a sample
PLAIN = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
READ_IF_THERE = ("chat_template_kwargs", "tools", "weight")  # columns of conversations; a mixture's list is complete
FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")  # builders of `datasets` that read `data_files`
SOURCE_KEYS = {"id": "path", "path": "path", "config": "subset", "name": "subset", "split": "split", "weight": "weight"}


def translate(t: Translator) -> None:
    """Every key of a TRL file: of SFTConfig, or of one for preferences (``preferences.find_trl_kind``)."""
    kind = preferences.find_trl_kind(t)
    if not kind and preferences.refuse(t, preferences.TRL, _find_preferences(t)):
        return
    if t.has("num_processes"):
        t.set_gpus(t.count("num_processes", 1))
        t.map("num_processes", "parallel.gpus", t.num_gpus())
    _map_model(t)
    _map_data(t)
    _map_length(t)
    if kind:
        preferences.map_trl(t, kind)
        _map_plain_pairs(t)
    else:
        _map_loss(t)
    _map_method(t)
    if kind:
        preferences.leave_dropout_out(t)
    hf.map_bystanders(t)
    hf.map_optimizer(t)
    if not t.has("learning_rate"):
        t.set_tool_default("optimizer.learning_rate", 1e-6 if kind else 2e-5, "TRL's default")
    hf.map_schedule(t, default="linear")
    hf.map_length(t, epochs=3)
    hf.map_batch(t, per_device=8, packs=t.flag("packing"))
    hf.map_precision(t)
    computes = any(t.flag(key) for key in ("bf16", "fp16")) or any(t.has(key) for key in ("dtype", "torch_dtype"))
    if t.tool == TOOL and t.has("bf16") and not computes:
        t.map("bf16", "model.dtype", "float32", "without bf16 TRL computes in float32, the dtype of its weights")
    hf.map_intervals(t, save_steps=500, logging_steps=10)
    hf.map_sharding(t)
    t.map("activation_offloading", "parallel.offload_activations", t.flag("activation_offloading"))
    hf.note_so(t, SO)
    hf.map_uploads(t, "push_to_hub", names("hub_model_revision"))  # the handbook's name of hub_revision
    t.map("output_dir", split_output(t.get("output_dir")))


def _map_model(t: Translator) -> None:
    t.map("model_name_or_path", "model.name")
    hf.map_revision(t)
    for key in ("torch_dtype", "dtype"):
        asked = str(t.get(key, "auto")).removeprefix("torch.")
        if asked in ("bfloat16", "float32", "float16"):
            map_dtype(t, key, asked)
        elif asked != "auto":
            t.refuse(key, f"{show(asked)}: write bfloat16 or float32")
        t.no_op(key)
    t.map("chat_template", "model.chat_template")
    t.map("chat_template_path", "model.chat_template")
    t.map("eos_token", "model.special_tokens", {"eos": str(t.get("eos_token"))})
    t.only("model_init_kwargs", (None, {}), "not available: remove it")
    map_router_loss(t, "router_aux_loss_coef", t.number("router_aux_loss_coef"))
    _read_environment(t)


def _read_environment(t: Translator) -> None:
    """``env``: variables by which trackers name their projects are read, no other one."""
    given = t.get("env", {})
    readable = {variable for _, variable in shared.SINKS.values()}
    if isinstance(given, Mapping) and readable.issuperset(given):
        t.context = replace(t.context, variables={**t.context.variables, **{key: str(given[key]) for key in given}})
        t.no_op("env", "trackers read it")
    else:
        t.refuse("env", "set environment variables before the start: the run file has none")


def _map_data(t: Translator) -> None:
    listed = next((key for key in ("dataset_mixture.datasets", "datasets") if t.has(key)), None)
    t.only("dataset_mixture", (None, {}), "write its data sets below it, as dataset_mixture.datasets")
    if listed and not isinstance(t.get(listed), list):
        t.refuse(listed, f"got {show(t.get(listed))}, allowed: a list of data sets")
        return
    if listed and t.has("dataset_name"):
        t.contradict("dataset_name", f"and {t.place(listed)} name data: keep one of them")
        t.no_op(listed)
    elif listed:
        t.map(listed, "data.train", [_source(t, listed, number, one) for number, one in enumerate(t.get(listed))])
    elif t.has("dataset_name"):
        source = _locate(str(t.get("dataset_name")))
        for key, inner in (("dataset_config", "subset"), ("dataset_train_split", "split")):
            if t.has(key):
                source[inner] = str(t.get(key))
                t.no_op(key, "the source's")
        t.map("dataset_name", "data.train", [source])
        _map_test_split(t, source)
    t.no_op(("dataset_config", "dataset_train_split"))
    t.no_op("dataset_test_split", "without `eval_strategy` nothing is evaluated")
    for key in ("streaming", "dataset_streaming"):
        if t.flag(key):
            t.substitute(key, {}, "the data are fetched completely before training")
        t.no_op(key)
    t.only("shuffle_dataset", (False, True, None), "write true or false")
    options = t.get("dataset_kwargs") or {}
    if isinstance(options, Mapping):
        options = {k: v for k, v in options.items() if v and k != "skip_prepare_dataset"}
    t.only("dataset_kwargs", (t.get("dataset_kwargs"),) if not options else (), f"{show(options)}: the chat template "
           "alone decides which special tokens a sample has: remove it")  # fmt: skip
    _map_held_out(t)


def _find_preferences(t: Translator) -> str:
    """The key that names data with columns for preferences or rewards; empty if none does."""
    for key in ("dataset_mixture.datasets", "datasets"):
        for entry in t.get(key) if isinstance(t.get(key), list) else ():
            columns = entry.get("columns") if isinstance(entry, Mapping) else None
            if isinstance(columns, list) and preferences.are_columns([str(one) for one in columns], listed=True):
                return key
    look = t.context.first_row if t.has("dataset_name") else None
    row = look(_locate(str(t.get("dataset_name")))["path"]) if look else None
    return "dataset_name" if row is not None and preferences.are_columns(tuple(row), listed=False) else ""


def _evaluates(t: Translator) -> bool:
    asked = t.get("eval_strategy", t.get("evaluation_strategy", "no"))
    return str(asked).lower() not in ("no", "false")


def _map_test_split(t: Translator, source: Mapping[str, Any]) -> None:
    """TRL evaluates the split ``dataset_test_split``, which is `test` unless the file names another."""
    if not _evaluates(t) or t.tool != TOOL or t.has("test_split_size") or _is_file(str(source["path"])):
        return
    held_out = [dict(source) | {"split": str(t.get("dataset_test_split", "test"))}]
    t.map("dataset_test_split", "data.validation", held_out)
    t.set_tool_default(
        "data.validation", held_out, "TRL evaluates the split `test` unless dataset_test_split names another"
    )


def _source(t: Translator, listed: str, number: int, entry: Any) -> dict[str, Any]:
    """One entry of a mixture as a source; its keys are checked here, as lists have one outcome."""
    place = f"{listed}[{number}]"
    if not isinstance(entry, Mapping):
        t.refuse(listed, f"`{place}`: got {show(entry)}, allowed: a mapping with `path`")
        return {}
    source: dict[str, Any] = {}
    if entry.get("path") in FILE_KINDS and isinstance(entry.get("data_files"), str):
        entry = {key: value for key, value in entry.items() if key != "data_files"} | {"path": entry["data_files"]}
    for key, value in entry.items():
        if key in SOURCE_KEYS and value is not None:
            source |= _locate(str(value)) if SOURCE_KEYS[key] == "path" else {SOURCE_KEYS[key]: value}
        elif key == "columns" and value:
            unread = [name for name in READ_IF_THERE if name not in value]
            source |= {"ignore": unread} if unread else {}
        elif value is not None:
            t.refuse(listed, f"`{place}.{key}` is not available; an entry has {', '.join(SOURCE_KEYS)}")
    if source.get("subset") == "default":
        del source["subset"]
    if source.get("weight", 1) != 1:
        source["weight"] = float(source["weight"])  # another part in each epoch, where the handbook has a fixed one
    return source


def _is_file(name: str) -> bool:
    return name.rpartition(".")[2] in ("json", "jsonl", "csv", "parquet")


def _locate(name: str) -> dict[str, Any]:
    is_local = name.startswith((".", "/", "~")) or _is_file(name)
    return {"path": name if is_local else f"hub:{name}"}


def _map_held_out(t: Translator) -> None:
    for key in ("test_split_size", "dataset_mixture.test_split_size"):
        if not hf.map_held_out(t, key, least_rows=1):
            t.only(key, (None,), "datasets itself refuses it: write a share below 1, or a number of rows")
    held_out = {"validation", "validation_fraction"} & t.mapping.get("data", {}).keys()
    if _evaluates(t) and not held_out:
        key = "eval_strategy" if t.has("eval_strategy") else "evaluation_strategy"
        t.contradict(key, "it evaluates, and there is no validation data: write test_split_size, or a data set with "
                     "the split that dataset_test_split names")  # fmt: skip
    t.set_tool_default("data.validation_fraction", 0, "TRL holds nothing out")


def _map_length(t: Translator) -> None:
    for key in ("max_length", "max_seq_length"):
        t.map(key, "data.max_length", t.count(key, 1024))
    if t.is_null("max_length"):
        t.set_tool_default("data.max_length", UNLIMITED, "`max_length: null`: TRL cuts nothing")
    else:
        t.set_tool_default("data.max_length", 1024, "TRL's default")
    t.set_tool_default("data.too_long", "truncate", "TRL cuts the end off")
    t.only("truncation_mode", ("keep_start", None), "the start of a sample is kept: write keep_start")
    t.only("packing_strategy", ("bfd", "ffd", None) if t.flag("packing") else (t.get("packing_strategy"),),
           "joins or cuts samples that would then see each other: write bfd")  # fmt: skip
    if t.flag("packing"):
        t.map("packing", {}, why="a step is counted in packs of max_length tokens")
    else:
        t.no_op("packing", "packed or not, a step has the same samples")


def _map_loss(t: Translator) -> None:
    """Loss tokens. Text has them all in any case (``task: mixed``)."""
    t.only("loss_type", ("nll", "chunked_nll", None), "only the mean over loss tokens is available: write nll")
    t.set_tool_default("task", "mixed", "TRL takes text, conversations, and prompt with completion")
    if t.has("dataset_text_field") and t.get("dataset_text_field") != "text":
        t.map("dataset_text_field", {"data.format": "text", "data.fields": {"text": t.get("dataset_text_field")}})
    t.no_op("dataset_text_field")
    if t.flag("assistant_only_loss"):
        t.map("assistant_only_loss", "data.train_on", "assistant")
    elif t.has("completion_only_loss"):
        t.map("completion_only_loss", "data.train_on", "assistant" if t.flag("completion_only_loss") else "all")
    else:
        _map_loss_by_columns(t)
    t.no_op(("assistant_only_loss", "completion_only_loss"))


def _map_plain_pairs(t: Translator) -> None:
    """TRL joins prompt and answer as they are where both are text, whatever chat template there is."""
    row = t.first_row() or {}
    if isinstance(row.get("prompt"), str) and isinstance(row.get("chosen", row.get("completion")), str):
        t.set_tool_default("model.chat_template", PLAIN, "TRL joins prompt and answer as they are where both are text")
        for key in ("chat_template", "chat_template_path"):
            if t.has(key):
                t.refuse(key, "TRL does not use it for prompts and answers that are text: remove it")


def _map_loss_by_columns(t: Translator) -> None:
    row = t.first_row() or dict.fromkeys(_listed_columns(t))
    pairs = {"prompt", "completion"} <= set(row)
    if pairs and isinstance(row["prompt"], str) and not (t.has("chat_template") or t.has("chat_template_path")):
        t.set_tool_default(
            "model.chat_template", PLAIN, "TRL joins prompt and completion as they are where both are text"
        )
    why = "TRL trains the completion of each prompt" if pairs else "TRL trains all tokens of messages and text"
    t.set_tool_default("data.train_on", "assistant" if pairs else "all", why)
    if not row:
        source = next((key for key in ("dataset_name", "datasets", "dataset_mixture.datasets") if t.has(key)), "")
        t.substitute(source, {}, "its columns decide what TRL trains and cannot be read here: all tokens are trained; "
                     "for prompts with completions set completion_only_loss: true")  # fmt: skip


def _listed_columns(t: Translator) -> list[str]:
    """Columns that a mixture names."""
    entries = t.get("dataset_mixture.datasets") or t.get("datasets")
    entries = entries if isinstance(entries, list) else []
    return [name for entry in entries if isinstance(entry, Mapping) for name in entry.get("columns") or ()]


def _map_method(t: Translator) -> None:
    four, eight = t.flag("load_in_4bit"), t.flag("load_in_8bit")
    if not t.flag("use_peft"):
        t.set_tool_default("method.name", "full", "without `use_peft` all weights are trained")
        if four or eight:
            t.contradict("load_in_4bit" if four else "load_in_8bit", "quantized weights train adapters: add use_peft")
        for key in t.values.keys() & names("lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters "
                                           "lora_modules_to_save use_rslora use_dora"):  # fmt: skip
            t.ignore(key, "without `use_peft` TRL trains no adapter")
    else:
        t.map("use_peft", "method.name", "qlora" if four else "lora")
        _map_adapter(t)
    _map_parts(t)
    t.no_op("use_peft")
    if eight:
        t.substitute("load_in_8bit", {}, "there is no 8-bit base: its weights stay in 16 bits")
    if four and not t.flag("use_bnb_nested_quant"):
        t.set_tool_default("method.double_quant", False, "TRL's default")
    t.only("bnb_4bit_quant_type", ("nf4", None) if four else (t.get("bnb_4bit_quant_type"),), "4-bit weights are NF4")
    t.no_op(("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"))


def _map_adapter(t: Translator) -> None:
    defaults: tuple[tuple[str, Any], ...] = (("rank", 16), ("alpha", 32), ("dropout", 0.05))
    for key, default in defaults:
        name = "lora_r" if key == "rank" else f"lora_{key}"
        t.map(name, f"method.{key}", t.count(name, default) if key == "rank" else t.number(name))
        t.set_tool_default(f"method.{key}", default, "TRL's default")
    targets = t.get("lora_target_modules")
    if targets is None:
        t.set_tool_default("method.target_modules", "peft-default", "TRL leaves the choice to PEFT")
    elif targets in ("all-linear", ["all-linear"]):
        map_all_linear(t, "lora_target_modules")
    else:
        t.map("lora_target_modules", "method.target_modules", targets if isinstance(targets, list) else [targets])
    add_target_parameters(t, "lora_target_parameters")
    if t.has("lora_modules_to_save"):
        t.map("lora_modules_to_save", "method.modules_to_save", split_projector(_saved_modules(t))[0] or None)
        if not _saved_modules(t):
            t.no_op("lora_modules_to_save", "an empty list: adapters alone are trained")
    for key, native in (("use_rslora", "rslora"), ("use_dora", "dora")):
        t.switch(key, f"method.{native}")


def _saved_modules(t: Translator) -> list[Any]:
    saved = t.get("lora_modules_to_save", [])
    return saved if isinstance(saved, list) else [saved]


def _map_parts(t: Translator) -> None:
    """Of a model of images whose rows have some: everything is trained, or adapters and what is saved beside them."""
    look, projector = t.context.model_config, split_projector(_saved_modules(t))[1] and t.flag("use_peft")
    is_multimodal = look is not None and takes_images(look(str(t.get("model_name_or_path"))))
    row = t.first_row() if is_multimodal else None
    if row is None or not row_has_images(row):
        if projector:
            t.map("lora_modules_to_save", "method.parts", {"projector": "trained"})
        return
    if not t.flag("use_peft"):
        parts = {"vision": "trained", "projector": "trained", "language": "full"}
        t.set_tool_default("method.parts", parts, "without `use_peft` TRL trains tower and projector too")
        return
    parts = {"vision": "frozen", "projector": "trained" if projector else "frozen"}
    t.map("lora_modules_to_save", "method.parts", parts if projector else None)
    t.set_tool_default("method.parts", parts, "adapters alone are trained")
    targets = t.get("lora_target_modules")
    if targets and not (isinstance(targets, str) and targets != "all-linear"):
        why = "adapters are for the language model alone; in TRL the tower's modules of these names have them too"
        t.substitute("lora_target_modules", {}, why)
