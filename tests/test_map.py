"""The map names files that exist: whoever guesses from it lands somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ROOT / "src" / "manyhands"


@pytest.mark.parametrize("page", ["docs/map.md", "README.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+/[\w./]*\w)(?::[^`]*)?`", text))
    known = {
        path
        for path in named
        if path.split("/")[0] in {*(p.name for p in ROOMS.iterdir()), "docs", "tests", "examples", "benchmarks"}
    }
    assert page != "docs/map.md" or len(known) > 15
    missing = [
        p
        for p in sorted(known)
        if not any((base / f"{p}{end}").exists() for base in (ROOMS, ROOT) for end in ("", ".py"))
    ]
    assert not missing


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    rooms = {path.name for path in ROOMS.iterdir() if (path / "__init__.py").exists()}
    floors = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert rooms - set(re.findall(r"`(\w+)`", floors)) == set()
