"""A run file and overrides to a ``RunConfig``, or one ``UserError`` with everything that is wrong.

Knows the schema and the file; not what is true of the model, the data or the machine (that is ``facts``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.config.checks import check
from manyhands.config.keys import nearest, sections, show, table
from manyhands.config.read import parse_yaml_value, read_source
from manyhands.config.schema import RunConfig
from manyhands.errors import UserError

PATH_KEYS = ("model.name", "model.chat_template", "data.train", "data.validation")
MAX_FINDINGS = 20


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML, TOML or JSON run file and applies ``section.key=value`` overrides, the later one winning.

    Override values are read as YAML (``1e-4``, ``[q_proj, v_proj]``), except that keys which take any text take it as it
    stands. ``name`` defaults to the file's stem. Relative paths are taken from the run file's folder where they exist
    there, and else left as they are. Raises ``UserError`` with all findings at once.
    """
    path = Path(path)
    source = read_source(path)
    mapping = deepcopy(source.mapping)
    origins = {key: f"line {line}" for key, line in source.lines.items()}
    findings = _apply_overrides(mapping, overrides, origins)
    if "name" not in mapping:
        mapping["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    _resolve_paths(mapping, Path(os.path.abspath(path)).parent)
    return _validate(mapping, source.where, origins, findings)


def config_from_mapping(mapping: Mapping[str, Any], where: str = "the given configuration") -> RunConfig:
    """Validates nested keys (as in a run file, ``name`` included). Raises ``UserError`` with all findings at once."""
    return _validate(deepcopy(dict(mapping)), where, {}, [])


def _apply_overrides(mapping: dict[str, Any], overrides: Sequence[str], origins: dict[str, str]) -> list[str]:
    """Writes the overrides into ``mapping``; returns what is wrong with them."""
    findings = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip().removeprefix("--")
        key = table().get(path)
        if not equals:
            findings.append(f"command line: {show(override)} is not an override; write section.key=value, such as batch.rows=32")
        elif path in sections():
            findings.append(f"command line: `{path}` is a section; write {path}.key=value, `manyhands config {path}` lists its keys")
        elif key is None:
            findings.append(f"command line: {_unknown(path)}")
        else:
            section, _, leaf = path.rpartition(".")
            target = mapping
            if section:
                if mapping.get(section) is None:
                    mapping[section] = {}
                target = mapping[section]
            if not isinstance(target, dict):
                continue  # the file's section is no mapping: that is reported
            try:
                value = parse_yaml_value(text)
            except ValueError:
                value = text
            if key.takes_text and value is not None and not (isinstance(value, str) and text.lstrip()[:1] in "'\""):
                value = text
            target[leaf] = value
            origins[path] = "command line"
    return findings


def _resolve_paths(mapping: dict[str, Any], folder: Path) -> None:
    """Makes paths absolute that exist beside the run file, so that the run means the same from every folder."""
    for path in PATH_KEYS:
        section, _, leaf = path.partition(".")
        keys = mapping.get(section)
        value = keys.get(leaf) if isinstance(keys, dict) else None
        if not isinstance(value, str) or not value:
            continue
        try:
            candidate = folder / Path(value).expanduser()
            if candidate.is_dir() if path == "model.name" else candidate.exists():
                keys[leaf] = os.path.normpath(candidate)  # type: ignore[index]
        except (OSError, ValueError, RuntimeError):  # a chat template's text is no file name
            continue


def _validate(mapping: dict[str, Any], where: str, origins: Mapping[str, str], findings: list[str]) -> RunConfig:
    findings = findings + _drop_unknown(mapping, origins)
    try:
        config = RunConfig.model_validate(mapping)
    except ValidationError as error:
        findings += _drop_invalid(mapping, error, origins)
        try:
            config = RunConfig.model_validate(mapping)
        except ValidationError:  # too broken to look for contradictions as well
            raise _error(findings, where) from None
    findings += check(config)
    if findings:
        raise _error(findings, where)
    return config


def _error(findings: list[str], where: str) -> UserError:
    more = len(findings) - MAX_FINDINGS
    details = findings[:MAX_FINDINGS] + ([f"and {more} more"] if more > 0 else [])
    what = "the run file has an error" if len(findings) == 1 else f"the run file has {len(findings)} errors"
    return UserError(what, where=where, details=details, fix="mend the keys above; `manyhands config KEY` explains a key")


def _drop_unknown(mapping: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Removes what the schema does not know, and truth values where a number or text belongs (pydantic takes True for 1)."""
    findings = []
    for name in list(mapping):
        if name not in sections():
            findings += _drop_wrong_key(mapping, name, str(name), origins)
            continue
        keys = mapping[name]
        if keys is None:  # `batch:` with nothing below
            keys = mapping[name] = {}
        if not isinstance(keys, dict):
            findings.append(_prefix(name, origins) + f"`{name}` is a section with keys, got {show(keys)}")
            mapping[name] = {}
            continue
        for leaf in list(keys):
            findings += _drop_wrong_key(keys, leaf, f"{name}.{leaf}", origins)
    for name in ("model", "data"):  # they hold required keys: each missing one is named, not its section
        mapping.setdefault(name, {})
    return findings


def _drop_wrong_key(keys: dict[str, Any], leaf: str, path: str, origins: Mapping[str, str]) -> list[str]:
    key = table().get(path) if isinstance(leaf, str) and "." not in leaf else None
    if key is None:
        value = keys.pop(leaf)
        finding = _prefix(path, origins) + _unknown(path)
        if path in table():  # `batch.rows: 8` at the top
            section, _, inner = path.partition(".")
            finding += f": keys are nested, write `{section}:` and below it `{inner}: {show(value)}`"
        return [finding]
    if isinstance(keys[leaf], bool) and "`true`" not in key.allowed:
        value = keys.pop(leaf)
        if key.required:
            keys[leaf] = "placeholder"
        return [_wrong_value(path, value, origins)]
    return []


def _drop_invalid(mapping: dict[str, Any], error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """Words for pydantic's findings, one for each key; takes the keys out so that the rest can still be checked."""
    findings: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        parts = [str(part) for part in item["loc"][:2]]
        path = next((p for p in (".".join(parts), parts[0]) if p in table()), ".".join(parts))
        if path in findings or path not in table():
            continue
        section, _, leaf = path.rpartition(".")
        keys = mapping[section] if section else mapping
        if item["type"] == "missing":
            findings[path] = f"`{path}` is missing. {table()[path].sentence}"
        else:
            findings[path] = _wrong_value(path, keys.pop(leaf), origins)
        if table()[path].required:
            keys[leaf] = "placeholder"
    return list(findings.values())


def _wrong_value(path: str, value: Any, origins: Mapping[str, str]) -> str:
    key = table()[path]
    quote = " Put it in quotes." if key.takes_text and isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return f"{_prefix(path, origins)}`{path}`: got {show(value)}, allowed: {key.allowed}.{quote} {key.sentence}"


def _prefix(path: str, origins: Mapping[str, str]) -> str:
    return f"{origins[path]}: " if path in origins else ""


def _unknown(path: str) -> str:
    near = nearest(path)
    if path in table():
        return f"unknown key `{path}`"
    if near is None:
        return f"unknown key `{path}`; `manyhands config` lists all keys"
    return f"unknown key `{path}`: did you mean `{near}`? {table()[near].sentence if near in table() else 'It is a section.'}"
