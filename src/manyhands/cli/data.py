"""``manyhands data``: a step's rows as the model will see them, counts, and every fault; as text or as a page."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.run_file import Examples, Overrides, RunFile, load_run
from manyhands.cli.words import report_aside
from manyhands.core.errors import EXIT_FAILED

NUM_SAMPLES = 3  # on a terminal, where nothing was asked


def data(
    run: RunFile,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=0, help="Show at most N rows.  [default: 3]", show_default=False)
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Show the first micro-batch of step S, whole.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page with a whole micro-batch instead.", show_default=False, dir_okay=False
        ),
    ] = None,
    examples: Examples = None,
) -> None:
    """Preview the rows of a step, trained tokens marked.

    Lengths, packing and tokens by source come below them, and every row that a run would refuse: then the exit code is
    1."""
    config = load_run(run, overrides, examples=examples)
    from manyhands.preview.collect import collect
    from manyhands.preview.page import refuse_foreign_file, write_page

    if html is not None:
        refuse_foreign_file(html)
    max_samples = NUM_SAMPLES if rows is None and step is None and html is None else rows
    preview = collect(config, step=step or 1, max_samples=max_samples, report=report_aside)
    if html is not None:
        write_page(preview, html)
        print(f"wrote {html}: open it in a browser" + ("; it names rows that a run refuses" if preview.refused else ""))
    else:
        from rich.console import Console

        from manyhands.preview.text import print_preview

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # rows hold any character, and the terminal may know few
        print_preview(preview, Console(highlight=False))
    if preview.refused:
        raise typer.Exit(EXIT_FAILED)
