"""Reads a run file (YAML, TOML, or JSON with comments) into a mapping. Knows the three syntaxes, not the schema.

YAML follows the rules of YAML 1.2, as people expect: ``1e-4`` is a number, ``no`` and ``on`` are strings, ``010`` is
ten, dates are strings. A duplicate key is an error in every syntax. Size, number of values (YAML aliases repeat whole
branches) and depth of nesting are limited.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from manyhands.config.lines import blank_json_comments, json_lines, toml_lines, yaml_lines
from manyhands.core.errors import UserError
from manyhands.core.files import describe_json_fault

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".json.gz")
MAX_BYTES = 2 << 20  # PyYAML reads about 100 kB per second
MAX_VALUES = 100_000  # with aliases expanded
MAX_DEPTH = 60
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # not allowed in file names and in UTF-8 text
CORE_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


@dataclass(frozen=True)
class ParsedFile:
    """A run file's content. ``lines``: of each dotted key. ``files``: of keys from included ones. ``text``: as read."""

    mapping: dict[str, Any]
    where: str
    lines: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    text: str = ""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2; collects duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rsplit(":", 1)[-1] in CORE_TAGS
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_yaml_int(self, node: yaml.Node) -> int:
        return int(str(self.construct_scalar(node)), 10)  # type: ignore[arg-type]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, bool] = {}  # and whether the key has no value: then a second one without is the same
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            empty = value_node.tag == "tag:yaml.org,2002:null"
            if key_node.value in seen and not (empty and seen[key_node.value]):
                mark = key_node.start_mark
                self.duplicates.append(
                    f"line {mark.line + 1}, column {mark.column + 1}: duplicate key `{key_node.value}`"
                )
            seen[key_node.value] = empty
        return super().construct_mapping(node, deep)

    def get_single_node(self) -> yaml.Node | None:
        """The document, if it has few enough values; merges (``<<``) copy values during construction."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node


def _count_values(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Values below a node, with aliases expanded. ``counted`` has None for a node that is being counted."""
    if id(node) in counted:
        number = counted[id(node)]
        if number is None:
            raise yaml.constructor.ConstructorError(
                None, None, "an alias (*) refers to a value that contains it", node.start_mark
            )
        return number
    counted[id(node)] = None
    number = 1
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            number += sum(_count_values(part, counted) for part in (item if isinstance(item, tuple) else (item,)))
    if number > MAX_VALUES:
        problem = f"its aliases (*) expand to more than {MAX_VALUES:,} values"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    counted[id(node)] = number
    return number


def _checked(kind: str, construct: Callable[[Any, Any], Any]) -> None:
    """Makes a tagged scalar with a wrong value (``!!bool maybe``) an error in the file."""

    def check(loader: _Loader, node: yaml.ScalarNode) -> Any:
        try:
            return construct(loader, node)
        except (KeyError, ValueError, AttributeError):
            raise yaml.constructor.ConstructorError(
                None, None, f"{str(node.value)[:40]!r} is not a {kind}", node.start_mark
            ) from None

    _Loader.add_constructor(f"tag:yaml.org,2002:{kind}", check)


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first) or [""])


_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("null", "~|null|Null|NULL", "~nN")
_resolve("null", "", "")
_resolve("int", "[-+]?[0-9]+", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_resolve("merge", "<<", "<")
_checked("int", _Loader.construct_yaml_int)
_checked("bool", _Loader.construct_yaml_bool)
_checked("float", _Loader.construct_yaml_float)


_RULES = (yaml.SafeDumper.yaml_implicit_resolvers, _Loader.yaml_implicit_resolvers)


class RunFileDumper(yaml.SafeDumper):
    """Quotes what PyYAML's own rules take for text, and ours for a number: 2e-5, 08."""

    yaml_implicit_resolvers = {
        first: [one for rules in _RULES for one in rules.get(first, ())] for first in {*_RULES[0], *_RULES[1]}
    }


def dump_yaml(value: Any, **style: Any) -> str:
    """YAML that ``parse_yaml_value`` reads as this value."""
    return str(yaml.dump(value, Dumper=RunFileDumper, **({"allow_unicode": True} | style)))


def parse_or_text(text: str) -> Any:
    """The value as ``parse_yaml_value`` reads it, else the text itself."""
    try:
        return parse_yaml_value(text)
    except ValueError:
        return text


def parse_yaml_value(text: str) -> Any:
    """One value in the file's syntax (``1e-4``, ``[q_proj, v_proj]``, ``true``). Raises ``ValueError``."""
    try:
        return _copy_plain(_Loader(text).get_single_data())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def read_run_file(path: Path) -> ParsedFile:
    """Reads a run file. Raises ``UserError`` with line and column of a syntax error."""
    text = _read_text(path)
    where, kind = str(path), {".toml": "TOML", ".json": "JSON"}.get(path.suffix.lower(), "YAML")
    try:
        data, lines = {
            "YAML": _read_yaml,
            "TOML": lambda text, where: (tomllib.loads(text), toml_lines(text)),
            "JSON": _read_json,
        }[kind](text, where)
    except (RecursionError, ValueError) as error:  # of TOML, where the message holds line and column
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"the run file is not valid {kind}", where=where, why=why) from None
    if data is None or data == {}:
        raise UserError("the run file is empty", where=where, fix="`manyhands init` writes a commented one")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else "single value"
        raise UserError(
            f"the run file is a {kind}, not sections with keys",
            where=where,
            fix="start it with `model:` and `data:`; a file of rows is named in data.train",
        )
    try:
        return ParsedFile(_copy_plain(data), where, lines, text=text)
    except ValueError as error:
        raise UserError("the run file cannot be used", where=where, why=str(error)) from None


