"""A model's config.json: read, checked field by field, and reduced to its text decoder. Knows no torch and no weights.

What comes from outside is checked before anything is computed from it: kinds and bounds of fields, and whether the
model is one that can be trained here at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhands import families
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json

CONFIG_FILE = "config.json"
NEEDED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CROSS_ATTENTION_KEYS = ("cross_attention_layers",)
MULTIMODAL_KEYS = ("vision_config", "audio_config")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_qk_norm")
OUTER_KEYS = ("tie_word_embeddings", "quantization_config")  # of a multimodal model, and valid for its text
MAX_SIZE, MAX_LAYERS = 1 << 31, 10_000
DOWNLOAD_AGAIN = "download the model again"
CORRECT_CONFIG = f"correct config.json, or {DOWNLOAD_AGAIN}"


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_SIZE


# Of config.json's fields that are read here: what they must be, in words and as a check, and which ones.
FIELD_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a string", lambda value: isinstance(value, str), ("model_type",)),
    (
        f"an integer from 1 to {MAX_LAYERS:,}",
        lambda value: _is_size(value) and value <= MAX_LAYERS,
        ("num_hidden_layers",),
    ),
    (
        "a positive integer",
        _is_size,
        ("hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim", "global_head_dim"),
    ),
    (
        "a positive integer or a list of them",
        lambda value: all(map(_is_size, value if isinstance(value, list) else [value])),
        ("intermediate_size",),
    ),
    (
        "an integer",
        lambda value: type(value) is int and abs(value) <= MAX_SIZE,
        ("max_position_embeddings", "sliding_window"),
    ),
    ("a number", lambda value: type(value) in (int, float), ("attn_logit_softcapping",)),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        (*FLAGS, "use_sliding_window", "is_encoder_decoder"),
    ),
    (
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        ("layer_types", "architectures"),
    ),
    (
        "a mapping of layers",
        lambda value: (
            isinstance(value, dict) and all(key.isdecimal() and isinstance(own, dict) for key, own in value.items())
        ),
        ("per_layer_config",),
    ),
    (
        "a mapping",
        lambda value: isinstance(value, dict),
        ("text_config", "vision_config", "audio_config", "quantization_config", "auto_map"),
    ),
)
OTHER_PURPOSE = re.compile(
    r"For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice"
    r"|NextSentencePrediction|ImageClassification|AudioClassification)$"
)


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All of ``folder/config.json``, and the fields of its text decoder (the same object for a text model).

    Raises UserError where the file is missing or broken, holds values that no model can have, or describes a model
    that is not supported.
    """
    path = folder / CONFIG_FILE
    outer = _read_json(path)
    check_kinds(outer, path)
    check_kinds(outer.get("text_config") or {}, path)
    check_purpose(outer, path)
    config = text_part(outer)
    check_supported(config, path)
    return outer, config


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a multimodal model's text decoder, as one flat config; the config itself for a text model.

    transformers reads ``tie_word_embeddings`` from the outer config; what neither holds is the family's default.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        kind = families.find(config).text_model_type
        if kind is None or not any(key in config for key in MULTIMODAL_KEYS):
            return config
        # the text's fields stand beside the vision_config
        return {key: value for key, value in config.items() if key not in MULTIMODAL_KEYS} | {"model_type": kind}
    kind = str(text.get("model_type") or config.get("model_type"))
    outer = {key: config[key] for key in OUTER_KEYS if key in config}
    fields = {**families.find(kind).sizes, **text, **outer, "model_type": kind}
    if isinstance(fields.get("intermediate_size"), list):  # one for each block
        fields["intermediate_size"] = max(fields["intermediate_size"], default=0)
    return fields


def check_kinds(config: Mapping[str, Any], path: Path) -> None:
    """UserError for fields with a value of the wrong kind, or a size beyond that of any model. null is as if absent."""
    wrong = [
        f"{key}: {str(config[key])[:60]!r} is not {what}"
        for what, fits, keys in FIELD_KINDS
        for key in keys
        if config.get(key) is not None and not fits(config[key])
    ]
    if wrong:
        raise UserError(
            "the model's config.json has values of the wrong kind", where=str(path), details=wrong, fix=CORRECT_CONFIG
        )


def check_purpose(config: Mapping[str, Any], path: Path) -> None:
    """UserError for a model saved with a head for classification or masked tokens: it does not predict the next one."""
    named: list[str] = config.get("architectures") or []
    other = [match[1] for name in named if (match := OTHER_PURPOSE.search(name))]
    if other and len(other) == len(named):
        encoder = "MaskedLM" in other or "PreTraining" in other
        raise UserError(
            f"{named[0]} is not a causal language model",
            where=str(path),
            why="it is an encoder: its tokens attend to later ones, so there is no next token to learn"
            if encoder
            else f"its head is for {other[0]} and predicts no tokens",
            fix=f"use a model that generates text, such as {families.EXAMPLES}",
        )


def check_supported(config: Mapping[str, Any], path: Path) -> None:
    """UserError for anything but a dense text decoder whose weights are not quantized."""
    kind = config.get("model_type") or "this model"
    for keys, what in (
        (MULTIMODAL_KEYS, f"{kind} is multimodal, and its config.json does not say which part is the text decoder"),
        (
            CROSS_ATTENTION_KEYS,
            f"{kind} has blocks that attend to images only: text skips them, and training would leave them unchanged or"
            " let them decay",
        ),
        (EXPERT_KEYS, f"{kind} is a mixture of experts, which is not supported yet"),
        (("quantization_config",), "the model's weights are quantized, which is not supported yet"),
        (("is_encoder_decoder",), f"{kind} has an encoder, which is not supported"),
    ):
        found = [key for key in keys if (key in config if key in MULTIMODAL_KEYS else config.get(key))]
        if found:
            raise UserError(
                what,
                where=str(path),
                why=f"its config.json has {', '.join(found)}",
                fix=f"use a dense text model, such as {families.EXAMPLES}",
            )
    missing = [key for key in ("model_type", *NEEDED_KEYS) if not config.get(key)]
    if missing:
        raise UserError(
            f"{kind} is not a known kind of decoder",
            where=str(path),
            why=f"its config.json has no {', '.join(missing)}",
            fix="use a model whose config.json has the usual field names",
        )
    _check_heads(config, path)


def _check_heads(config: Mapping[str, Any], path: Path) -> None:
    heads, groups = families.num_heads(config)
    wrong = [f"{key}: {config[key]!r}" for key in NEEDED_KEYS if not isinstance(config[key], int)]
    if not wrong and heads % groups:
        wrong = [f"num_attention_heads: {heads} is not a multiple of num_key_value_heads: {groups}"]
    if wrong:
        raise UserError(
            "config.json has sizes that no model can have", where=str(path), details=wrong, fix=CORRECT_CONFIG
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        why = "it holds an adapter, which is no model by itself" if adapter else "there is no config.json in it"
        raise UserError(
            "this is not a model's folder",
            where=str(path.parent),
            why=why,
            fix="give a hub name, or a folder with config.json",
        )
    try:
        config = parse_json(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise UserError(
            "the model's config.json is broken", where=str(path), why=str(error), fix=DOWNLOAD_AGAIN
        ) from error
    return config
