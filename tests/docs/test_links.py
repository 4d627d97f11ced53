"""Pages link to what exists, and the site's navigation has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
GENERATED = {"reference/keys.md", "reference/commands.md"}  # by scripts/site_pages.py


def links(text: str) -> list[str]:
    """Targets of links, those in blocks of code left out."""
    without_code = re.sub(r"^(```+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^()\s]+)\)", without_code)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    text, broken = page.read_text(encoding="utf-8"), []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(ROOT / "docs") and str(target.relative_to(ROOT / "docs")) in GENERATED:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Some heading: here\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [x](b.md#some-heading-here) [x](c.md) [x](b.md#gone)\n```\n[x](code.md)\n```\n")
    assert broken_links(page) == ["c.md", "b.md#gone"]


def test_every_page_is_in_the_navigation() -> None:
    """What `make docs` would refuse, seen by the fast tests."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def walk(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in walk(part)]  # type: ignore[union-attr]

    written = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert set(walk(nav)) == written | GENERATED
