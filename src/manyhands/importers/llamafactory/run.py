"""LLaMA-Factory's flat YAML and JSON files (``llamafactory-cli train FILE``): supervised fine-tuning and continued
pre-training.

The keys are those of its argument classes (hparams/) and of transformers' TrainingArguments. What it does and we do not
do alike, in every run, is listed in docs/coming-from.md.
"""

import os
import re
from pathlib import Path

from manyhands.config.text import nearest_name, show
from manyhands.importers import preferences, shared
from manyhands.importers import transformers as hf
from manyhands.importers.llamafactory import keys
from manyhands.importers.llamafactory.data import DatasetInfo, Sources, Wanted, make_sources, read_info, split_names
from manyhands.importers.llamafactory.templates import CHAT_FORMATS, OTHER_FORMATS, make_chat_template
from manyhands.importers.shared import (
    PROJECTOR_IS_KEPT,
    TOWER_ADAPTERS,
    map_all_linear,
    map_router_loss,
    split_projector,
)
from manyhands.importers.translation import Translator, split_output

TOOL = keys.TOOL
REFUSES_UNKNOWN = True
MARKS = keys.MARKS
OPEN = hf.OPEN | keys.OPEN
KEYS = hf.KEYS | keys.ALL
STAGES = {"rm": preferences.REWARD, "ppo": preferences.ONLINE}
JOINED = "LLaMA-Factory joins documents into one sequence in which they see each other; here they are packed and do not"
CUT = "LLaMA-Factory cuts question and answer in proportion; here the end of the sample is cut off"
# Its bounds of an image's pixels, which hold where nothing is written, by our keys.
PIXELS = {
    "image_max_pixels": ("data.shrink_images_above", 768 * 768),
    "image_min_pixels": ("data.enlarge_images_below", 32 * 32),
}
CROPS = {
    "image_do_pan_and_scan": "images are not cut into crops (pan and scan) beside themselves: set it to false",
    "crop_to_patches": "the model's own preprocessor_config.json says whether images are cut into tiles: write it "
    "there, and set this to false",
}


def translate(t: Translator) -> None:
    """Every key of a LLaMA-Factory file."""
    if _refuse_other_tasks(t):
        return
    if not t.has("stage") and preferences.refuse(t, preferences.KEYS):
        return  # sft by default, which nobody who wrote such a key can mean
    stage = str(t.get("stage", "sft"))
    is_text = stage == "pt"
    if is_text:
        t.map("stage", "task", "cpt")
    _map_preferences(t, stage)
    t.no_op("stage")
    _map_model(t)
    _map_method(t)
    if stage in ("dpo", "kto"):
        preferences.leave_dropout_out(t)
    sources = _map_data(t, is_text)
    packs = _map_samples(t, is_text)
    _map_template(t, is_text, sources)
    _map_training(t, packs)
    _refuse_features(t)
    _note_bystanders(t)
    t.map("output_dir", split_output(t.get("output_dir")))


def _refuse_other_tasks(t: Translator) -> bool:
    """One refusal for a file that does something else than to train a text model; its other keys are left alone."""
    stage = str(t.get("stage", "sft"))
    if t.has("export_dir"):
        key = "export_dir"
        why = "this file merges and exports a model: `manyhands export RUN --merge` does that of a run"
    elif stage in STAGES:
        key, why = "stage", STAGES[stage]
    elif stage not in ("sft", "pt", "dpo", "kto"):
        key, why = "stage", f"got {show(stage)}, allowed: sft, pt, dpo, kto"
    elif not t.flag("do_train"):
        named = next((key for key in ("do_predict", "do_eval", "infer_backend") if t.has(key)), "do_train")
        key, why = named, "this file trains nothing: write do_train: true (`manyhands generate RUN` answers prompts)"
    elif t.flag("predict_with_generate") and t.flag("do_predict"):
        key, why = "do_predict", "predictions are not part of training: remove it"
    else:
        return False
    for other in t.values:
        if other != key and other in KEYS:
            t.ignore(other, f"not looked at, as `{key}` is refused")
    t.refuse(key, why)
    return True


