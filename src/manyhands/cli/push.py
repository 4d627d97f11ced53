"""``manyhands push``: a verified folder to the hub. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.run_file import find_run_folder


def push(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FOLDER",
            help="A finished run (its adapter, else its model), or a folder that was exported.",
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="OWNER/NAME", help="The model's name on the hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it, show what would be uploaded.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A public repository; without it, a private one.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="The base model's name on the hub, for an adapter trained on a folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Upload a verified model, adapter or GGUF file to the Hugging Face hub; the token is HF_TOKEN of the environment.

    Without --yes nothing is sent. The repository is private unless --public is given."""
    from manyhands.export.push import plan_upload, upload

    planned = plan_upload(find_run_folder(source), to, private=not public, base=base)
    print(planned.describe())
    if not yes:
        print("nothing was sent; add --yes to upload")
        return
    print(f"uploaded: {upload(planned, public=public)}")
