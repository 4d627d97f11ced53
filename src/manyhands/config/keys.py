"""The schema as a flat table of dotted keys, and its explanations for people and editors. Reads no file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from manyhands.config.read import dump_yaml
from manyhands.config.schema import RunConfig, Section, Source
from manyhands.config.text import nearest_name, show


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
        """The alternatives of the JSON schema."""
        return self.schema.get("anyOf", [self.schema])

    @property
    def takes_text(self) -> bool:
        """Whether any text is a valid value, so that ``name=2024`` on the command line is the text 2024."""
        free_text = any(
            kind.get("type") == "string" and "enum" not in kind and "const" not in kind for kind in self.kinds
        )
        return free_text and all(kind.get("type") in ("string", "null", "array") for kind in self.kinds)

    @property
    def takes_list(self) -> bool:
        return any(kind.get("type") == "array" for kind in self.kinds)

    @property
    def takes_mapping(self) -> bool:
        return any(kind.get("type") == "object" for kind in self.kinds)

    @property
    def maps_to_text(self) -> bool:
        return any(_inner(kind).get("type") == "string" for kind in self.kinds)

    def keeps(self, value: Any) -> bool:
        """Whether a value of the command line, parsed, is meant, and not its text."""
        if not self.takes_text or value is None or (self.takes_list and isinstance(value, list)):
            return True
        return self.path in SOURCE_LISTS and isinstance(value, dict)  # as in a file, which is told to write a list


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


def hint_in_source(place: str, name: str) -> str:
    """What to write in place of an unknown key of the source at ``place``: a phrase that follows the key's name."""
    if near := nearest_name(name, source_table()):
        return f": did you mean `{place}.{near}`? {source_table()[near].sentence}"
    return f"; a source has {', '.join(source_table())}"


def wrong_value(path: str, key: Key, value: Any, hint: str | None = None) -> str:
    """A finding: the value, what is allowed, and the key's description. ``hint``: what to write for this value."""
    quote = " Quote it." if key.takes_text and isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    if isinstance(value, dict) and key.maps_to_text:
        no_text = [show(inner) for inner in value.values() if not isinstance(inner, str)]
        quote = f" Quote {', '.join(no_text)}." if no_text else ""
    return f"`{path}`: got {show(value)}{f' ({hint})' if hint else ''}, allowed: {key.allowed}.{quote} {key.sentence}"


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
        return _allowed_mapping(prop)
    if kind == "string":
        return f"text that matches {prop['pattern']}" if "pattern" in prop else "text"
    if kind in ("integer", "number"):
        noun = "an integer" if kind == "integer" else "a number"
        bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        limits = [f"{sign} {prop[name]:g}" for name, sign in bounds if name in prop]
        return " ".join((noun, " and ".join(limits))).strip()
    return {"boolean": "`true` or `false`", "null": "`null`"}.get(str(kind), "a value")


def _allowed_mapping(prop: dict[str, Any]) -> str:
    inner, text = _inner(prop), "a mapping, such as {a: b}"
    text += f", of {_allowed(inner)}" if inner else ""
    names = "".join(f", with names that match {pattern}" for pattern in prop.get("patternProperties", ()))
    return text + (f", for {', '.join(prop['propertyNames']['enum'])}" if "propertyNames" in prop else names)


def _inner(prop: dict[str, Any]) -> dict[str, Any]:
    """The schema of a mapping's values; empty if any will do."""
    schemas = [*prop.get("patternProperties", {}).values(), prop.get("additionalProperties")]
    return next((schema for schema in schemas if isinstance(schema, dict)), {})


_IN_SOURCE = re.compile(r"data\.(?:train|validation)(?:\[\d*\])?\.(\w+)")


def all_keys() -> list[str]:
    """Dotted paths of every key, in the schema's order."""
    return list(table())


def explain(key: str) -> str:
    """Description, allowed values and default of a key, or of every key of a section. Raises ``KeyError``."""
    if key in sections():
        inner = [name for name in table() if name.startswith(key + ".")]
        return "\n\n".join([f"{key}: {sections()[key].__doc__}", *(explain(name) for name in inner)])
    in_source = _IN_SOURCE.fullmatch(key)
    if in_source and in_source[1] in source_table():
        return _explain_entry(key, source_table()[in_source[1]])
    text = _explain_entry(key, table()[key])
    if key in SOURCE_LISTS:
        inner = [
            f"    {name}: {entry.sentence} ({entry.allowed}; default: {_default(entry)})"
            for name, entry in source_table().items()
        ]
        text = "\n".join([text, "  keys of a source in the list:", *inner])
    return text


def _explain_entry(key: str, entry: Key) -> str:
    return f"{key}\n  {entry.sentence}\n  allowed: {entry.allowed}\n  default: {_default(entry)}"


def default_text(key: str) -> str:
    """A key's default in the run file's syntax; ``required`` if it has none."""
    return _default(table()[key])


def _default(entry: Key) -> str:
    if entry.path == "name" and entry.field is RunConfig.model_fields["name"]:
        return "the run file's name"
    return "required" if entry.required else show(entry.default)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run file, for editors. ``name`` is not required there: it defaults to the file's name."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "manyhands run file"
    schema["required"] = [name for name in schema["required"] if name != "name"]
    return schema


def commented_yaml(values: Mapping[str, Any]) -> str:
    """A run file with every key: ``values`` (dotted paths) set, others commented out. Raises ``KeyError``."""
    unknown = set(values) - set(table())
    if unknown:
        raise KeyError(", ".join(sorted(unknown)))
    lines = ["# A manyhands run: `manyhands plan FILE` shows what it would do, `manyhands train FILE` runs it."]
    lines += ["# Commented keys show their defaults.", ""]
    lines += [line for name in ("name", "task", "seed") for line in _entry(name, values, "")]
    for section, kind in sections().items():
        inner = [key for key in table() if key.startswith(section + ".")]
        used = any(key in values for key in inner)
        lines += ["", f"# {(kind.__doc__ or '').splitlines()[0]}", f"{section}:" if used else f"# {section}:"]
        lines += [line for key in inner for line in _entry(key, values, "  ")]
    return "\n".join(lines) + "\n"


def _entry(key: str, values: Mapping[str, Any], indent: str) -> list[str]:
    leaf = key.rsplit(".", 1)[-1]
    sentence = table()[key].sentence
    if key in values:
        return [f"{indent}# {sentence}", f"{indent}{leaf}: {_scalar(values[key])}"]
    default = "" if key == "name" else " null" if table()[key].default is None else " " + _scalar(table()[key].default)
    return [f"{indent}# {leaf}:{default}  # {sentence}"]


def _scalar(value: Any) -> str:
    """One value in YAML's flow style, on one line, quoted if necessary."""
    text = dump_yaml(value, default_flow_style=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...").strip()
