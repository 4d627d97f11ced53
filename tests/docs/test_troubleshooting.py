"""Every message that the troubleshooting page quotes is one that the program can write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.config.keys import all_keys

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"  # in place of what an f-string computes


def texts() -> Iterator[str]:
    """All texts of the sources, in which ``VALUE`` stands for what is computed; of a choice, each of its texts."""
    for path in sorted((ROOT / "src" / "manyhands").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


def quoted() -> list[str]:
    """The messages of the tables' first column."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [re.split(r" \| ", row[2:])[0].strip("` ") for row in rows]


def can_be_written(message: str, known: list[str]) -> bool:
    """Whether one text has all pieces of the message in order, with a value where it has dots."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    starts, ends = message.startswith("..."), message.endswith("...")
    middle = f" ?[^{VALUE}]*{VALUE}.* ?".join(pieces)
    pattern = (f".*{VALUE}.* ?" if starts else "(?:.*`)?") + middle + (f" ?.*{VALUE}.*" if ends else ".*")
    plain = [piece.strip() for piece in message.split("...")]
    likely = (text for text in known if all(piece in text for piece in plain))
    return any(re.fullmatch(pattern, text, re.DOTALL) for text in likely)


@pytest.fixture(scope="module")
def known() -> list[str]:
    return list(set(texts()))


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_exist(message: str, known: list[str]) -> None:
    assert can_be_written(message, known)


def test_what_no_source_has_is_seen(known: list[str]) -> None:
    assert len(quoted()) > 50
    assert can_be_written("no sample would be trained", known)
    assert not can_be_written("no sample would ever be trained", known)
    assert not can_be_written("port ... is taken", known)
    assert not can_be_written("no such ... file", known)  # a fixed text is quoted in full


def test_keys_that_it_advises_exist() -> None:
    known = set(all_keys())
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)(?:[=: ][^`]*)?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20 and set(named) <= known
