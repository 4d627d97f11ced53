"""Text from outside (data, answers, file and host names, other tools' files) as a terminal or a page may show it.

Every process of ours that writes to a terminal calls ``print_safely`` when it starts, so no single ``print`` has to
care; what draws with colors of its own uses ``open_console``.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 1000  # columns
OUTPUT = "standard output or standard error"  # as the file name of an OSError

# Controls of C0 and C1 (escape sequences begin with one of them; \n and \t stay), line separators,
# what reorders the text of a line ("trojan source", CVE-2021-42574), lone surrogates, which no encoding can write,
# annotation marks and tags, which nothing shows. Joiners and marks that scripts and emoji need stay.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_OF_A_BAR = re.compile("\r|(?:\n|\x1b\\[A)+$")  # what libraries' bars begin a line with, or go to another line (tqdm)


def report_aside(text: str) -> None:
    """Print progress to standard error, so that standard output has only the result."""
    print(printable(text), file=sys.stderr, flush=True)


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key, ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def printable(text: str) -> str:
    """``text`` without a character that a terminal obeys or nothing shows: as escapes, ``\\u001b`` for ESC.

    Lines and tabs stay. The escapes are JSON's, so JSON text remains what it is.
    """
    return _UNPRINTABLE.sub(_escape, text)


def printable_value(value: Any) -> Any:
    """``printable`` of text of any kind (also Jinja's ``Markup``), else the value: the ``finalize`` of a page."""
    return type(value)(printable(value)) if isinstance(value, str) else value


def in_markdown(text: str) -> str:
    """``text`` on one line, as Markdown that shows just these characters: no HTML, link, emphasis, cell or heading."""
    line = " ".join(printable(text).split())
    line = re.sub(r"[\\`*\[\]<>&|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line)
    return re.sub(r"^(?:#+|\++|-+|=+|\d+[.)])(?=\s|$)", lambda start: f"{start[0][:-1]}\\{start[0][-1]}", line)


def code_span(text: str) -> str:
    """``text`` on one line, as code within a line of Markdown."""
    line = " ".join(printable(text).split())
    ticks = _ticks(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def code_block(text: str, language: str = "") -> list[str]:
    """Lines of Markdown that show ``text`` as code; nothing that it holds ends the block."""
    fence = _ticks(text, 3)
    return [fence + language, *printable(text).split("\n"), fence]


def indented(text: str) -> list[str]:
    """The same by its indentation."""
    return [f"    {line}" for line in printable(text).split("\n")]


def _ticks(text: str, at_least: int) -> str:
    return "`" * max(at_least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


class _Output(io.TextIOWrapper):
    """A text stream whose errors name it, and in which a character that its encoding lacks becomes an escape."""

    def __init__(self, buffer: IO[bytes], encoding: str) -> None:
        # Written through: two text streams share one buffer, in order.
        super().__init__(buffer, encoding, "backslashreplace", line_buffering=buffer.isatty(), write_through=True)

    def write(self, text: str) -> int:
        with _naming_output():
            return super().write(text)

    def flush(self) -> None:
        with _naming_output():
            super().flush()


class PrintableStream(_Output):
    """A text stream that writes whatever it is given as ``printable`` returns it. With ``bars``, a bar of a library may
    return to the start of its line.

    ``console_file`` is the same output for text that is printable already and has our colors.
    """

    def __init__(self, buffer: IO[bytes], encoding: str, *, bars: bool = False) -> None:
        super().__init__(buffer, encoding)
        self._bars = bars
        self.console_file: TextIO = _Output(buffer, encoding)

    def write(self, text: str) -> int:
        start = match.end() if self._bars and (match := _OF_A_BAR.match(text)) else 0
        super().write(text[:start] + printable(text[start:]))
        return len(text)


@contextlib.contextmanager
def _naming_output() -> Iterator[None]:
    """A full disk behind it is not that of the files that were written last."""
    try:
        yield
    except OSError as error:
        error.filename = OUTPUT
        raise


def print_safely() -> None:
    """From here on ``print`` of this process writes printable text alone, in an encoding that never fails. Bytes of
    standard input that are no text are read in any locale, so that whoever reads them can say so.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, PrintableStream):
            stream.flush()
            setattr(sys, name, PrintableStream(stream.buffer, stream.encoding, bars=name == "stderr"))


def open_console(file: TextIO | None = None, *, wrap: bool = True, **options: Any) -> Console:
    """A rich console on ``file`` (default stdout) that cleans all text. ``wrap``: also where it is no terminal."""
    from rich.console import Console, ConsoleRenderable, RenderHook
    from rich.control import Control

    class CleanHook(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [each if isinstance(each, Control) else _Clean(each) for each in renderables]

    stream = sys.stdout if file is None else file
    if not wrap and not stream.isatty():
        options["width"] = PIPED_WIDTH
    console = Console(file=stream.console_file if isinstance(stream, PrintableStream) else stream, **options)
    console.push_render_hook(CleanHook())
    return console


@dataclass(frozen=True)
class _Clean:
    """A renderable whose segments of text are printable, without the blanks that fill its lines up."""

    renderable: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        blanks: list[Segment] = []
        for text, style, control in console.render(self.renderable, options):
            kept = text if control else printable(text).rstrip(" ")
            if kept:
                yield from () if kept.startswith("\n") else blanks
                blanks.clear()
                yield Segment(kept, style, control)
            if not control:
                blanks.append(Segment(text[len(text.rstrip(" ")) :], style))
        yield from blanks