OF_STAGE = {
    "dpo": ("pref_beta", "pref_ftx", "pref_loss", "dpo_label_smoothing", "simpo_gamma"),
    "kto": ("pref_beta", "kto_chosen_weight", "kto_rejected_weight"),
}
BESIDE = ("pref_bco_weight", "ld_alpha", "ref_model", "ref_model_adapters", "ref_model_quantization_bit")


def _map_preferences(t: Translator, stage: str) -> None:
    """``stage: dpo`` and ``kto``: the loss."""
    if stage not in OF_STAGE:
        return
    loss = str(t.get("pref_loss", "sigmoid"))
    t.map("pref_beta", "preference.beta", t.number("pref_beta"))
    if stage == "kto":
        t.map("stage", "task", "kto", why=preferences.MEAN)
        t.map("kto_chosen_weight", "preference.desirable_weight", t.number("kto_chosen_weight"))
        t.map("kto_rejected_weight", "preference.undesirable_weight", t.number("kto_rejected_weight"))
        t.only("pref_ftx", (0, 0.0, None), "KTO has no cross-entropy beside it here: set it to 0")
    elif loss not in ("sigmoid", "hinge", "ipo", "orpo", "simpo"):
        t.refuse("pref_loss", f"{show(loss)} is not available: write sigmoid, hinge, ipo, orpo or simpo")
    else:
        t.map("stage", "task", "preference", why=preferences.MEAN)
        t.set_tool_default("preference.loss", loss, f"{TOOL}'s default")
        if loss == "orpo":
            why = preferences.TOKEN_MEAN.format(tool=TOOL, other="a mean of the answers' means")
            t.substitute("pref_loss", {"preference.loss": loss}, why)
        else:
            t.map("pref_loss", "preference.loss", loss)
            preferences.map_sft_weight(t, "pref_ftx", 0.0, "a mean of the answers' means")
        if loss == "sigmoid":
            t.map("dpo_label_smoothing", "preference.label_smoothing", t.number("dpo_label_smoothing"))
        if loss == "simpo":
            t.map("simpo_gamma", "preference.margin", t.number("simpo_gamma"))
    for key in BESIDE[:2]:
        t.only(key, (None, 0, 0.0), "this part of the loss is not available: remove it")
    for key in BESIDE[2:]:
        if t.has(key) and t.get(key) == t.get("model_name_or_path"):
            t.no_op(key, "the reference is the model before training")
        elif t.has(key):
            t.refuse(key, "the reference is the model before training: remove it")
    for key in ("packing", "neat_packing"):
        t.only(key, (None, False), f"{TOOL} packs no preferences: remove it")


def _map_data(t: Translator, is_text: bool) -> Sources | None:
    """``dataset`` and ``eval_dataset``; what is held out."""
    if not t.has("dataset"):
        t.refuse("dataset", "it is missing: write names of dataset_info.json")
        return None
    limit = t.count("max_samples", 1) if t.has("max_samples") else None
    info = read_info(t)
    wanted = Wanted(is_text, limit, str(t.get("stage", "sft")))
    sources = make_sources(t, "dataset", info, wanted) if info else None
    _map_images(t, info, sources is not None and sources.has_images)
    if sources and info:
        _map_sources(t, "dataset", "data.train", sources, info.where)
        t.no_op("dataset_dir", info.where)
    elif info is None and t.has("dataset_dir"):
        t.no_op("dataset", "not looked at, as `dataset_dir` is refused")
    t.no_op("dataset_dir")
    if t.has("max_samples") and limit is not None:
        t.map("max_samples", {}, why=f"the first {limit:,} rows of each data set")
    if t.has("eval_dataset"):
        held_out = make_sources(t, "eval_dataset", info, wanted) if info else None
        if held_out and info:
            _map_sources(t, "eval_dataset", "data.validation", held_out, info.where)
        t.no_op("eval_dataset")
    _map_held_out(t)
    if t.flag("eval_on_each_dataset"):
        t.ignore("eval_on_each_dataset", "validation data sets are measured together")
    t.no_op("eval_on_each_dataset")
    for key, fix in (("streaming", "rows are read completely: set it to false"),
                     ("interleave_probs", "data sets are joined and shuffled: remove it")):  # fmt: skip
        t.only(key, (None, False), fix)
    t.only("mix_strategy", ("concat", None), "data sets are joined and shuffled: write concat")
    return sources


