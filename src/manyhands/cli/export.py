"""``manyhands export``: a checkpoint to a model or adapter folder, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.errors import UserError


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_FOLDER_OR_CHECKPOINT", help="A run's folder, or one of its checkpoints.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write, which must not exist.", show_default=False)
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the model with the adapter merged into its weights.")
    ] = False,
) -> None:
    """Write a model or adapter from a checkpoint, and verify it."""
    if not source.is_dir():
        raise UserError(
            "the folder does not exist",
            where=str(source),
            fix="name a run's folder, such as runs/NAME, or a checkpoint in it",
        )
    from manyhands.cli.process import run_module

    arguments = [str(source), "--output", str(output or default_output(source, merge))]
    if merge:
        arguments.append("--merge")
    raise typer.Exit(run_module("manyhands.export", arguments))


def default_output(source: Path, merge: bool) -> Path:
    """``export`` or ``merged`` in the run's folder, with the step's name where one checkpoint was asked for."""
    kind = "merged" if merge else "export"
    if (source / "run.json").is_file():
        return source / kind
    source = source.resolve()
    return source.parent.parent / f"{kind}-{source.name}"
