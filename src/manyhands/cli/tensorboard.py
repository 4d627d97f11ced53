"""``manyhands tensorboard``: TensorBoard on a run's folder, on the loopback address only."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.errors import UserError

HOST = "127.0.0.1"


def tensorboard(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUN_FOLDER]", help="A run's folder, or the folder of all runs.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on this machine's loopback address.")
    ] = 6006,
) -> None:
    """Show the curves of a run, or of all runs."""
    if not folder.is_dir():
        raise UserError("the folder does not exist", where=str(folder), fix="name a run's folder, such as runs/NAME")
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise UserError("TensorBoard is not installed", fix="pip install tensorboard")
    refuse_used_port(port)
    from manyhands.cli.process import run_module

    print(f"TensorBoard on {folder}: http://{HOST}:{port}/ (Ctrl-C ends it)", flush=True)
    raise typer.Exit(run_module("tensorboard.main", ["--logdir", str(folder), "--host", HOST, "--port", str(port)]))


def refuse_used_port(port: int) -> None:
    """Raises ``UserError`` if somebody listens on the port, naming one that is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return
        except PermissionError:
            raise UserError(
                f"port {port} needs more rights", where=f"{HOST}:{port}", fix="choose --port above 1023"
            ) from None
        except OSError as error:
            why = error.strerror or str(error)
    with socket.socket() as free:
        free.bind((HOST, 0))
        other = free.getsockname()[1]
    raise UserError(
        f"port {port} is in use",
        where=f"{HOST}:{port}",
        why=why,
        fix=f"end the program that holds it, or choose --port {other}",
    )
