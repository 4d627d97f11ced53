"""A preview as one page: no script, nothing from elsewhere, foreign text always escaped; told apart by more than
color.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.files import write_atomically
from manyhands.preview.types import Bin, Preview, Refused, ShownRow, SourceCounts, Span
from manyhands.preview.words import (
    LENGTH_TITLES,
    NUMBER_NOTE,
    SHARE_NOTE,
    SOURCE_TITLES,
    describe_batch,
    describe_counts,
    describe_end,
    describe_more,
    describe_plan_error,
    has_weights,
    head_row,
    tabulate_lengths,
    tabulate_sources,
    weight_mark,
)

MARK = '<meta name="generator" content="manyhands data">'  # a file that begins with it may be written again
MARK_WITHIN = 1024  # characters
# The colors reach a contrast of 4.5 with what is behind them, in both schemes.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #c4cad1; --on: #d3f5dc; --edge: #116329;
  --bar: #0a6bb5; --bad: #a40e26 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a3adb8; --paper: #14181d; --line: #3d4650; --on: #12381f;
  --edge: #6fdd8b; --bar: #5cb2f2; --bad: #ff8d95 } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
h3 { font: 600 .85rem/1.4 system-ui, sans-serif; color: var(--soft); margin: 0 }
article { border-top: 2px solid var(--line); padding: .6rem 0; overflow-wrap: anywhere }
pre { margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .9rem/1.5 ui-monospace, monospace }
mark { background: var(--on); color: inherit; border-bottom: 2px solid var(--edge);
  box-decoration-break: clone; -webkit-box-decoration-break: clone }
sup { color: var(--edge); font-weight: 700 }
.wide { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .2rem 0 .2rem .9rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums }
th { font-weight: 600 } th:first-child { padding-left: 0 } .text { text-align: left }
.path { display: block; min-width: 10rem; white-space: normal; overflow-wrap: anywhere; font-weight: 400; color: var(--soft) }
.said { width: 100%; white-space: normal }
.lengths { width: 100%; max-width: 46rem } td.bar { width: 100%; min-width: 3rem; vertical-align: middle }
.bar span { display: block; height: .9rem; min-width: 1px; background: var(--bar) }
.soft { color: var(--soft) } .bad { color: var(--bad); font-weight: 600 }
@media print { body { margin: 0; max-width: none } article, tr { break-inside: avoid } mark, .bar span { print-color-adjust: exact } }
"""


def refuse_foreign_file(path: Path) -> None:
    """Raises UserError where ``path`` cannot become a page, or holds something other than one; read before any work is
    done.
    """
    try:
        if not path.parent.is_dir():
            raise UserError(
                "the folder of the page does not exist",
                where=str(path.parent),
                fix="make it, or name another with --html",
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
            fix="name another with --html, or remove it",
        )


def write_page(preview: Preview, path: Path) -> None:
    """Writes the page whole or not at all. Raises UserError as ``refuse_foreign_file`` does, or for a disk that
    refuses.
    """
    refuse_foreign_file(path)
    try:
        write_atomically(path, render_page(preview))
    except OSError as error:
        raise UserError("the page cannot be written", where=str(path), why=error.strerror or str(error)) from None


def render_page(preview: Preview) -> str:
    """The HTML."""
    parts = [f"<h1>Data of the run {escape(preview.run)}</h1>", f"<p>Model: {escape(preview.model)}</p>"]
    if preview.refused:
        parts.append(f'<p class="bad" role="alert">{escape(describe_end(preview))}</p>')
    if preview.sources:
        parts += [_sources(preview.sources), _lengths(preview.lengths), _pairs(describe_counts(preview))]
    parts += [f"<p>Note: {escape(note)}</p>" for note in preview.notes]
    if preview.refused:
        parts += ["<h2>Refused rows</h2>", *map(_refused, preview.refused)]
    if preview.sources:
        parts.append(_rows(preview))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Data of {escape(preview.run)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _rows(preview: Preview) -> str:
    parts = ["<h2>Rows as the model sees them</h2>"]
    if preview.plan_error is not None:
        parts.append(f'<p class="bad">{escape(describe_plan_error(preview.plan_error))}</p>')
    if preview.batch is not None:
        parts.append(f"<p>{escape(describe_batch(preview.batch))}</p>")
    weights = " <mark>Such</mark><sup>×0.5</sup> tokens count half in the loss." if has_weights(preview) else ""
    parts.append(
        "<p>Legend: <mark>trained tokens</mark> are underlined on a tint; the model reads the others, but is not trained to write them."
        f"{weights} {NUMBER_NOTE}</p>"
    )
    parts += map(_row, preview.rows)
    if more := describe_more(preview):
        parts.append(f'<p class="soft">{escape(more)}</p>')
    return "\n".join(parts)


def _row(row: ShownRow) -> str:
    # A newline right after <pre> is dropped by browsers: one more keeps the row's own.
    return f"<article><h3>{escape(head_row(row))}</h3><pre>\n{''.join(map(_span, row.spans))}</pre></article>"


def _span(span: Span) -> str:
    text = escape(span.text)
    mark = weight_mark(span.weight)
    return f"<mark>{text}</mark>" + (f"<sup>{mark}</sup>" if mark else "") if span.weight else text


def _sources(sources: tuple[SourceCounts, ...]) -> str:
    body = "".join(
        f'<tr><th scope="row" class="text">{escape(entry.name)}<span class="path">{escape(entry.path)}</span></th>'
        f'<td class="text">{escape(entry.format)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
        for entry, cells in zip(sources, tabulate_sources(sources), strict=True)
    )
    texts = "".join(f'<th scope="col" class="text">{title}</th>' for title in ("source", "format"))
    return (
        f'<h2>Rows by source</h2>\n<p class="soft">{SHARE_NOTE}</p>\n'
        f'<div class="wide" tabindex="0" role="region" aria-label="Rows by source">'
        f"<table>\n<thead><tr>{texts}{_titles(SOURCE_TITLES)}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _lengths(bins: tuple[Bin, ...]) -> str:
    body = "".join(
        f'<tr><th scope="row">{label}</th><td class="bar">{_bar(bar)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
        for label, bar, cells in tabulate_lengths(bins)
    )
    return (
        '<h2>Length of rows in tokens</h2>\n<table class="lengths">'
        f'<thead><tr><th scope="col">length</th><td></td>{_titles(LENGTH_TITLES)}</tr></thead>\n<tbody>{body}</tbody></table>'
    )


def _bar(share: float) -> str:
    return f'<span style="width:{100 * share:.1f}%"></span>' if share else ""


def _titles(titles: Iterable[str]) -> str:
    return "".join(f'<th scope="col">{title}</th>' for title in titles)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row" class="text">{escape(name)}</th><td class="text said">{escape(value)}</td></tr>\n'
        for name, value in pairs
    )
    return f"<h2>What became of the rows</h2>\n<table><tbody>{body}</tbody></table>"


def _refused(entry: Refused) -> str:
    return f'<article><h3 class="bad">source {escape(entry.source)}</h3>{"".join(map(_error, entry.errors))}</article>'


def _error(error: UserError) -> str:
    details = "".join(f"<li>{escape(detail)}</li>" for detail in error.details)
    rest = "".join(
        f"<br>{name}: {escape(text)}"
        for name, text in (("where", error.where), ("why", error.why), ("what to do", error.fix))
        if text
    )
    return f"<p>{escape(error.what)}{rest}</p>" + (f"<ul>{details}</ul>" if details else "")
