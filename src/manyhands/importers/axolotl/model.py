"""The model and the method of an Axolotl run: base, tokens, adapter, quantized base, weights that are not frozen; and
images, which ``processor_type`` switches on: parts of the model, sizes, what is not cut.
"""

import re
from typing import Any

from manyhands.config.text import names, show
from manyhands.importers.axolotl.keys import QUANTIZED
from manyhands.importers.shared import add_target_parameters, map_all_linear, map_router_loss, split_projector
from manyhands.importers.translation import Translator

_RANGE = re.compile(r"\[[0-9]*(:[0-9]*)?\]$")
_OF_EXPERTS = ("output_router_logits", "router_aux_loss_coef")
_ADAPTER_KEYS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules", "lora_modules_to_save",
    "lora_model_dir", "peft_use_dora", "peft_use_rslora", "peft", "peft.loftq_config", "peft.loftq_config.loftq_bits",
    "peft_init_lora_weights", "peft_ensure_weight_tying", "peft_autocast_adapter_dtype", "bnb_config_kwargs",
    "lora_target_parameters",
)  # fmt: skip
TOWERS = names("vision_tower vision_model vision_encoder visual embed_vision audio_tower audio_model embed_audio")
# Chat templates of models of images, by Axolotl's names; they are made after the models' own.
IMAGE_TEMPLATES = names(
    "gemma3 gemma3n gemma4 gemma4_unified llama3_2_vision llama4 llava mistral_v7_tekken pixtral qwen2_vl qwen3_5"
)
_OUTER = re.compile(r"embed|lm_head|wte")  # embeddings and heads
_SIZES = ("image_size", "image_resize_algorithm")


def map_model(t: Translator) -> None:
    if not t.has("base_model"):
        t.refuse("base_model", "it is missing: write the model's hub name or folder")
    t.map("base_model", "model.name")
    base = t.get("base_model")
    t.only("base_model_config", (base,), "a config.json of another model is not available: remove it")
    t.only(
        "tokenizer_config", (base,), "a tokenizer of another model is not available: copy it into the model's folder"
    )
    for key in ("revision_of_model", "model_revision"):
        t.map(key, "model.revision", str(t.get(key)))
    t.switch("trust_remote_code", "model.trust_remote_code")
    t.switch("reinit_weights", "model.init", "random")
    t.no_op("model_type")
    for key in ("model_config", "overrides_of_model_config"):
        settings = t.get(key, {})
        if not isinstance(settings, dict) or settings.keys() - set(_OF_EXPERTS):
            t.refuse(key, "settings of the model cannot be changed here: change its config.json")
        elif settings.get("output_router_logits"):
            strength = settings.get("router_aux_loss_coef", "model")
            map_router_loss(t, key, strength if isinstance(strength, int | float) else "model")
        else:
            t.no_op(key, "the model adds no router's loss without output_router_logits" if settings else "")
    _map_stored_quantization(t)
    t.only("tokenizer_legacy", (True,), "the tokenizer is read as its files have it: remove it")
    _map_tokens(t)


def _map_stored_quantization(t: Translator) -> None:
    """``model_quantization_config``: how transformers opens a model whose experts are stored in MXFP4."""
    key, options = "model_quantization_config", "model_quantization_config_kwargs"
    kind, given = t.get(key), t.get(options) or {}
    t.no_op((key, options), "lora keeps experts in MXFP4, with the values of dequantized ones" if kind else "")
    if kind not in (None, "Mxfp4Config"):
        t.refuse(key, f"{show(kind)}: {QUANTIZED}")
    elif not isinstance(given, dict) or given.keys() - {"dequantize"}:
        t.refuse(options, f"got {show(given)}, allowed: dequantize alone")


