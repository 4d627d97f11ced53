"""``manyhands bench``: rows of the speed table on this machine, beside what H200s did."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.process import run_module


def bench(
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="ROW", help="Rows of the table; lists them without.", show_default=False),
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Show the rows and the recorded figures.")] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Measure on at most so many GPUs.", show_default=False)
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", help="JSONL file to append the raw rows to.", show_default=False)
    ] = None,
) -> None:
    """Measure speed and memory on random weights of published shapes, beside recorded figures of H200s."""
    arguments = [*(rows or ())]
    arguments += ["--list"] if list_rows else []
    arguments += ["--gpus", str(gpus)] if gpus is not None else []
    arguments += ["--output", output] if output is not None else []
    raise typer.Exit(run_module("manyhands.bench", arguments))
