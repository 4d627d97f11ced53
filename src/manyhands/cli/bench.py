"""``manyhands bench``: the speed table, ours beside the peers'."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.process import run_module


def bench(
    rows: Annotated[
        list[str] | None, typer.Argument(metavar="ROW", help="Rows of the table; all without.", show_default=False)
    ] = None,
    results: Annotated[
        str, typer.Option("--results", help="Raw rows; what is there is not measured again.")
    ] = "bench/results/speed.jsonl",
    list_rows: Annotated[bool, typer.Option("--list", help="Show the table and what is open.")] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Measure on at most so many GPUs.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what is there.")] = False,
    peer: Annotated[
        bool, typer.Option("--peer/--no-peer", help="Measure TRL and Unsloth too, where they are installed.")
    ] = True,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Find the smallest GPU memory in which the rows still run.")
    ] = False,
    check: Annotated[
        str | None, typer.Option("--check", help="Compare ratios with this file's.", show_default=False)
    ] = None,
) -> None:
    """Measure speed and memory on random weights of published shapes, beside TRL and Unsloth where they are
    installed.
    """
    arguments = [*(rows or ()), "--results", results]
    arguments += ["--list"] if list_rows else []
    arguments += ["--gpus", str(gpus)] if gpus is not None else []
    arguments += ["--again"] if again else []
    arguments += [] if peer else ["--peer", "no"]
    arguments += ["--smallest"] if smallest else []
    arguments += ["--check", check] if check else []
    raise typer.Exit(run_module("manyhands.bench", arguments))