def _map_tokens(t: Translator) -> None:
    """``special_tokens``, and ``tokens``: a list of new ones (or, in old files, a mapping like ``special_tokens``)."""
    special, new = {}, []
    for name in ("bos", "eos", "unk"):
        key = f"special_tokens.{name}_token"
        if t.has(key):
            special[name] = str(t.get(key))
            t.map(key, {})
    t.no_op("special_tokens.pad_token", "padding is neither attended to nor trained")
    tokens = t.get("tokens")
    if isinstance(tokens, dict):
        special |= {
            name.removesuffix("_token"): str(token) for name, token in tokens.items() if name != "pad_token" and token
        }
        t.substitute("tokens", {}, "read as `special_tokens`: today's Axolotl wants a list here")
    for key in ("special_tokens.additional_special_tokens", "tokens"):
        if isinstance(t.get(key), list):
            new += [token for token in t.get(key) if token not in new]
            t.map(key, {}, why="their embeddings are trained and saved; in Axolotl only with `lora_modules_to_save`")
        elif t.has(key) and not isinstance(tokens, dict):
            t.refuse(key, f"got {show(t.get(key))}, allowed: a list of tokens")
    for native, value, places in (
        ("model.special_tokens", special, [f"special_tokens.{name}_token" for name in special]),
        ("model.new_tokens", new, ["special_tokens.additional_special_tokens"]),
    ):
        if value:
            t.map(next((place for place in places if t.has(place)), "tokens"), native, value)
    if t.flag("resize_token_embeddings_to_32x"):
        t.substitute("resize_token_embeddings_to_32x", {}, "the vocabulary keeps its size: no rows that no token uses")
    t.no_op("resize_token_embeddings_to_32x")
    t.no_op("special_tokens")


def map_method(t: Translator) -> None:
    """``adapter``: lora, qlora, or none, which trains all weights or those of ``unfrozen_parameters``."""
    adapter = t.get("adapter")
    if adapter in (None, False):
        _map_full(t)
    elif adapter in ("lora", "qlora"):
        _map_adapter(t, adapter)
    else:
        t.refuse("adapter", f"{show(adapter)} is not available: write lora or qlora")
    if t.flag("quantize_moe_experts") and adapter != "qlora":
        t.substitute("quantize_moe_experts", {}, "experts stay in 16 bits: `adapter: qlora` quantizes them")
    t.no_op("quantize_moe_experts")
    for key in (*_ADAPTER_KEYS, "adapter", "load_in_4bit", "load_in_8bit", "unfrozen_parameters"):
        t.no_op(key, "only with `adapter`" if adapter is None and t.has(key) else "")


def _map_full(t: Translator) -> None:
    for key in ("load_in_4bit", "load_in_8bit"):
        if t.flag(key):
            t.contradict(key, "it needs `adapter: qlora` (4 bits) or `adapter: lora` (8 bits): Axolotl refuses it too")
    why = "no `adapter`: all weights are trained"
    if not any(key.startswith("fsdp") and t.has(key) for key in t.values) and not t.has("deepspeed"):
        why += "; the trained weights are kept in float32, in Axolotl without FSDP in bfloat16"
    if not t.has("unfrozen_parameters"):
        t.set_tool_default("method.name", "full", why)
        return
    patterns = _listed(t, "unfrozen_parameters")
    if not all(isinstance(pattern, str) for pattern in patterns):
        t.refuse("unfrozen_parameters", f"got {show(patterns)}, allowed: a list of patterns of names")
    if t.has("processor_type"):
        refuse_tower(t, patterns)
        patterns = split_unfrozen(t)[0]  # the projector is one of method.parts
        if not patterns:
            t.set_tool_default("method.name", "full", "the projector alone is trained")
            return
    ranges = [pattern for pattern in patterns if _RANGE.search(str(pattern))]
    if ranges:
        t.refuse("unfrozen_parameters", f"{show(ranges[0])}: rows of a matrix cannot be trained alone: name the matrix")
        return
    # Axolotl's are expressions for the beginning of a full name, in which a dot is a dot, but for one before a plus.
    trained = ["re:(?:" + re.sub(r"\.(?!\+)", r"\\.", str(one)) + ").*" for one in patterns]
    t.map("unfrozen_parameters", {"method.name": "patterns", "method.train": trained})


