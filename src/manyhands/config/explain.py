"""The schema for people and editors: the description of a key, all keys, the JSON schema, a commented run file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from manyhands.config import keys
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError

_IN_SOURCE = re.compile(r"data\.(?:train|validation)(?:\[\d*\])?\.(\w+)")


def all_keys() -> list[str]:
    """Dotted paths of every key, in the schema's order."""
    return list(keys.table())


def explain(key: str) -> str:
    """Description, allowed values and default of a key, or of every key of a section.

    Raises ``UserError`` with the most similar name.
    """
    if key in keys.sections():
        inner = [name for name in keys.table() if name.startswith(key + ".")]
        return "\n\n".join([f"{key}: {keys.sections()[key].__doc__}", *(explain(name) for name in inner)])
    in_source = _IN_SOURCE.fullmatch(key)
    if in_source and in_source[1] in keys.source_table():
        return _explain_entry(key, keys.source_table()[in_source[1]])
    if key not in keys.table():
        raise UserError(f"there is no key `{key}`", fix=keys.hint(key).removeprefix(": ").removeprefix("; "))
    text = _explain_entry(key, keys.table()[key])
    if key in keys.SOURCE_LISTS:
        inner = [
            f"    {name}: {entry.sentence} ({entry.allowed}; default: {_default(entry)})"
            for name, entry in keys.source_table().items()
        ]
        text = "\n".join([text, "  keys of a source in the list:", *inner])
    return text


def _explain_entry(key: str, entry: keys.Key) -> str:
    return f"{key}\n  {entry.sentence}\n  allowed: {entry.allowed}\n  default: {_default(entry)}"


def default_text(key: str) -> str:
    """A key's default in the run file's syntax; ``required`` if it has none."""
    return _default(keys.table()[key])


def _default(entry: keys.Key) -> str:
    if entry.path == "name" and entry.field is RunConfig.model_fields["name"]:
        return "the run file's name"
    return "required" if entry.required else keys.show(entry.default)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run file, for editors. ``name`` is not required there: it defaults to the file's name."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "manyhands run file"
    schema["required"] = [name for name in schema["required"] if name != "name"]
    return schema


def commented_yaml(values: Mapping[str, Any]) -> str:
    """A run file with every key: those in ``values`` (dotted paths) set, the others commented out at their defaults.

    Raises ``KeyError`` for a path that the schema does not know.
    """
    unknown = set(values) - set(keys.table())
    if unknown:
        raise KeyError(", ".join(sorted(unknown)))
    lines = ["# A manyhands run: `manyhands plan FILE` shows what it would do, `manyhands train FILE` runs it."]
    lines += ["# Commented keys show their defaults.", ""]
    lines += [line for name in ("name", "task", "seed") for line in _entry(name, values, "")]
    for section, kind in keys.sections().items():
        inner = [key for key in keys.table() if key.startswith(section + ".")]
        used = any(key in values for key in inner)
        lines += ["", f"# {(kind.__doc__ or '').splitlines()[0]}", f"{section}:" if used else f"# {section}:"]
        lines += [line for key in inner for line in _entry(key, values, "  ")]
    return "\n".join(lines) + "\n"


def _entry(key: str, values: Mapping[str, Any], indent: str) -> list[str]:
    leaf = key.rsplit(".", 1)[-1]
    sentence = keys.table()[key].sentence
    if key in values:
        return [f"{indent}# {sentence}", f"{indent}{leaf}: {_scalar(values[key])}"]
    default = (
        ""
        if key == "name"
        else " null"
        if keys.table()[key].default is None
        else " " + _scalar(keys.table()[key].default)
    )
    return [f"{indent}# {leaf}:{default}  # {sentence}"]


def _scalar(value: Any) -> str:
    """One value in YAML's flow style, on one line, quoted if necessary."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
