"""``python -m manyhands.worker.standby FD PID RUN_FOLDER``: imports what a rank needs, and becomes one when the
launcher ``PID`` says so on its channel ``FD`` (``launch/standby.py``). Touches no GPU before.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from manyhands.core.files import read_json
from manyhands.core.machine import end_with
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.standby import BEGUN, READY, read_modules
from manyhands.worker.__main__ import run_and_exit

# What each process computes once before it compiles, 0.4 s in all: digests of the compilers' sources, and a table.
BEFORE_COMPILING = (
    ("triton.runtime.cache", "triton_key"),
    ("torch._inductor.codecache", "torch_key"),
    ("torch._dynamo.trace_rules", "get_torch_obj_rule_map"),
)


def import_all(folder: RunFolder) -> None:
    """What a rank of the run has imported, or where none has come so far what each imports. What cannot be imported by
    its name was made by that rank.
    """
    os.environ["TORCH_WARM_POOL"] = "0"  # no processes for compilation before there is something to compile
    names = read_modules(folder)
    for name in ("manyhands.worker.run", *names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for module, function in (one for one in BEFORE_COMPILING if one[0] in names):
        with contextlib.suppress(Exception):  # none of them is a public API
            getattr(importlib.import_module(module), function)()
    with contextlib.suppress(Exception):  # the rank tests its kernels itself
        backend = importlib.import_module("manyhands.kernels.backend")
        backend.offer_choices(read_json(folder.kernels(int(os.environ["RANK"]))) or {})


def wait_for_order(channel: socket.socket) -> list[str] | None:
    """The arguments of the rank that this process becomes, in its environment; None where the launcher has ended."""
    channel.sendall(READY)
    with channel.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        return None
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.setsid()  # as torch's agent starts ranks: Ctrl-C is the launcher's to pass on
    channel.sendall(BEGUN)
    return list(order["arguments"])


def main(channel_fd: int, launcher: int, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not end_with(launcher, signal.SIGKILL):
        return
    with socket.socket(fileno=channel_fd) as channel:
        import_all(RunFolder(folder))
        arguments = wait_for_order(channel)
    if arguments is not None:
        sys.argv[1:] = arguments
        run_and_exit(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
