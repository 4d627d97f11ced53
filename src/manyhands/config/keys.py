"""The schema as a flat table of dotted keys, in words: what each key allows, and which key somebody probably meant.

Knows the schema only; reads no file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from manyhands.config.schema import RunConfig, Section, Source

# What other tools call our keys; only ever used to suggest, never accepted.
SYNONYMS = {
    "batch_size": "batch.rows",
    "bf16": "model.dtype",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "eval_steps": "evaluate.every_steps",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_checkpointing": "parallel.recompute",
    "logging_steps": "log.every_steps",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_target_modules": "method.targets",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "schedule.name",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "batch.micro_rows",
    "model_name_or_path": "model.name",
    "num_epochs": "stop.epochs",
    "num_gpus": "parallel.gpus",
    "num_train_epochs": "stop.epochs",
    "output_dir": "output.dir",
    "per_device_train_batch_size": "batch.micro_rows",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "sequence_len": "data.max_length",
    "target_modules": "method.targets",
    "val_file": "data.validation",
}


@dataclass(frozen=True)
class Key:
    """One key of the run file. ``schema`` is its part of the JSON schema."""

    path: str
    field: FieldInfo
    schema: dict[str, Any]

    @property
    def sentence(self) -> str:
        return self.field.description or ""

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        return None if self.field.default is PydanticUndefined else self.field.default

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        return _allowed(self.schema)

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """The parts of the JSON schema that a value may fit."""
        return self.schema.get("anyOf", [self.schema])

    @property
    def takes_text(self) -> bool:
        """True where any text is a value, so that ``name=2024`` on the command line means the text 2024."""
        free_text = any(kind.get("type") == "string" and "enum" not in kind and "const" not in kind for kind in self.kinds)
        return free_text and all(kind.get("type") in ("string", "null", "array") for kind in self.kinds)

    @property
    def takes_list(self) -> bool:
        return any(kind.get("type") == "array" for kind in self.kinds)

    @property
    def takes_mapping(self) -> bool:
        return any(kind.get("type") == "object" for kind in self.kinds)


@cache
def sections() -> dict[str, type[Section]]:
    """The groups of keys, by name, in the schema's order."""
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


@cache
def table() -> dict[str, Key]:
    """Every key of the run file by its dotted path, in the schema's order."""
    schema = RunConfig.model_json_schema()
    keys = {}
    for name, field in RunConfig.model_fields.items():
        section = sections().get(name)
        if section is None:
            keys[name] = Key(name, field, schema["properties"][name])
            continue
        properties = schema["$defs"][section.__name__]["properties"]
        for inner, inner_field in section.model_fields.items():
            keys[f"{name}.{inner}"] = Key(f"{name}.{inner}", inner_field, properties[inner])
    return keys


SOURCE_LISTS = ("data.train", "data.validation")


@cache
def source_table() -> dict[str, Key]:
    """Every key of one source in a list of sources (``data.train``), by its name."""
    properties = Source.model_json_schema()["properties"]
    return {name: Key(name, field, properties[name]) for name, field in Source.model_fields.items()}


def nearest_in_source(name: str) -> str | None:
    """The key of a source that a misspelt one most likely means."""
    return nearest_name(name, source_table())


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The one of some names that a misspelt one most likely means; None if nothing is near."""
    close = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def wrong_value(path: str, key: Key, value: Any) -> str:
    """A finding: what was given, what is allowed, what the key means."""
    quote = " Put it in quotes." if key.takes_text and isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return f"`{path}`: got {show(value)}, allowed: {key.allowed}.{quote} {key.sentence}"


def nearest(path: str) -> str | None:
    """The key or section that a misspelt dotted path most likely means; None if nothing is near."""
    known = [*table(), *sections()]
    leaf = path.rsplit(".", 1)[-1].replace("-", "_").lower()
    section = path.split(".", 1)[0] if "." in path else ""
    if leaf in SYNONYMS:
        return SYNONYMS[leaf]
    if section in sections():  # a right section with a wrong key: look there first
        here = [key for key in table() if key.startswith(section + ".")]
        close = difflib.get_close_matches(f"{section}.{leaf}", here, n=1, cutoff=0.8)
        if close:
            return close[0]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return difflib.get_close_matches(path, same_leaf, n=1, cutoff=0.0)[0]
    close = difflib.get_close_matches(path.lower(), known, n=1, cutoff=0.7)
    if close:
        return close[0]
    leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(list(table()))}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def show(value: Any) -> str:
    """A value as the run file would write it, cut after 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    if isinstance(value, str) and text == f'"{value}"' and value:
        text = value
    return text if len(text) <= 60 else text[:57] + "..."


def _allowed(prop: dict[str, Any]) -> str:
    if "anyOf" in prop:
        return " or ".join(_allowed(kind) for kind in prop["anyOf"])
    if "const" in prop:
        return f"`{prop['const']}`"
    if "enum" in prop:
        return ", ".join(f"`{value}`" for value in prop["enum"])
    if "$ref" in prop:
        return f"sources with {', '.join(source_table())}"
    kind = prop.get("type")
    if kind == "array":
        return f"a list, such as [a, b], of {_allowed(prop['items'])}" if "items" in prop else "a list"
    if kind == "object":
        return "a mapping, such as {a: b}"
    if kind == "string":
        return f"text that matches {prop['pattern']}" if "pattern" in prop else "text"
    if kind in ("integer", "number"):
        noun = "a whole number" if kind == "integer" else "a number"
        bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        limits = [f"{sign} {prop[name]:g}" for name, sign in bounds if name in prop]
        return " ".join((noun, " and ".join(limits))).strip()
    return {"boolean": "`true` or `false`", "null": "`null`"}.get(str(kind), "a value")
