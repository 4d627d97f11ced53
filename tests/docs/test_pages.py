"""The pages that the site generates: every key and every command is there, as the program has it."""

from __future__ import annotations

import re

import pytest

from manyhands.config.keys import all_keys, source_table, table
from scripts import site_pages


def test_every_key_is_on_its_page() -> None:
    """With its whole sentence: no cell is cut by a bar, and no text is markup."""
    page = site_pages.keys_page()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == [*all_keys(), *source_table()]
    assert all(len(row) == 4 for row in rows)
    by_key = {row[0].strip(" `"): row[3] for row in rows}
    assert re.sub(r"\\(.)", r"\1", by_key["model.special_tokens"]).strip() == table()["model.special_tokens"].sentence


def test_every_command_is_on_its_page() -> None:
    page = site_pages.commands_page()
    assert {"manyhands train", "manyhands eval", "manyhands runs list"} <= set(re.findall(r"^## (.+)$", page, re.M))
    assert "`--max-new-tokens" in page


@pytest.mark.parametrize(
    ("page", "link", "path"),
    [
        ("python.md", "../src/manyhands/training/types.py", "src/manyhands/training/types.py"),
        ("reference/api.md", "../python.md", None),
        ("reference/api.md", "../../README.md", "README.md"),
    ],
)
def test_links_out_of_the_pages_are_found(page: str, link: str, path: str | None) -> None:
    assert site_pages._outside(page, link) == path


def test_a_linked_file_is_a_page_whatever_it_holds() -> None:
    shown = site_pages.show_file("docs/nodes.md")  # has blocks of code itself
    assert shown.startswith("# docs/nodes.md\n\n````markdown\n") and shown.endswith("\n````\n")
    with pytest.raises(FileNotFoundError):
        site_pages.show_file("docs/none.md")
