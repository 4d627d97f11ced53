"""``manyhands ui``: the page on the runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.errors import UserError

PORT = 8765


def ui(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder of the runs, or one of them.")] = Path(
        "runs"
    ),
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on this machine's loopback address.")
    ] = PORT,
) -> None:
    """Open a page with the runs of a folder. Live curves, comparison, plans and data, and a queue.

    Only this machine reaches it, by an address with a token. Runs go on without it."""
    from manyhands.cli.process import refuse_used_port
    from manyhands.ui.server import serve_page

    if (folder / "run.json").is_file():
        folder = folder.resolve().parent
    if folder.exists() and not folder.is_dir():
        raise UserError("this is no folder", where=str(folder), fix="give the folder that holds the runs")
    refuse_used_port(port)
    serve_page(folder, port, lambda line: print(line, flush=True))