def _map_sources(t: Translator, key: str, native: str, sources: Sources, where: str) -> None:
    t.map(key, native, sources.items, f"entries of {where}")
    if sources.differences:
        t.substitute(key, {native: sources.items}, "; ".join(dict.fromkeys(sources.differences)))


def _map_held_out(t: Translator) -> None:
    size = t.number("val_size", 0) or 0
    if size and t.has("eval_dataset"):
        t.contradict("val_size", f"{t.place('eval_dataset')} names validation data already: remove one")
    elif not hf.map_held_out(t, "val_size", least_rows=2):
        t.no_op("val_size", "nothing is held out" if size else "")
        t.set_tool_default("data.validation_fraction", 0, f"{TOOL} holds nothing out")
    if size <= 0 and not t.has("eval_dataset"):
        for key in ("eval_strategy", "evaluation_strategy", "do_eval"):
            if str(t.get(key, "no")).lower() not in ("no", "false"):
                t.contradict(key, "it evaluates, and there is no validation data: write val_size or eval_dataset")


def _map_samples(t: Translator, is_text: bool) -> bool:
    """Length, packing, what is trained of a conversation. True where a batch counts packs."""
    joined = t.flag("packing", is_text) or t.flag("neat_packing")
    given = t.flag("packing") or t.flag("neat_packing")
    length = t.count("cutoff_len", 2048) - given  # it takes one off where packing is asked for
    why = "one less than written, as there: a pack ends with a padding token" if given else ""
    t.map("cutoff_len", "data.max_length", length, why)
    t.set_tool_default("data.max_length", length, f"{TOOL}'s default")
    key = next((key for key in ("neat_packing", "packing", "stage") if t.has(key)), "stage")
    if t.flag("neat_packing") and not is_text:
        t.map("neat_packing", "data.packing", True)
        t.no_op("packing")
    elif joined:
        t.substitute(key, {"data.packing": True}, JOINED)
    for other in ("packing", "neat_packing"):
        t.no_op(other, "" if joined else "samples are packed here without seeing each other, or not: it is the same")
    too_long = "split" if is_text and joined else "truncate"
    t.set_tool_default("data.too_long", too_long, f"{TOOL} cuts texts" if is_text else CUT)
    if t.get("stage") in OF_STAGE:
        t.no_op(("train_on_prompt", "mask_history"), "the last answer alone is trained")
    elif t.flag("train_on_prompt") and t.flag("mask_history"):
        t.contradict("mask_history", f"{t.place('train_on_prompt')} trains everything, this the last answer alone")
    elif t.flag("train_on_prompt"):
        t.map("train_on_prompt", "data.train_on", "all")
    elif t.flag("mask_history"):
        t.map("mask_history", "data.train_on", "last")
    t.no_op(("train_on_prompt", "mask_history"))
    t.only("ignore_pad_token_for_loss", (True, None), "padding is never trained: set it to true")
    return joined


