"""One run file (YAML, TOML or JSON) to a plain mapping. Knows the three syntaxes, not the schema.

YAML is read by the rules of YAML 1.2, as people expect it: ``1e-4`` is a number, ``no`` and ``on`` are text, ``010`` is
ten, dates are text. A key given twice is an error in every syntax.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from manyhands.errors import UserError

SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True)
class Source:
    """What a run file says. ``lines`` gives the line of each dotted key where the syntax tells (YAML)."""

    mapping: dict[str, Any]
    where: str
    lines: dict[str, int] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars on PyYAML's safe loader; collects keys that are given twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_yaml_int(self, node: yaml.Node) -> int:
        return int(str(self.construct_scalar(node)), 10)  # type: ignore[arg-type]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen:
                mark = key_node.start_mark
                self.duplicates.append(f"line {mark.line + 1}, column {mark.column + 1}: `{key_node.value}` is given twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first) or [""])


_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("null", "~|null|Null|NULL", "~nN")
_resolve("null", "", "")
_resolve("int", "[-+]?[0-9]+", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_resolve("merge", "<<", "<")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml_value(text: str) -> Any:
    """One value as it could stand in the file (``1e-4``, ``[q_proj, v_proj]``, ``true``). Raises ``ValueError``."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def read_source(path: Path) -> Source:
    """Reads a run file. Raises ``UserError`` with line and column where the syntax is broken."""
    text = _read_text(path)
    where = str(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        data, lines = _read_yaml(text, where)
    else:
        data, lines = (_read_toml(text, where) if path.suffix.lower() == ".toml" else _read_json(text, where)), {}
    if data is None or data == {}:
        raise UserError("the run file is empty", where=where, fix="`manyhands init` writes a commented one")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else "single value"
        raise UserError(f"the run file holds a {kind}, not sections with keys", where=where, fix="start it with `model:` and `data:`")
    return Source(data, where, lines)


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise UserError("this is a folder, not a run file", where=str(path), fix="name a .yaml, .toml or .json file")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"a run file ends in {', '.join(SUFFIXES)}", where=str(path), fix="rename it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        files = path.parent.glob("*") if path.parent.is_dir() else ()
        there = sorted(str(p) for p in files if p.suffix in (".yaml", ".yml", ".toml") and p.name != "pyproject.toml")[:10]
        fix = f"run files there: {', '.join(there)}" if there else "`manyhands init` writes one"
        raise UserError("the run file does not exist", where=str(path), fix=fix) from None
    except UnicodeDecodeError as error:
        raise UserError("the run file is not UTF-8 text", where=f"{path}, byte {error.start}", fix="save it as UTF-8") from None
    except OSError as error:
        raise UserError("the run file cannot be read", where=str(path), why=error.strerror or str(error)) from None


def _read_yaml(text: str, where: str) -> tuple[Any, dict[str, int]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        tab = mark is not None and "\\t" in (error.problem or "")
        fix = "indent with spaces, YAML allows no tabs" if tab else "see the lines just above as well"
        raise UserError("the run file is not valid YAML", where=at, why=error.problem or str(error), fix=fix) from None
    except yaml.reader.ReaderError as error:
        at = f"{where}, line {text.count(chr(10), 0, error.position) + 1}"
        raise UserError("the run file holds a character that YAML does not allow", where=at, why=error.reason) from None
    except (RecursionError, ValueError) as error:
        raise UserError("the run file is not valid YAML", where=where, why=str(error)) from None
    _refuse_duplicates(loader.duplicates, where)
    return data, _key_lines(node)


def _key_lines(root: yaml.Node | None) -> dict[str, int]:
    """Lines of the keys of the first two levels, and of the items of lists below them (``data.train[1].weight``)."""
    lines: dict[str, int] = {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        lines[str(key.value)] = key.start_mark.line + 1
        for inner, inner_value in value.value if isinstance(value, yaml.MappingNode) else ():
            path = f"{key.value}.{inner.value}"
            lines[path] = inner.start_mark.line + 1
            for index, item in enumerate(inner_value.value if isinstance(inner_value, yaml.SequenceNode) else ()):
                lines[f"{path}[{index}]"] = item.start_mark.line + 1
                for leaf, _ in item.value if isinstance(item, yaml.MappingNode) else ():
                    lines[f"{path}[{index}].{leaf.value}"] = leaf.start_mark.line + 1
    return lines


def _read_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # the message holds line and column
        raise UserError("the run file is not valid TOML", where=where, why=str(error)) from None
    except RecursionError:
        raise UserError("the run file is not valid TOML", where=where, why="it is nested too deeply") from None


def _read_json(text: str, where: str) -> Any:
    duplicates: list[str] = []

    def keep_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        duplicates.extend(f"`{name}` is given twice" for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    if not text.strip():
        return None
    try:
        data = json.loads(text, object_pairs_hook=keep_unique)
    except json.JSONDecodeError as error:
        at = f"{where}, line {error.lineno}, column {error.colno}"
        raise UserError("the run file is not valid JSON", where=at, why=error.msg) from None
    except (RecursionError, ValueError) as error:
        raise UserError("the run file is not valid JSON", where=where, why=str(error)) from None
    _refuse_duplicates(duplicates, where)
    return data


def _refuse_duplicates(duplicates: list[str], where: str) -> None:
    if duplicates:
        raise UserError("a key is given twice in the run file", where=where, details=duplicates[:20], fix="keep one of them")
