"""A preview on a terminal: in color or brackets. Foreign text is never read as markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.preview.contents import (
    NUMBER_NOTE,
    SHARE_NOTE,
    SOURCE_TITLES,
    Bin,
    Preview,
    Refused,
    ShownSample,
    SourceCounts,
    Span,
    describe_batch,
    describe_counts,
    describe_end,
    describe_more,
    describe_plan_error,
    has_weights,
    head_image,
    head_row,
    tabulate_lengths,
    tabulate_sources,
    weight_mark,
)

BRACKETS = ("⟦", "⟧")  # around trained tokens where there is no color
MAX_BAR = 40  # columns


def print_preview(preview: Preview, console: Console) -> None:
    """Rows, then counts, then faults."""
    colored = console.is_terminal and not console.no_color
    if preview.plan_error is not None:
        _say(console, describe_plan_error(preview.plan_error), style="yellow")
    if preview.batch is not None:
        _say(console, describe_batch(preview.batch))
    if preview.rows:
        _say(console, NUMBER_NOTE, style="dim")
        _say(console, _legend(colored, has_weights(preview)), style="dim")
    for row in preview.rows:
        _print_row(console, row, colored)
    if preview.rows:
        console.rule(style="dim")
    _say(console, describe_more(preview), style="dim")
    if preview.sources:
        _print_sources(console, preview.sources)
        _print_lengths(console, preview.lengths)
        _print_pairs(console, describe_counts(preview))
    for note in preview.notes:
        _say(console, f"note: {note}")
    for entry in preview.refused:
        _print_refused(console, entry)
    if preview.refused:
        _say(console, "\n" + describe_end(preview), style="bold red")


def mark_trained(spans: Iterable[Span], *, colored: bool) -> Text:
    """Spans in a row: trained ones green (in brackets without color), followed by a weight other than 1."""
    text = Text()
    for span in spans:
        trained = span.weight != 0
        shown = f"{BRACKETS[0]}{span.text}{BRACKETS[1]}" if trained and not colored else span.text
        text.append(shown, style="bold green" if trained and colored else "")
        text.append(weight_mark(span.weight), style="bold yellow" if colored else "")
    return text


def _legend(colored: bool, weighted: bool) -> str:
    trained = "green" if colored else f"in {BRACKETS[0]} {BRACKETS[1]}"
    weights = " ×0.5 after them: their loss counts half." if weighted else ""
    return f"Loss tokens are {trained}; the other tokens are context without a loss.{weights}"


def _say(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(Text(text, style=style))


def _print_row(console: Console, row: ShownSample, colored: bool) -> None:
    head = f"── {head_row(row)} "
    console.print(Text(head + "─" * (console.width - len(head)), style="dim"), soft_wrap=True)
    console.print(mark_trained(row.spans, colored=colored), soft_wrap=True)
    for image in row.images:
        _say(console, head_image(image), style="dim")


def _print_sources(console: Console, sources: tuple[SourceCounts, ...]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="bold", title="\nSamples by source")
    table.add_column("source", overflow="fold")
    table.add_column("format", overflow="fold")
    for title in SOURCE_TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for entry, cells in zip(sources, tabulate_sources(sources), strict=True):
        table.add_row(*map(Text, (entry.name, entry.format, *cells)))
    if len(sources) > 1:
        sums = [
            sum(getattr(entry, name) for entry in sources)
            for name in ("num_samples", "num_tokens", "num_loss_tokens", "num_validation_samples")
        ]
        table.add_row("all", "", *(f"{number:,}" for number in sums), style="bold")
    console.print(table)
    if len(sources) > 1:
        _say(console, SHARE_NOTE, style="dim")


def _print_lengths(console: Console, bins: tuple[Bin, ...]) -> None:
    if not bins:
        return
    _say(console, "\nLength of samples in tokens", style="bold")
    rows = tabulate_lengths(bins)
    label_width, count_width = max(len(label) for label, _, _ in rows), max(len(cells[0]) for _, _, cells in rows)
    room = max(1, min(MAX_BAR, console.width - label_width - count_width - 20))
    for label, bar, (num_samples, share, _) in rows:
        line = Text(f"{label:>{label_width}}  ").append(
            f"{'█' * max(round(room * bar), bar > 0):<{room}}", style="cyan"
        )
        console.print(
            line.append(
                f"  {num_samples:>{count_width}} {'sample' if num_samples == '1' else 'samples':<7}  {share:>6}"
            ),
            soft_wrap=True,
        )


def _print_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in pairs:
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)


def _print_refused(console: Console, entry: Refused) -> None:
    _say(console, f"\nRefused: source {entry.source}", style="bold red")
    for error in entry.errors:
        console.print(Text(str(error).removeprefix("error: ")), soft_wrap=True)
