"""docs/coming-from.md against the repository: every command, option, file, make target and key that it names is there.
What the commands do is tested beside this file; here no row may promise what does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from manyhands.cli.main import app
from manyhands.config.keys import sections, source_table, table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
STATES = {"W", "N", "R", "open"}
MADE = re.compile(r"\bmake ([a-z][a-z-]*(?:\[-tb\])?)")
OURS = re.compile(r"\bmanyhands ([a-z][a-z-]+)([^`|]*)")
KEY = re.compile(r"^([a-z]+\.[a-z_0-9.]+)(?:\s*[:=].*)?$")
SECTIONS = {*sections(), "model", "data", "method"}


def rows() -> Iterator[tuple[str, list[str]]]:
    """(guide, cells) of every row of the guides' tables of promises."""
    guide, in_table = "", False
    for line in TEXT.splitlines():
        if line.startswith("## "):
            guide = line[3:]
        if line.startswith("| line | promise |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            yield guide, [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def spans() -> list[str]:
    return re.findall(r"`([^`\n]+)`", TEXT)


@cache
def options_of(command: str) -> set[str] | None:
    """The options of a subcommand; None if there is none of this name."""
    group = get_command(app)
    found = group.commands.get(command) if hasattr(group, "commands") else None
    return None if found is None else {name for one in found.params for name in (*one.opts, *one.secondary_opts)}


def test_every_promise_has_a_state_and_its_reason() -> None:
    found = list(rows())
    assert len(found) > 150 and {guide for guide, _ in found} >= {"SFT-Play", "TheWorld", "torchrun kit", "synth-ai"}
    for guide, cells in found:
        assert len(cells) == 4, (guide, cells)
        assert cells[2] in STATES, (guide, cells)
        assert cells[3] or cells[2] == "W", f"{guide}, {cells[1]}: {cells[2]} without a reason"


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([a-z][a-z -]*):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    named = {name for span in spans() for name in MADE.findall(span)}
    wanted = {name.replace("[-tb]", ending) for name in named for ending in ("", "-tb") if ending == "" or "[" in name}
    assert named and wanted <= targets, wanted - targets


def test_every_command_and_option_of_ours_exists() -> None:
    assert isinstance(app, typer.Typer)
    for span in spans():
        for command, rest in OURS.findall(span):
            options = options_of(command)
            assert options is not None, f"`{span}`: there is no command {command}"
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest):
                assert option in options, f"`{span}`: {command} has no {option}"


def test_every_key_of_ours_exists() -> None:
    known = {*table(), *(f"data.train.{name}" for name in source_table())}
    known |= {f"method.parts.{part}" for part in ("vision", "projector", "language")}
    unknown = set()
    for span in spans():
        found = KEY.match(span)
        if found and found[1].partition(".")[0] in SECTIONS and not found[1].endswith((".yaml", ".json")):
            unknown |= {found[1]} - known
    theirs = {"model.name", "model.max_seq_len"}  # SFT-Play's, in the column of promises
    assert unknown <= theirs, unknown - theirs


@pytest.mark.parametrize("folder", ["configs", "examples", "scripts", "importers"])
def test_every_file_of_ours_exists(folder: str) -> None:
    root = ROOT / "src" / "manyhands" if folder == "importers" else ROOT
    for span in spans():
        for name in re.findall(rf"(?<![\w/]){folder}/[\w./{{}},-]+\.(?:yaml|json|toml|py)", span):
            choice = re.search(r"\{([^}]*)\}", name)
            names = [name.replace(choice[0], one) for one in choice[1].split(",")] if choice else [name]
            missing = [one for one in names if not (root / one).is_file()]
            promised = [cells for _, cells in rows() if any(one in " ".join(cells[:2]) for one in missing)]
            assert not missing or (all(cells[2] in ("R", "open") for cells in promised) and promised), missing
