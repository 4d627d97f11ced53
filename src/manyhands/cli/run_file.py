"""The arguments that every command on a run file takes, and reading it with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.config.schema import RunConfig

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Keys that replace those of the file.", show_default=False),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", help="Processes, one a GPU: short for parallel.gpus=N.", show_default=False)
]
Examples = Annotated[
    int | None,
    typer.Option(
        "--examples",
        help="Train on at most N rows, for a quick try: short for data.max_samples=N.",
        show_default=False,
    ),
]


def load_run(
    run: Path, overrides: list[str] | None, *, gpus: int | None = None, examples: int | None = None
) -> RunConfig:
    """Reads the run file with its overrides; options are overrides too, and may not contradict one that is written
    out.
    """
    from manyhands.config.load import load_config

    overrides = list(overrides or ())
    for option, key, value in (("--gpus", "parallel.gpus", gpus), ("--examples", "data.max_samples", examples)):
        if value is None:
            continue
        if any(override.split("=")[0].removeprefix("--") == key for override in overrides):
            raise UserError(f"{option} and {key} are both given", where="command line", fix="keep one of them")
        overrides.append(f"{key}={value}")
    return load_config(run, overrides)
