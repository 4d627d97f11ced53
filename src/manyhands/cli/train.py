"""``manyhands train``: hands the run to the launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.run_file import Examples, Gpus, Overrides, RunFile, load_run


def train(
    run: RunFile,
    overrides: Overrides = None,
    gpus: Gpus = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the plan and stop.")] = False,
    examples: Examples = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew in a new folder where a run of this name exists.")
    ] = False,
) -> None:
    """Plan, launch, train, write and verify. A second start resumes."""
    config = load_run(run, overrides, gpus=gpus, examples=examples)
    from manyhands.launch.start import start

    raise typer.Exit(start(config, dry_run=dry_run, fresh=fresh))
