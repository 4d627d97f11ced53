"""What comes from outside reaches a terminal or a page as text alone."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import manyhands
from manyhands.core.errors import UserError
from manyhands.core.text import PrintableStream, code_block, code_span, in_markdown, indented, open_console, printable

ATTACKS = {
    "\x1b]0;owned\x07": "\\u001b]0;owned\\u0007",  # window title
    "\x1b[31mred\x1b[0m": "\\u001b[31mred\\u001b[0m",
    "\x9b2J": "\\u009b2J",  # CSI of C1: one character
    "safe\rgone": "safe\\u000dgone",
    "a\bb\x7f": "a\\u0008b\\u007f",
    "\u202eexe.txt\u2066": "\\u202eexe.txt\\u2066",
    "one\u2028two": "one\\u2028two",
    "\ud83d": "\\ud83d",
    "\U000e0041": "\\udb40\\udc41",
}


@pytest.mark.parametrize(("text", "shown"), ATTACKS.items())
def test_what_a_terminal_obeys_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown and printable(shown) == shown
    pieces = "".join(map(printable, text))  # streamed token by token
    assert pieces == shown
    assert str(UserError(text, where=text, details=[text])).count(shown) == 3


@pytest.mark.parametrize("text", ["Zürich 東京 👩‍👩‍👧 می‌خواهم", "a\n\tb", "", "[bold]b[/bold]", "\u00a0\u200f"])
def test_text_of_any_script_stays(text: str) -> None:
    assert printable(text) == text


def test_json_stays_json() -> None:
    value = {"a": "".join(ATTACKS).replace("\ud83d", "")}
    text = printable(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and not any(attack in text for attack in ATTACKS)


def test_a_console_ends_no_line_with_blanks() -> None:
    file = io.StringIO()
    table = Table.grid(padding=(0, 2))
    table.add_row("a", "two words")
    table.add_row("longer", "b")
    console = open_console(file, width=20)
    console.print(table)
    console.print("asks: ", end="")
    assert file.getvalue() == "a       two words\nlonger  b\nasks: "


def test_a_console_keeps_its_own_colors_and_cleans_the_rest() -> None:
    file = io.StringIO()
    console = open_console(file, force_terminal=True, color_system="standard", width=200, highlight=False)
    table = Table()
    table.add_column("\x1b[2J")
    table.add_row(Text("\x1b]0;x\x07"))
    console.print(Text("title \x1b[5m", style="red"), table, escape("[b]\x9b"))
    shown = file.getvalue()
    assert "\x1b[31m" in shown and "[b]\\u009b" in shown
    for attack in ("\x1b[2J", "\x1b]0", "\x1b[5m", "\x9b", "\x07"):
        assert attack not in shown


def test_a_process_reads_and_prints_safely_in_any_encoding() -> None:
    code = textwrap.dedent("""
        import sys
        from manyhands.core.text import open_console, print_safely
        print_safely()
        print(len(input()))
        print("first \\x1b]0;x\\x07 ☃ \\ud83d")
        open_console().print("second")
        print("third")
        sys.stderr.write("\\rloading 3%\\x1b[2J")
        sys.stderr.write("\\n\\x1b[A")
    """)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, input=b"caf\xe9\n", capture_output=True, check=True)
    assert done.stdout == b"4\nfirst \\u001b]0;x\\u0007 \\u2603 \\ud83d\nsecond\nthird\n"
    assert done.stderr == b"\rloading 3%\\u001b[2J\n\x1b[A"  # bars of libraries move as they do


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_named_as_that() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "manyhands", "config"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "the disk is full behind the output of this command" in done.stderr
    assert "Traceback" not in done.stderr and "MiB are free" not in done.stderr


def test_a_stream_counts_what_it_was_given() -> None:
    buffer = io.BytesIO()
    stream = PrintableStream(buffer, "utf-8")
    assert stream.write("\x1b") == 1
    assert buffer.getvalue() == b"\\u001b"


HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1)) ![](http://e/x.png) <http://e.test> &lt;b&gt;",
    "a|b|c `code` **bold** _em_ ~~x~~ \\* \\",
    "# heading",
    "- item",
    "1. item",
    "---",
    "> quote\n\n# heading\n```\n",
    "```\n<b>\n````",
    "\x1b]8;;http://e\x07x",
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_markdown_shows_a_name_as_its_characters(name: str) -> None:
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = page.parse(in_markdown(name))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    shown = tokens[1].children or []
    assert {token.type for token in shown} <= {"text", "text_special"}
    assert "".join(token.content for token in shown) == " ".join(printable(name).split())
    (code,) = page.parse("\n".join(code_block(name, "bash")))
    assert (code.type, code.content.rstrip("\n")) == ("fence", printable(name).rstrip("\n"))
    (span,) = page.parse(f"x {code_span(name)}")[1].children[1:]  # type: ignore[index]
    assert (span.type, span.content) == ("code_inline", " ".join(printable(name).split()))
    assert [token.type for token in page.parse("\n".join(["x", "", *indented(name)]))][3:] == ["code_block"]
    table = page.parse(f"| {in_markdown(name)} | x |\n|---|---|\n| {in_markdown(name)} | y |")
    assert sum(token.type in ("th_open", "td_open") for token in table) == 4


def test_colors_and_consoles_are_made_in_one_place() -> None:
    source = Path(manyhands.__file__).parent
    others = [path for path in source.rglob("*.py") if re.search(r"(?<!open_)\bConsole\(", path.read_text())]
    assert [path.name for path in others] == ["text.py"]
