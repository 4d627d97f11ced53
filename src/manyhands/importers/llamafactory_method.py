"""LLaMA-Factory's keys of the model and of the method: which weights are trained, and how; of models of images: which
parts are trained, where images are, how many pixels they have.
"""

from __future__ import annotations

from typing import Any

from manyhands.config.text import show
from manyhands.importers import llamafactory_keys as keys
from manyhands.importers import transformers as hf
from manyhands.importers.images import PROJECTOR_IS_KEPT, TOWER_ADAPTERS, split_projector
from manyhands.importers.llamafactory_data import DatasetInfo
from manyhands.importers.translation import Translator

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


def map_model(t: Translator) -> None:
    if not t.has("model_name_or_path"):
        t.refuse("model_name_or_path", "it is missing: write a hub name or a folder")
    t.map("model_name_or_path", "model.name")
    hf.map_revision(t)
    if t.flag("train_from_scratch"):
        t.map("train_from_scratch", "model.init", "random")
    else:
        t.no_op("train_from_scratch")
    special = [token.strip() for token in str(t.get("add_special_tokens", "")).split(",") if token.strip()]
    plain = [token.strip() for token in str(t.get("add_tokens", "")).split(",") if token.strip()]
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
    else:
        t.no_op("use_fast_tokenizer")


def map_method(t: Translator) -> None:
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
    for key in ("finetuning_type", "quantization_bit"):
        t.no_op(key)
    if t.flag("pure_bf16") and kind == "lora":
        why = "the base is bfloat16, adapters are kept in float32"
        t.substitute("pure_bf16", {"model.dtype": "bfloat16"}, why)
    elif t.flag("pure_bf16"):
        why = "bfloat16 weights are rounded stochastically here"
        t.map("pure_bf16", {"model.dtype": "bfloat16", "model.master_dtype": "bfloat16"}, why=why)
    else:
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
        for key in ("quantization_method", "quantization_type"):
            t.no_op(key, "only quantization_bit reads it")
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
    _map_or_carry(t, "lora_rank", "method.rank", rank, 8)
    alpha = t.number("lora_alpha")
    if alpha:
        t.map("lora_alpha", "method.alpha", alpha)
    else:
        t.no_op("lora_alpha")
        t.set_tool_default("method.alpha", 2 * rank, f"{keys.TOOL}'s default: twice the rank")
    dropout = t.number("lora_dropout", 0) or 0
    _map_or_carry(t, "lora_dropout", "method.dropout", dropout, 0)
    targets = split_names(t.get("lora_target", "all"))
    _map_or_carry(t, "lora_target", "method.target_modules", "all-linear" if targets == ["all"] else targets, "all")
    for key, native in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if t.flag(key):
            t.map(key, f"method.{native}", True)
        t.no_op(key)
    _map_saved_modules(t)


def _map_or_carry(t: Translator, key: str, native: str, value: Any, default: Any) -> None:
    if t.has(key):
        t.map(key, native, value)
    else:
        t.set_tool_default(native, "all-linear" if default == "all" else value, f"{keys.TOOL}'s default")


def _map_saved_modules(t: Translator) -> None:
    if t.has("additional_target"):
        saved, _ = split_projector(split_names(t.get("additional_target")))
        t.map("additional_target", "method.modules_to_save", saved or None)  # the projector is one of method.parts
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
    _map_or_carry(t, "lora_dropout", "method.dropout", dropout, 0)
    for key in keys.OF_LORA & t.values.keys():
        t.no_op(key, "the adapter that is trained on has its own")


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


def split_names(value: Any) -> list[str]:
    """Names that are separated by commas, or a list of them."""
    parts = value if isinstance(value, list) else str("" if value is None else value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def map_images(t: Translator, info: DatasetInfo | None, has_images: bool) -> None:
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
        if t.has(key):
            t.map(key, native, t.count(key, default))
        t.set_tool_default(native, default, f"{keys.TOOL}'s default")
    for key, why in CROPS.items():
        t.only(key, (False, None), why)
    _map_parts(t)


def _note_no_images(t: Translator) -> None:
    for key in ("media_dir", *PIXELS, *CROPS):
        t.no_op(key, "no data set has images")
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