def _map_template(t: Translator, is_text: bool, sources: Sources | None) -> None:
    """``template`` as Jinja text, with the keys that change it."""
    name, system = t.get("template"), t.values.get("default_system")
    if system is not None and not isinstance(system, str):
        t.refuse("default_system", f"got {show(system)}, allowed: a text")
        system = None
    changing = ("default_system", "enable_thinking", "preserve_thinking", "tool_format")
    if is_text:
        t.no_op(("template", *changing), "texts have no chat template")
        return
    if name is None:
        for key in changing:
            t.only(key, (None, True, False), "it changes the format of `template`: write that too")
        return
    name = str(name)
    special = [] if sources is None else ["tools"] * sources.has_tools + ["images"] * sources.has_images
    if name in OTHER_FORMATS or (name in CHAT_FORMATS and special):
        what = f"how it writes {' and '.join(special)}" if name in CHAT_FORMATS else f"its format {name}"
        t.substitute("template", {}, f"{what} is not available: the tokenizer's own chat template is used")
        for key in changing:
            t.only(key, (None, True), "it changes a format that is not available: remove it")
        return
    if name not in CHAT_FORMATS:
        near = nearest_name(name, (*CHAT_FORMATS, *OTHER_FORMATS))
        t.refuse("template", f"{TOOL} has no format {show(name)}" + (f": did you mean {near}?" if near else ""))
        return
    if "enable_thinking" in t.values and t.values["enable_thinking"] is None:
        t.refuse("enable_thinking", "null mixes both: write true or false")
    chat = CHAT_FORMATS[name]
    thinks = t.flag("enable_thinking", True)
    last_only = t.flag("mask_history") and not t.flag("preserve_thinking")
    text = make_chat_template(chat, default_system=system, thinks=thinks, last_thought_only=last_only)
    why = f"the format {name}" + (", which puts an empty thought before answers without one" if chat.thought else "")
    t.map("template", "model.chat_template", text, why)
    for key in changing[:-1]:
        t.map(key, "model.chat_template", text)
    t.no_op("tool_format", "no data set has tools")


def _map_training(t: Translator, packs: bool) -> None:
    hf.map_optimizer(t)
    t.set_tool_default("optimizer.learning_rate", 5e-5, f"{TOOL}'s default")
    if t.get("finetuning_type") in ("full", "freeze") and t.number("weight_decay"):
        t.set_tool_default("optimizer.decay_embeddings", True, "transformers' Trainer decays embeddings too")
    rate = t.number("learning_rate", 5e-5) or 5e-5
    ratio = t.number("loraplus_lr_ratio")
    if ratio and t.get("finetuning_type", "lora") != "lora":
        t.contradict("loraplus_lr_ratio", "it is a ratio of LoRA's rates, and finetuning_type is not lora: remove it")
    elif ratio:
        names = ["lora_B", *(["lora_magnitude_vector"] if t.flag("use_dora") else [])]
        t.map("loraplus_lr_ratio", "optimizer.learning_rates", dict.fromkeys(names, rate * ratio), "LoRA+")
    t.no_op("loraplus_lr_ratio")
    t.no_op("loraplus_lr_embedding", "embeddings have no adapters")
    t.switch("use_muon", "optimizer.name", "muon")
    hf.map_schedule(t, default="linear")
    hf.map_length(t, epochs=3)
    if t.has("ray_num_workers"):
        t.set_gpus(t.count("ray_num_workers", 1))
        t.map("ray_num_workers", "parallel.gpus", t.num_gpus())
    hf.map_batch(t, per_device=8, packs=packs)
    hf.map_precision(t)
    if not any(t.flag(key) for key in ("bf16", "fp16", "pure_bf16")) and t.get("finetuning_type") in ("full", "freeze"):
        why = f"without bf16 {TOOL} computes in float32, the dtype of trained weights"
        t.set_tool_default("model.dtype", "float32", why)
    if t.flag("disable_gradient_checkpointing"):
        t.map("disable_gradient_checkpointing", "parallel.activation_checkpointing", "none")
    t.no_op("disable_gradient_checkpointing", "the plan decides what is recomputed")
    hf.map_intervals(t, save_steps=500, logging_steps=500)
    hf.map_sharding(t)
    if t.has("early_stopping_steps"):
        t.map("early_stopping_steps", "stop.patience", t.count("early_stopping_steps", 1))
    if t.flag("fp8"):
        t.substitute("fp8", {"kernels.linear": "fp8"}, "linear layers are computed in fp8 by a recipe of our own")
    t.no_op("fp8")
    t.switch("disable_shuffling", "data.order", "as_given")