def _copy_plain(value: Any, depth: int = 1) -> Any:
    """A copy in which no list or mapping is shared, as they are with YAML aliases. Raises ``ValueError``."""
    if depth > MAX_DEPTH:
        raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {_copy_plain(key, depth + 1): _copy_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_plain(item, depth + 1) for item in value]
    if isinstance(value, str) and (bad := NO_TEXT.search(value)):
        raise ValueError(f"{value[:40]!a} contains the invalid character {bad[0]!a}")
    return value


def _read_text(path: Path) -> str:
    if os.path.isdir(path):
        raise _explain_folder(path)
    if path.suffix.lower() not in SUFFIXES:
        raise _explain_name(path)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(
                "this is not a regular file",
                where=str(path),
                why="it is a pipe, a socket or a device",
                fix="give a run file",
            )
        if path.stat().st_size > MAX_BYTES:
            why = f"it has {path.stat().st_size:,} bytes, and the limit is {MAX_BYTES:,}"
            raise UserError(
                "the run file is too large",
                where=str(path),
                why=why,
                fix="put rows into a data file and name it in data.train",
            )
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError("the run file does not exist", where=str(path), fix=_run_files(path.parent)) from None
    except UnicodeDecodeError as error:
        raise UserError(
            "the run file is not UTF-8 text", where=f"{path}, byte {error.start}", fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError("the run file cannot be read", where=str(path), why=reason) from None


def _run_files(folder: Path) -> str:
    """Which run files are in a folder, or how to get one."""
    files = folder.glob("*") if folder.is_dir() else ()
    there = sorted(str(p) for p in files if p.suffix in (".yaml", ".yml", ".toml") and p.name != "pyproject.toml")[:10]
    return f"run files there: {', '.join(there)}" if there else "`manyhands init` writes one"


def _explain_folder(path: Path) -> UserError:
    if (path / "run.json").is_file():
        what, fix = "a run's folder", f"give its run file; {path / 'run.json'} is the run as it was started"
    elif (path / "config.json").is_file():
        what, fix = (
            "a model's folder",
            "name it in model.name; `manyhands init --model FOLDER --data FILE` writes a run file",
        )
    elif any(file.name.lower().removesuffix(".gz").endswith(DATA_SUFFIXES) for file in path.glob("*")):
        what, fix = "a folder of data", _name_data(path)
    else:
        what, fix = "a folder", f"give a .yaml, .toml or .json file; {_run_files(path)}"
    return UserError(f"this is {what}, not a run file", where=str(path), fix=fix)


def _explain_name(path: Path) -> UserError:
    """What is wrong with a run file of which the name has no ending of one."""
    text = str(path)
    if os.path.exists(path):
        if path.name.lower().removesuffix(".gz").endswith(DATA_SUFFIXES):
            return UserError("this is a data file, not a run file", where=text, fix=_name_data(path))
        return UserError(f"a run file ends in {', '.join(SUFFIXES)}", where=text, fix="rename it, or give another file")
    if "=" in text:
        return UserError(
            "no run file is given",
            where="command line",
            why=f"{text} sets a key, and it stands where the run file is expected",
            fix=f"give the run file first: manyhands train RUN.yaml {text}; {_run_files(Path())}",
        )
    model = f"; of a model: --model {text} --data FILE" if re.fullmatch(r"[\w.-]+/[\w.-]+", text) else ""
    return UserError("the run file does not exist", where=text, fix=_run_files(path.parent) + model)


def _name_data(path: Path) -> str:
    return (
        f"name it in data.train, or write --data {path} with --model OWNER/NAME; `manyhands init --data {path}` writes "
        "a run file"
    )


def _read_yaml(text: str, where: str) -> tuple[Any, dict[str, int]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        why = error.problem or str(error)
        fix = (
            "indent with spaces, YAML allows no tabs"
            if mark is not None and "\\t" in why
            else "check the lines above it, too"
        )
        if isinstance(error, yaml.constructor.ConstructorError):  # the syntax is right, a value is not
            fix = "write the value without a tag (!!) or alias (*)"
        raise UserError("the run file is not valid YAML", where=at, why=why, fix=fix) from None
    except yaml.reader.ReaderError as error:
        at = f"{where}, line {text.count(chr(10), 0, error.position) + 1}"
        raise UserError(
            "the run file contains a character that YAML does not allow", where=at, why=error.reason
        ) from None
    _refuse_duplicates(loader.duplicates, where)
    return data, yaml_lines(node)


def _read_json(text: str, where: str) -> tuple[Any, dict[str, int]]:
    duplicates: list[str] = []

    def keep_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [
            *{name for name, value in pairs if value is None},
            *(name for name, value in pairs if value is not None),
        ]
        duplicates.extend(f"duplicate key `{name}`" for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    bare = blank_json_comments(text)
    if not bare.strip():
        return None, {}
    try:
        data = json.loads(bare, object_pairs_hook=keep_unique)
    except json.JSONDecodeError as error:
        at = f"{where}, line {error.lineno}, column {error.colno}"
        rows = "a file of rows (JSON lines) is named in data.train" if error.msg == "Extra data" else ""
        raise UserError("the run file is not valid JSON", where=at, why=describe_json_fault(error), fix=rows) from None
    _refuse_duplicates(duplicates, where)
    return data, json_lines(text)


def _refuse_duplicates(duplicates: list[str], where: str) -> None:
    if duplicates:
        raise UserError(
            "the run file has duplicate keys", where=where, details=duplicates[:20], fix="remove one of each"
        )