def _map_adapter(t: Translator, adapter: str) -> None:
    four, eight = t.flag("load_in_4bit"), t.flag("load_in_8bit")
    if adapter == "qlora" and (eight or not four):
        key = "load_in_8bit" if eight else "load_in_4bit"
        t.contradict(key, "`adapter: qlora` needs `load_in_4bit: true` alone: Axolotl refuses anything else")
    t.map("adapter", "method.name", adapter)
    if adapter == "qlora":
        t.no_op("load_in_4bit", "`method.name: qlora`: NF4, quantized twice")
    elif eight:
        t.substitute("load_in_8bit", {}, "bases in 8 bits are not available: the base stays in bfloat16")
    elif four:
        t.ignore("load_in_4bit", "Axolotl quantizes the base only with `adapter: qlora`")
    for key, native in (("lora_r", "rank"), ("lora_alpha", "alpha")):
        t.map(key, f"method.{native}", t.number(key))
        if not t.has(key) and not t.has("lora_model_dir"):
            t.refuse(key, "it is missing: Axolotl has no default")
    t.map_or_default("lora_dropout", "method.dropout", t.number("lora_dropout", 0.0))
    _map_targets(t)
    add_target_parameters(t, "lora_target_parameters", alone=True)
    if t.flag("quantize_moe_experts") and adapter == "qlora":
        t.no_op("quantize_moe_experts", "QLoRA holds experts in NF4 like all linear layers of the blocks")
    _map_peft(t, adapter)
    _map_quantization(t, adapter)
    if t.has("unfrozen_parameters"):
        why = "the adapter is trained; today's Axolotl freezes it too, as its names begin with base_model"
        t.substitute("unfrozen_parameters", {}, why)


def _map_targets(t: Translator) -> None:
    asked, native = t.get("lora_target_modules"), "method.target_modules"
    beyond = [name for name in (asked if isinstance(asked, list) else ()) if _OUTER.search(str(name))]
    if beyond:
        t.refuse(
            "lora_target_modules", f"{show(beyond[0])} is not one of the blocks' layers: use `lora_modules_to_save`"
        )
    if t.flag("lora_target_linear"):
        map_all_linear(t, "lora_target_linear", "all linear layers of the blocks, not those of image towers")
        listed = asked if isinstance(asked, list) else [asked] if asked else []
        t.no_op("lora_target_modules", "part of `lora_target_linear`" if listed else "")
    elif asked == "all-linear":
        map_all_linear(t, "lora_target_modules")
    elif isinstance(asked, str):
        t.map("lora_target_modules", native, [f"re:{asked}"])
    elif isinstance(asked, list) and asked:
        t.map("lora_target_modules", native, [str(name) for name in asked])
    elif asked:
        t.refuse("lora_target_modules", f"got {show(asked)}, allowed: a list of names, or a regular expression as text")
    else:
        t.set_tool_default(
            native, "peft-default", "PEFT's own choice for the family, as neither lora_target key is set"
        )
    if t.has("lora_modules_to_save"):
        saved = t.get("lora_modules_to_save")
        if t.has("processor_type") and isinstance(saved, list):
            saved = split_projector(saved)[0] or None  # the projector is one of method.parts
        t.map("lora_modules_to_save", "method.modules_to_save", saved)
    if t.has("lora_model_dir"):
        t.map("lora_model_dir", "method.adapter", str(t.get("lora_model_dir")))


def _map_peft(t: Translator, adapter: str) -> None:
    t.switch("peft_use_dora", "method.dora")
    t.switch("peft_use_rslora", "method.rslora")
    t.only("peft_init_lora_weights", (True, "true"), "other beginnings of A and B than PEFT's own and LoftQ are not "
           "available")  # fmt: skip
    t.only("peft_autocast_adapter_dtype", (True,), "the adapter is kept in float32: remove it")
    t.only("peft_ensure_weight_tying", (False,), "a tied embedding and head are not one adapter: remove it")
    bits = t.integer("peft.loftq_config.loftq_bits")
    if bits and bits != 4:
        t.refuse("peft.loftq_config.loftq_bits", f"{bits}: LoftQ is available for 4 bits")
    elif bits and adapter == "lora":
        why = "LoftQ's base is kept in NF4, in Axolotl as the same kind of values in bfloat16"
        t.substitute("peft.loftq_config.loftq_bits", {"method.init": "loftq"}, why)
        t.mapping.setdefault("method", {})["name"] = "qlora"
    elif bits:
        t.map("peft.loftq_config.loftq_bits", "method.init", "loftq")


def _map_quantization(t: Translator, adapter: str) -> None:
    """``bnb_config_kwargs``: how bitsandbytes quantizes the base."""
    asked: Any = t.get("bnb_config_kwargs", {})
    if not isinstance(asked, dict):
        t.refuse("bnb_config_kwargs", f"got {show(asked)}, allowed: a mapping")
        return
    already = {"load_in_4bit": (True,), "bnb_4bit_quant_type": ("nf4",), "bnb_4bit_compute_dtype": ("bfloat16", "auto")}
    for name, value in asked.items():
        if name == "bnb_4bit_use_double_quant" and adapter == "qlora":
            if value is False:
                t.map("bnb_config_kwargs", "method.double_quant", False)
        elif name not in (*already, "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant") or (
            name in already and value not in already[name]
        ):
            t.refuse(
                "bnb_config_kwargs", f"{name}: {show(value)} is not available: the base is NF4, computed in bfloat16"
            )


