"""What comes from outside reaches a terminal or a page as text alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap

import pytest
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from manyhands.core.errors import UserError
from manyhands.core.text import PrintableStream, open_console, printable

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


def test_a_process_prints_safely_in_any_encoding() -> None:
    code = textwrap.dedent("""
        import sys
        from manyhands.core.text import open_console, print_safely
        print_safely()
        print("first \\x1b]0;x\\x07 ☃ \\ud83d")
        open_console().print("second")
        print("third")
        sys.stderr.write("\\rloading 3%\\x1b[2J")
        sys.stderr.write("\\n\\x1b[A")
    """)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout == b"first \\u001b]0;x\\u0007 \\u2603 \\ud83d\nsecond\nthird\n"
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
