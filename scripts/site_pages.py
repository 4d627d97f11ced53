"""Pages of the documentation site that are made while it is built: the keys from the schema, the commands from the
command line, and each file of the repository that a page links to.

A hook of mkdocs (``mkdocs.yml``). Imports no torch.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

LINK = re.compile(r"(\]\()((?:\.\./)+[\w./-]+)((?:#[\w-]+)?\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json", ".md": "markdown"}


def keys_page() -> str:
    """Every key of a run file, by section: values, default, meaning."""
    from manyhands.config.keys import SOURCE_LISTS, all_keys, default_text, sections, source_table, table

    lines = ["# Keys of a run file", ""]
    lines += ["Made from the schema. `manyhands config KEY` shows one of them, `--schema` prints the JSON schema.", ""]
    lines += ["Any key can be set on the command line: `manyhands train run.yaml batch.samples=64`.", ""]
    groups: dict[str, list[str]] = {}
    for path in all_keys():
        groups.setdefault(path.split(".")[0] if "." in path else "", []).append(path)
    for section, paths in groups.items():
        lines += [f"## {section or 'The run'}", "", (sections()[section].__doc__ if section else "") or "", ""]
        rows = [(path, table()[path].allowed, f"`{default_text(path)}`", table()[path].sentence) for path in paths]
        lines += _table(rows)
    lines += ["## A source", "", f"One entry of the lists {' and '.join(f'`{name}`' for name in SOURCE_LISTS)}.", ""]
    found = [(name, key.allowed, _default(key), key.sentence) for name, key in source_table().items()]
    return "\n".join(lines + _table(found))


def _default(key: Any) -> str:
    from manyhands.config.text import show

    return "`required`" if key.required else f"`{show(key.default)}`"


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    cells = [" | ".join((f"`{path}`", *map(_cell, (allowed, default, text)))) for path, allowed, default, text in rows]
    return ["| key | values | default | meaning |", "|---|---|---|---|", *(f"| {line} |" for line in cells), ""]


def _cell(text: str) -> str:
    """Text for a table: code stays as it is, outside of it nothing is markup."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def commands_page() -> str:
    """Every command with its arguments and options, from the command line itself."""
    import typer

    from manyhands.cli.main import app

    lines = ["# Commands", "", "Made from the command line. Each command explains itself with `--help`.", ""]
    for name, command in _commands(typer.main.get_command(app), "manyhands"):
        context = typer.Context(command, info_name=name)
        lines += [f"## {name}", "", _cell(command.help or ""), "", "```text"]
        lines += [" ".join([name, *command.collect_usage_pieces(context)]), "```", ""]
        rows = [found for one in command.params if (found := one.get_help_record(context)) and one.name != "help"]
        if rows:
            lines += ["| | |", "|---|---|", *(f"| `{_plain(left)}` | {_cell(right)} |" for left, right in rows), ""]
    return "\n".join(lines)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for inner, command in group.commands.items():
        if not command.hidden:
            if hasattr(command, "commands"):
                yield from _commands(command, f"{name} {inner}")
            else:
                yield f"{name} {inner}", command


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"reference/keys.md": keys_page, "reference/commands.md": commands_page}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages, and a page for each file of the repository that a page links to."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path).read_text(encoding="utf-8") if page.abs_src_path else ""
        for _, target, _ in LINK.findall(text):
            path = _outside(page.src_uri, target)
            if path and f"files/{path}.md" not in files.src_uris:
                files.append(File.generated(config, f"files/{path}.md", content=show_file(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository lead to their pages."""
    here = posixpath.dirname(page.file.src_uri)

    def turn(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match[2])
        return match[0] if path is None else match[1] + posixpath.relpath(f"files/{path}.md", here or ".") + match[3]

    return LINK.sub(turn, markdown)


def show_file(path: str) -> str:
    """A page with a file's text, or with the files of a folder. FileNotFoundError if there is none."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(one.name for one in place.iterdir() if one.is_file() and not one.name.startswith("."))
        return "\n".join([f"# {path}", "", *(f"- `{name}`" for name in names), ""])
    text = place.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(place.suffix, 'text')}\n{text}\n{fence}\n"


def _outside(page: str, target: str) -> str | None:
    """The path from the root of the repository, if ``target`` leaves the folder of the pages."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path
