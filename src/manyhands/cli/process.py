"""Commands that need torch: each starts its module in a process, so that the command line itself stays light."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from manyhands.core.errors import EXIT_FAILED, EXIT_TERMINATED, UserError

GRACE_S = 10.0
HOST = "127.0.0.1"


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Runs ``python -m module arguments`` on this terminal and returns its exit code.

    Ctrl-C reaches the child too (same process group): after at most ``GRACE_S`` s ``KeyboardInterrupt`` is raised.
    SIGTERM is passed on. A child killed by a signal raises ``UserError`` with that signal's name.
    """
    with subprocess.Popen([sys.executable, "-m", module, *arguments]) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            code = child.wait()
        except KeyboardInterrupt:
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if code < 0:
        name = signal.Signals(-code).name
        why = "most likely the machine ran out of memory" if name == "SIGKILL" else ""
        exit_code = EXIT_TERMINATED if name == "SIGTERM" else EXIT_FAILED
        raise UserError(f"the process was ended by {name}", where=f"python -m {module}", why=why, exit_code=exit_code)
    return code


def refuse_missing_tensorboard() -> None:
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise UserError("TensorBoard is not installed", fix="pip install tensorboard")


def refuse_used_port(port: int) -> None:
    """Raises ``UserError`` if the port is in use, and suggests one that is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return
        except PermissionError:
            what, fix = f"no permission to use port {port}", "choose --port above 1023"
            raise UserError(what, where=f"{HOST}:{port}", fix=fix) from None
        except OSError as error:
            why = error.strerror or str(error)
    with socket.socket() as free:
        free.bind((HOST, 0))
        other = free.getsockname()[1]
    fix = f"stop the program that uses it, or choose --port {other}"
    raise UserError(f"port {port} is in use", where=f"{HOST}:{port}", why=why, fix=fix)


def bench(
    rows: Annotated[
        list[str] | None, typer.Argument(metavar="ROW", help="Rows to measure; without it, list them.")
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="List the rows and the recorded figures.")] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Measure on at most this many GPUs.")] = None,
    output: Annotated[str | None, typer.Option("--output", help="JSONL file to append the raw rows to.")] = None,
) -> None:
    """Measure speed and memory on random weights. Of published sizes, next to figures recorded on H200s."""
    arguments = [*(rows or ())]
    arguments += ["--list"] if list_rows else []
    arguments += ["--gpus", str(gpus)] if gpus is not None else []
    arguments += ["--output", output] if output is not None else []
    raise typer.Exit(run_module("manyhands.bench", arguments))
