"""A preview as one page: no script, nothing from elsewhere, foreign text always escaped; told apart by more than
color."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from manyhands.core.errors import UserError
from manyhands.core.files import write_atomically
from manyhands.core.text import printable_value
from manyhands.preview import contents
from manyhands.preview.contents import Preview

MARK = '<meta name="generator" content="manyhands data">'  # a file that begins with it may be written again
MARK_WITHIN = 1024  # characters
TEMPLATE = Path(__file__).with_name("page.html.jinja")


def refuse_foreign_file(path: Path) -> None:
    """UserError where ``path`` cannot become a page or holds another file; called before any work."""
    try:
        if not path.parent.is_dir():
            raise UserError(
                "the folder of the page does not exist",
                where=str(path.parent),
                fix="create it, or choose another with --html",
            )
        if path.is_dir():
            raise UserError("the page's name is a folder", where=str(path), fix="name a file, such as data.html")
        with path.open(encoding="utf-8", errors="replace") as file:
            ours = MARK in file.read(MARK_WITHIN)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError("the page cannot be written", where=str(path), why=error.strerror or str(error)) from None
    if not ours:
        raise UserError(
            "the file is not a page of `manyhands data` and is not overwritten",
            where=str(path),
            fix="choose another with --html, or remove it",
        )


def write_page(preview: Preview, path: Path) -> None:
    """Writes the page whole or not at all. UserError as ``refuse_foreign_file``, or for a refusing disk."""
    refuse_foreign_file(path)
    try:
        write_atomically(path, render_page(preview))
    except OSError as error:
        raise UserError("the page cannot be written", where=str(path), why=error.strerror or str(error)) from None


def render_page(preview: Preview) -> str:
    """The HTML. The template escapes whatever it is given."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=printable_value,
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(preview=preview, say=contents, mark=MARK).lstrip()