def _refuse_features(t: Translator) -> None:
    """Methods and engines that are not here: refused where they are switched on, and their other keys then ignored."""
    for switch, what in keys.FEATURES.items():
        if t.get(switch) not in (None, False, "false", "False", 0):
            t.refuse(switch, f"{what} is not available: remove it")
        t.no_op(switch)
    for key, switch in keys.READ_BY.items():
        t.no_op(key, f"only {switch} reads it")
    for key in keys.DEGREES & t.values.keys():
        kind = re.split("_(model_)?parallel", key)[0].replace("_", " ")
        why = f"{kind} parallelism is not available: set it to 1"
        if kind in ("context", "expert"):
            why = f"set it to 1, and parallel.{kind}_degree in a native file (`manyhands import`)"
        t.only(key, (1, None), why)
    for key in keys.TOKENS & t.values.keys():
        if t.has(key):
            t.refuse(key, hf.A_SECRET)
    tokenized = t.get("tokenized_path")
    if tokenized and any(os.path.exists(folder / str(tokenized)) for folder in (t.context.folder, Path.cwd())):
        t.refuse("tokenized_path", f"{TOOL} trains the tokenized data there, which is not read here: remove it")
    t.no_op("tokenized_path", "tokenized data is kept in a cache, by its content")


def _note_bystanders(t: Translator) -> None:
    hf.map_bystanders(t)
    hf.note_so(t, keys.SO)
    read = {*OF_STAGE[stage], *BESIDE} if (stage := str(t.get("stage"))) in OF_STAGE else set()
    for key in preferences.LLAMAFACTORY & t.values.keys() - read:
        t.ignore(key, f"only another `stage` than {stage if read else 'sft and pt'} reads it")
    t.no_op(read, "this `pref_loss` does not read it")
    shared.map_trackers(t, {"use_swanlab": ["swanlab"] * t.flag("use_swanlab")}, {})
    hf.note_so(t, {key: ((False,), why) for key, why in keys.IGNORED.items()})
    for key in keys.OF_PREDICTION & t.values.keys():
        t.ignore(key, "only predictions read it")


def _map_model(t: Translator) -> None:
    if not t.has("model_name_or_path"):
        t.refuse("model_name_or_path", "it is missing: write a hub name or a folder")
    t.map("model_name_or_path", "model.name")
    hf.map_revision(t)
    t.switch("train_from_scratch", "model.init", "random")
    map_router_loss(t, "moe_aux_loss_coef", t.number("moe_aux_loss_coef"))
    special, plain = split_names(str(t.get("add_special_tokens", ""))), split_names(str(t.get("add_tokens", "")))
    if special and not plain:
        t.map("add_special_tokens", "model.new_tokens", special)
    elif plain:
        t.substitute("add_tokens", {"model.new_tokens": special + plain}, "tokens are added as special ones")
        t.map("add_special_tokens", "model.new_tokens", special + plain)
    t.no_op("resize_vocab", "embeddings are resized where tokens are added")
    t.only("split_special_tokens", (False, None), "special tokens are always read as such: set it to false")
    t.only("new_special_tokens_config", (None,), "new tokens start at the mean of the others: write add_special_tokens")
    t.only("init_special_tokens", ("noise_init", None), "new tokens start at the mean of the others: noise_init")
    if t.get("use_fast_tokenizer", True) is False:
        t.ignore("use_fast_tokenizer", "tokenizers are always the fast ones")
    t.no_op("use_fast_tokenizer")


def _map_method(t: Translator) -> None:
    kind = t.get("finetuning_type", "lora")
    bits = t.integer("quantization_bit")
    if kind not in ("lora", "full", "freeze"):
        t.refuse("finetuning_type", f"{show(kind)} is not available: write lora, full or freeze")
    elif kind != "lora" and bits is not None:
        t.contradict("quantization_bit", f"finetuning_type is {kind}, and quantized weights are trained by lora only")
    elif kind == "lora":
        _map_lora(t, bits)
    elif kind == "full":
        t.map("finetuning_type", "method.name", "full")
    else:
        t.map("finetuning_type", "method.name", "patterns")
        _map_freeze(t)
    t.no_op(("finetuning_type", "quantization_bit"))
    if t.flag("pure_bf16") and kind == "lora":
        why = "the base is bfloat16, adapters are kept in float32"
        t.substitute("pure_bf16", {"model.dtype": "bfloat16"}, why)
    elif t.flag("pure_bf16"):
        why = "bfloat16 weights are rounded stochastically here"
        t.map("pure_bf16", {"model.dtype": "bfloat16", "model.master_dtype": "bfloat16"}, why=why)
    t.no_op("pure_bf16")
    for key in keys.OF_LORA & t.values.keys() if kind != "lora" else ():
        t.no_op(key, "only finetuning_type lora reads it")
    for key in keys.OF_FREEZE & t.values.keys() if kind != "freeze" else ():
        t.no_op(key, "only finetuning_type freeze and use_llama_pro read it")


