"""``manyhands generate``: answers from a trained model or adapter, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.errors import UserError


def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or its model/ or adapter/.", show_default=False)
    ],
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="Answer this and end; without it, chat line by line.", show_default=False),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="An adapter's base model (default: the one it names).", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 256,
) -> None:
    """Answer a prompt, or chat on standard input."""
    if not folder.is_dir():
        raise UserError("the folder does not exist", where=str(folder), fix="name a run's folder, such as runs/NAME")
    from manyhands.cli.process import run_module

    arguments = [str(folder), "--max-new-tokens", str(max_new_tokens)]
    for option, value in (("--prompt", prompt), ("--base", base)):
        if value is not None:
            arguments.append(f"{option}={value}")  # one word: the value may start with a dash
    raise typer.Exit(run_module("manyhands.infer", arguments))