def map_images(t: Translator) -> None:
    """``processor_type`` and what belongs to it. Called once ``map_method`` has been."""
    if not t.has("processor_type"):
        for key in ("processor_type", *_SIZES, "processor_kwargs", "role_boundaries"):
            t.no_op(key, "only with `processor_type`" if t.has(key) else "")
        t.no_op("freeze_mm_modules", "without images the parts that they pass through are left as they are")
        return
    kind = str(t.get("processor_type"))
    if kind == "AutoProcessor":
        t.map("processor_type", "data.images", True, "images are prepared while the run trains")
    else:
        t.refuse("processor_type", f"{kind}: images are prepared by the model's own processor: write AutoProcessor")
    t.no_op("skip_prepare_dataset", "rows become tokens before training, images pixels while it runs")
    t.only("processor_kwargs", (None, {}), "write these settings into the model's preprocessor_config.json")
    if t.get("role_boundaries"):
        t.ignore("role_boundaries", "which tokens are an assistant's follows from the chat template")
    t.no_op("role_boundaries")
    _map_size(t)
    _map_parts(t)


def _map_size(t: Translator) -> None:
    size = t.get("image_size")
    sides = [size, size] if isinstance(size, int) and not isinstance(size, bool) else size
    if size is None:
        t.no_op("image_size")
    elif isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
        why = (
            f"images of more than {sides[0]} x {sides[1]} pixels are made smaller in proportion; in Axolotl those of "
            "columns get these sides, padded or squeezed"
        )
        t.substitute("image_size", {"data.shrink_images_above": sides[0] * sides[1]}, why)
    else:
        t.refuse("image_size", f"got {show(size)}, allowed: pixels of a side, or [width, height]")
    if str(t.get("image_resize_algorithm", "bicubic")).lower() != "bicubic":
        t.ignore("image_resize_algorithm", "images are made smaller with bicubic interpolation")
    t.no_op("image_resize_algorithm")


def _map_parts(t: Translator) -> None:
    """``adapter`` leaves tower and projector as they are; without it all is trained, but for ``freeze_mm_modules``."""
    parts: dict[str, Any] = {"vision": "frozen", "projector": "frozen"}
    given = ["freeze_mm_modules"] if t.flag("freeze_mm_modules") else []
    if t.has("adapter"):
        if split_projector(_listed(t, "lora_modules_to_save"))[1]:
            parts["projector"] = "trained"
            given.append("lora_modules_to_save")
        if isinstance(t.get("lora_target_modules"), list) and not t.flag("lora_target_linear"):
            t.substitute("lora_target_modules", {}, "adapters are for the language model alone; in Axolotl the tower's "
                         "modules of these names have them too")  # fmt: skip
    elif t.has("unfrozen_parameters"):
        given.append("unfrozen_parameters")
        rest, trains = split_unfrozen(t)
        parts["projector"] = "trained" if trains else "frozen"
        parts |= {} if rest else {"language": "frozen"}
    elif not given:
        parts = {"vision": "trained", "projector": "trained", "language": "full"}
    for key in given:
        t.map(key, "method.parts", parts)
    t.no_op("freeze_mm_modules")
    why = "Axolotl trains the whole model" if "language" in parts else "adapters alone"
    t.set_tool_default("method.parts", parts, why)


def split_unfrozen(t: Translator) -> tuple[list[Any], bool]:
    """Of ``unfrozen_parameters`` what is not the projector's, and whether some is."""
    return split_projector([str(one).replace("\\", "") for one in _listed(t, "unfrozen_parameters")])


def refuse_tower(t: Translator, patterns: list[Any]) -> None:
    """Refuses patterns of weights that are a tower's."""
    for pattern in patterns:
        if TOWERS & set(str(pattern).replace("\\", "").split(".")):
            t.refuse("unfrozen_parameters", f"{show(pattern)}: a vision tower is trained as a whole, by "
                     "`method.parts.vision: trained` in a native file")  # fmt: skip


def _listed(t: Translator, key: str) -> list[Any]:
    asked = t.get(key, [])
    return asked if isinstance(asked, list) else [asked]