def _map_lora(t: Translator, bits: int | None) -> None:
    if bits == 4:
        t.map("quantization_bit", "method.name", "qlora")
    elif bits == 8:
        why = "weights in 8 bits are not available: the base stays in 16 bits"
        t.substitute("quantization_bit", {"method.name": "lora"}, why)
    elif bits is not None:
        t.refuse("quantization_bit", f"{bits} bits are not available: write 4")
    if bits is None:
        t.map("finetuning_type", "method.name", "lora")
    t.set_tool_default("method.name", "lora", f"{keys.TOOL}'s default")
    if bits is None:
        t.no_op(("quantization_method", "quantization_type"), "only quantization_bit reads it")
    t.only("quantization_method", ("bnb", "bitsandbytes") if bits else (t.get("quantization_method"),),
           "weights are quantized by bitsandbytes' NF4 only: write bnb")  # fmt: skip
    t.only("quantization_type", ("nf4",) if bits == 4 else (t.get("quantization_type"),), "4-bit weights are NF4: "
           "write nf4")  # fmt: skip
    if not t.flag("double_quantization", True) and bits == 4:
        t.map("double_quantization", "method.double_quant", False)
    t.no_op("double_quantization")
    if t.has("adapter_name_or_path"):
        _map_adapter(t)
        return
    t.no_op("adapter_folder", "only adapter_name_or_path reads it")
    t.no_op("create_new_adapter")
    rank = t.count("lora_rank", 8)
    t.map_or_default("lora_rank", "method.rank", rank)
    alpha = t.number("lora_alpha")
    if alpha:
        t.map("lora_alpha", "method.alpha", alpha)
    else:
        t.no_op("lora_alpha")
        t.set_tool_default("method.alpha", 2 * rank, f"{keys.TOOL}'s default: twice the rank")
    dropout = t.number("lora_dropout", 0) or 0
    t.map_or_default("lora_dropout", "method.dropout", dropout)
    targets = split_names(t.get("lora_target", "all"))
    if targets == ["all"]:
        map_all_linear(t, "lora_target")
    else:
        t.map("lora_target", "method.target_modules", targets)
    t.switch("use_rslora", "method.rslora")
    t.switch("use_dora", "method.dora")
    if t.has("additional_target"):
        saved, _ = split_projector(split_names(t.get("additional_target")))
        t.map("additional_target", "method.modules_to_save", saved or None)  # the projector is one of method.parts
        if not split_names(t.get("additional_target")):
            t.no_op("additional_target", "an empty list: adapters alone are trained")
    elif t.flag("resize_vocab"):
        why = f"{keys.TOOL} trains embeddings and head with resize_vocab"
        t.map("resize_vocab", "method.modules_to_save", ["embed_tokens", "lm_head"], why)


def _map_adapter(t: Translator) -> None:
    paths = split_names(t.get("adapter_name_or_path"))
    if t.has("adapter_name_or_path") and not paths:
        t.refuse("adapter_name_or_path", f"got {show(t.get('adapter_name_or_path'))}, allowed: a folder")
        return
    if len(paths) > 1 or t.flag("create_new_adapter"):
        key = "adapter_name_or_path" if len(paths) > 1 else "create_new_adapter"
        t.refuse(key, "adapters are not merged before training: merge them first (`manyhands export RUN --merge`), and "
                 "name the merged model")  # fmt: skip
    else:
        folder = f"{paths[0]}/{t.get('adapter_folder')}" if t.has("adapter_folder") else paths[0]
        t.map("adapter_name_or_path", "method.adapter", folder)
        t.map("adapter_folder", "method.adapter", folder)
    dropout = t.number("lora_dropout", 0) or 0
    t.map_or_default("lora_dropout", "method.dropout", dropout)
    t.no_op(keys.OF_LORA & t.values.keys(), "the adapter that is trained on has its own")


