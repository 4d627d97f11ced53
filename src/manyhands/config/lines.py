"""The line of every key of a run file: ``data.train[1].weight`` is on line 7. For messages; reads no file.

YAML keeps marks; TOML and JSON are scanned for keys, strings and brackets alone, once their parsers have accepted them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

MAX_DEPTH = 8
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|//[^\n]*|/\*.*?\*/|\n|[^\s"{}\[\]:,/]+|/', re.DOTALL)
_TOML_KEY = re.compile(r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')""")
_TOML_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)


def yaml_lines(root: yaml.Node | None) -> dict[str, int]:
    """Lines of the keys of a YAML document, and of the items of its lists."""
    return dict(_yaml_lines(root, "", 0))


def _yaml_lines(node: yaml.Node | None, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    if depth > MAX_DEPTH:
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield path, key.start_mark.line + 1
            yield from _yaml_lines(value, path, depth + 1)
    elif isinstance(node, yaml.SequenceNode) and prefix:
        for index, item in enumerate(node.value):
            yield f"{prefix}[{index}]", item.start_mark.line + 1
            yield from _yaml_lines(item, f"{prefix}[{index}]", depth + 1)


def blank_json_comments(text: str) -> str:
    """``// ...`` and ``/* ... */`` outside of strings as spaces; every other character keeps its line and column."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return re.sub(r"[^\n]", " ", token) if token.startswith(("//", "/*")) else token

    return _JSON_TOKEN.sub(blank, text)


def json_lines(text: str) -> dict[str, int]:
    """Lines of the keys of a JSON document, and of the items of its lists."""
    lines: dict[str, int] = {}
    path: list[str | int] = []  # a name for each open mapping (of its key), a number for each open list
    line, name, wants_key = 1, "", False
    for token in _JSON_TOKEN.findall(text):
        if token == "\n":
            line += 1
            continue
        if token.startswith(("/*", "//")):
            line += token.count("\n")
            continue
        if path and isinstance(path[-1], int) and token not in ",]" and len(path) <= MAX_DEPTH:
            lines.setdefault(_spell(path), line)
        if token in "{[":
            path.append("" if token == "{" else 0)
            wants_key = token == "{"
        elif token in "}]":
            path = path[:-1]
            wants_key = False
        elif token == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            wants_key = bool(path) and isinstance(path[-1], str)
        elif token == ":":
            wants_key = False
        elif wants_key and token.startswith('"'):
            name = token[1:-1]
            path[-1] = name
            if len(path) <= MAX_DEPTH:
                lines.setdefault(_spell(path), line)
    return lines


def toml_lines(text: str) -> dict[str, int]:
    """Lines of the tables and keys of a TOML document (not of those inside inline tables)."""
    lines: dict[str, int] = {}
    table, counts = "", dict[str, int]()
    flat = _TOML_STRING.sub(
        lambda match: match[0] if "\n" not in match[0] else '""' + "\n" * match[0].count("\n"), text
    )
    depth = 0  # of the brackets of a value that spans lines
    for number, raw in enumerate(flat.split("\n"), 1):
        bare = _TOML_STRING.sub(lambda match: "_" * len(match[0]), raw)
        line = raw[: bare.index("#")] if "#" in bare else raw
        stripped = line.strip()
        if depth == 0 and stripped.startswith("["):
            is_list = stripped.startswith("[[")
            table = _toml_path(stripped.strip("[] \t"))
            if is_list:
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}[{counts[table]}]"
            lines.setdefault(table, number)
            continue
        if depth == 0 and "=" in bare and stripped:
            key = _toml_path(line[: bare.index("=")])
            parts = key.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(([table] if table else []) + parts[:end])
                lines.setdefault(path, number)
        value = bare[: bare.index("#")] if "#" in bare else bare
        depth = max(0, depth + value.count("[") + value.count("{") - value.count("]") - value.count("}"))
    return lines


def _toml_path(text: str) -> str:
    return ".".join(part.strip("\"'") for part in _TOML_KEY.findall(text))


def _spell(path: list[str | int]) -> str:
    spelled = ""
    for part in path:
        spelled += f"[{part}]" if isinstance(part, int) else (f".{part}" if spelled else part)
    return spelled
