"""A model's config.json: read, checked field by field, and reduced to its text decoder; and whether samples of it can
be packed without one seeing another. Knows no torch and no weights.

What comes from outside is checked before anything is computed from it: kinds and bounds of fields, and whether the
model is one that can be trained here at all.

Families that were measured to pack (``Family.packs``, docs/equality.md) are taken at their word, as long as
transformers is the version they were measured with. For any other a process of its own tries a shrunken copy of the
configuration (``manyhands.model.probe``); its verdict is kept beside the token cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json, read_json, write_json
from manyhands.facts.stored_nf4 import refuse_other_quantization
from manyhands.facts.types import ModelFacts

CONFIG_FILE = "config.json"
NEEDED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
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
        (
            *("hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim", "global_head_dim"),
            "sliding_window_pattern",
        ),
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
    outer = _widest(outer)
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
    kind = str(families.find(config).text_model_type or text.get("model_type") or config.get("model_type"))
    outer = {key: config[key] for key in OUTER_KEYS if key in config}
    fields = {**families.find(kind).sizes, **text, **outer, "model_type": kind}
    return _widest(fields)


def _widest(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the largest ``intermediate_size`` of blocks, and the number of listed kinds of blocks."""
    sizes, kinds = fields.get("intermediate_size"), fields.get("layers_block_type")
    if isinstance(kinds, list):
        fields = {"num_hidden_layers": len(kinds), **fields}
    return {**fields, "intermediate_size": max(sizes, default=0)} if isinstance(sizes, list) else fields


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
    """UserError for all but text decoders, dense or of known experts, unquantized or in bitsandbytes' NF4."""
    kind = config.get("model_type") or "this model"
    for keys, what in (
        (MULTIMODAL_KEYS, f"{kind} is multimodal, and its config.json does not say which part is the text decoder"),
        (
            CROSS_ATTENTION_KEYS,
            f"{kind} has blocks that attend to images only: text skips them, and training would leave them unchanged or"
            " let them decay",
        ),
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
    if families.num_experts(config) and (reason := families.why_no_experts(config)):
        raise UserError(
            f"{kind} is a mixture of experts that cannot be trained here",
            where=str(path),
            why=reason,
            fix=f"use another mixture, such as {families.EXPERT_EXAMPLES}, or a dense text model",
        )
    if reason := families.why_no_training(config):
        fix = f"use another text model, such as {families.EXAMPLES}"
        raise UserError(f"{kind} cannot be trained here", where=str(path), why=reason, fix=fix)
    refuse_other_quantization(config, path)
    given = {"intermediate_size": config.get("moe_intermediate_size")} | dict(config)
    missing = [key for key in ("model_type", *NEEDED_KEYS) if not given.get(key)]
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
    wrong = [f"{key}: {config[key]!r}" for key in NEEDED_KEYS if key in config and not isinstance(config[key], int)]
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


ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
STATE_LAYERS = {"linear_attention", "conv", "mamba", "attention", "hybrid"}
PROBE_VERSION = "3"  # another one asks again
TIMEOUT_S = 300.0  # most of it for importing torch from a cold disk


def judge_packing(config: RunConfig, model: ModelFacts, report: Callable[[str], Any]) -> ModelFacts:
    """``model`` with ``packs`` and ``packing_reason``, where packing is on. UserError if it cannot be trained."""
    if config.data.packing is False:
        return model
    raw = Path(model.folder, CONFIG_FILE).read_bytes()
    fields = json.loads(raw)
    family = families.find(model.model_type)
    if family.why_unpacked:
        return model.model_copy(update={"packs": False, "packing_reason": family.why_unpacked})
    if _is_known(family, fields, config.model.trust_remote_code):
        reason = f"packing is verified for {model.model_type}"
        return model.model_copy(update={"packs": True, "packing_reason": reason})
    kept = Path(config.data.cache).expanduser() / "packing" / f"{_digest(raw)}.json"
    verdict = read_json(kept)
    if not isinstance(verdict, dict):
        report(f"packing: {model.model_type} was not measured to pack; trying a shrunken copy")
        verdict = _probe(model.folder, config.model.trust_remote_code)
        if "crashed" not in verdict:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, verdict)
            except OSError as error:
                report(f"note: the verdict could not be saved; the next run tries again: {error}")
    if not verdict["trains"]:
        raise UserError(
            f"{model.model_type} cannot be trained here",
            where=str(Path(model.folder, CONFIG_FILE)),
            why=verdict["reason"],
            fix="use another model; these families were measured: " + ", ".join(families.measured_types()),
        )
    return model.model_copy(update={"packs": verdict["packs"], "packing_reason": verdict["reason"]})


def _is_known(family: families.Family, fields: dict[str, Any], trust_remote_code: bool) -> bool:
    """Whether this config.json is of a family that was measured to pack, with no code and no layers of its own."""
    if not (families.was_measured(family) and family.packs) or (trust_remote_code and "auto_map" in fields):
        return False
    if "text_config" in fields and not families.find(fields).packs:
        return False
    known = ATTENTION_LAYERS | STATE_LAYERS if family.mixers else ATTENTION_LAYERS
    return not set(fields.get("layer_types") or ()) - known


def _probe(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """The verdict of a fresh process. If it crashes, nothing is packed; the loaded model is checked in any case."""
    command = [sys.executable, "-m", "manyhands.model.probe", folder]
    command += ["--trust-remote-code"] if trust_remote_code else []
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {TIMEOUT_S:.0f} s"
    except (ValueError, IndexError) as error:
        why = f"its answer cannot be read: {error}"
    return {"trains": True, "packs": False, "reason": f"a shrunken copy could not be tried ({why})", "crashed": True}


def _digest(raw_config: bytes) -> str:
    installed = (families.installed_version(package) for package in ("manyhands", "transformers", "torch"))
    return hashlib.sha256("|".join((PROBE_VERSION, *installed)).encode() + raw_config).hexdigest()[:16]