def _map_freeze(t: Translator) -> None:
    """The last n layers, or the first ones if n is negative; all of them or some of their modules, and others."""
    layers_key, modules_key = "freeze_trainable_layers", "freeze_trainable_modules"
    count = t.integer(layers_key, 2) or 0
    layers = f"layers[-{count}:]" if count > 0 else f"layers[:{-count}]"
    modules = split_names(t.get(modules_key, "all"))
    train = [layers if name == "all" else f"{layers}.{name}" for name in modules] if count else []
    train += [f"*{name}*" for name in split_names(t.get("freeze_extra_modules", ""))]
    if not train:
        t.refuse(layers_key, "0 layers leave nothing to train: write how many of the last layers to train")
        return
    for key in (layers_key, modules_key, "freeze_extra_modules"):
        t.map(key, "method.train", train)
    t.set_tool_default("method.train", train, f"{keys.TOOL}'s default: the last two layers")


def _map_images(t: Translator, info: DatasetInfo | None, has_images: bool) -> None:
    """Every key about images. ``has_images``: whether a training set names a column of them."""
    if not has_images:
        _note_no_images(t)
        return
    t.set_tool_default("data.images", True, "a data set names a column of images")
    if t.has("media_dir"):
        t.map("media_dir", "data.image_folder", str(t.get("media_dir")))
    elif info is not None and info.folder:
        t.set_tool_default("data.image_folder", info.folder, f"{keys.TOOL} looks for images in dataset_dir")
    t.no_op("media_dir")
    for key, (native, default) in PIXELS.items():
        t.map_or_default(key, native, t.count(key, default))
    for key, why in CROPS.items():
        t.only(key, (False, None), why)
    _map_parts(t)


def _note_no_images(t: Translator) -> None:
    t.no_op(("media_dir", *PIXELS, *CROPS), "no data set has images")
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        if t.has(key) and not t.flag(key):
            t.ignore(key, "no data set has images: what they pass through is left as it is")
        t.no_op(key)
    t.only("freeze_language_model", (False, None), "no data set has images: nothing would be trained")
    if _saves_projector(t):
        t.ignore("additional_target", "no data set has images: the projector is left as it is")


def _saves_projector(t: Translator) -> bool:
    return split_projector(split_names(t.get("additional_target", "")))[1]


def _map_parts(t: Translator) -> None:
    """``freeze_*``: tower and projector are frozen unless the file says otherwise."""
    given = [key for key in keys.FREEZE_PARTS_DEFAULT if t.has(key)]
    frozen = {key: t.flag(key, default) for key, default in keys.FREEZE_PARTS_DEFAULT.items()}
    vision, projector, language = frozen.values()
    kind = t.get("finetuning_type", "lora")
    states = {True: "frozen", False: "trained"}
    if kind == "full":
        if vision and projector and language:
            t.contradict("freeze_language_model", "every part of the model is frozen: set one of these keys to false")
        parts = {"vision": states[vision], "projector": states[projector], "language": "frozen" if language else "full"}
    else:
        if kind == "lora" and not vision:
            t.refuse("freeze_vision_tower", TOWER_ADAPTERS)
        elif not vision:
            t.refuse("freeze_vision_tower", "layers of the vision tower are not trained by number: set it to true")
        if kind == "lora" and not projector and not _saves_projector(t):
            t.ignore("freeze_multi_modal_projector", PROJECTOR_IS_KEPT)
            given.remove("freeze_multi_modal_projector")
        if language:
            t.refuse("freeze_language_model", f"finetuning_type {kind} trains the language model: write full")
        saved = kind == "lora" and _saves_projector(t)
        trained = saved or (kind == "freeze" and not projector)
        given += ["additional_target"] * saved
        parts = {"vision": "frozen", "projector": states[not trained]}
    for key in given:
        t.map(key, "method.parts", parts)
    t.set_tool_default("method.parts", parts, f"{keys.TOOL}'s defaults")
