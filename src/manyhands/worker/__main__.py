"""``python -m manyhands.worker``: one rank, started by ``manyhands train``, torchrun, accelerate, SLURM, or by hand."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":  # until there is something to save, Ctrl-C ends the rank silently: imports take a second
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from manyhands.core.errors import EXIT_FAILED, UserError, explain_foreign
from manyhands.core.files import explain_full_disk, is_disk_full
from manyhands.core.machine import end_with
from manyhands.core.text import print_safely
from manyhands.launch.environment import LAUNCHER_PID, detect_launcher
from manyhands.launch.slurm import block_save_signal, refuse_unknown_host

# Freeing a gloo group while its peer lives on was seen to hang (torch 2.13), so what a rank holds is left to the end of
# the process.
_KEPT: list[object] = []


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("manyhands.worker", description=__doc__)
    parser.add_argument("run", nargs="?", help="run file (YAML, TOML or JSON)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run-folder", type=Path, help="folder that `manyhands train` has planned")
    parser.add_argument("--fresh", action="store_true", help="start in a new folder even if the run exists")
    parser.add_argument("--hook", action="append", default=[], help="module:function that returns a Hook of the loop")
    parser.add_argument("--metric", action="append", default=[], help="NAME=module:function of an Evaluation")
    parser.set_defaults(load=None)
    arguments = parser.parse_args(argv)
    if (arguments.run is None) == (arguments.run_folder is None):
        parser.error("give a run file, or --run-folder")
    return arguments


def end_with_parent() -> None:
    """SIGTERM, which saves the run, as soon as the agent is gone: a killed agent's ranks would train on."""
    if not os.environ.get("TORCHELASTIC_RUN_ID") or not sys.platform.startswith("linux"):
        return
    launcher = int(os.environ.get(LAUNCHER_PID, 0))
    if not end_with(launcher or os.getppid(), signal.SIGTERM):  # it ended before it could be watched
        os._exit(128 + signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Exit code of this rank. Errors are written where the launcher finds them, and shown by one rank only."""
    block_save_signal()
    arguments = parse_arguments(argv)
    terminal = sys.stderr
    try:
        launcher = detect_launcher()
        if launcher.kind == "slurm":
            refuse_unknown_host(launcher.master_addr)
    except UserError as error:
        print(error, file=terminal)
        return error.exit_code
    if launcher.kind in ("manyhands", "torchrun", "accelerate"):
        end_with_parent()
    from manyhands.launch.diagnose.stacks import listen_for_signal
    from manyhands.launch.local.heartbeat import Heartbeat
    from manyhands.launch.run.folder import RunFolder

    # Before torch is imported, which takes long on a loaded machine.
    heartbeat = None
    if arguments.run_folder is not None and arguments.run_folder.is_dir():
        with contextlib.suppress(OSError):  # a full disk is met again, and reported, where failures are
            heartbeat = Heartbeat(RunFolder(arguments.run_folder), launcher.rank)
            listen_for_signal(RunFolder(arguments.run_folder), launcher.rank)
    from manyhands.worker.rendezvous import FirstRankFailed
    from manyhands.worker.run import run_rank
    from manyhands.worker.session import Session

    session = Session(launcher, heartbeat=heartbeat)
    _KEPT.append(session)
    try:
        return run_rank(session, arguments)
    except (UserError, FirstRankFailed) as error:
        session.report_failure(error)
        return error.exit_code
    except BaseException as error:
        foreign = explain_foreign(error)
        full = foreign or (
            explain_full_disk(error, session.folder.path)
            if session.folder is not None and is_disk_full(error)
            else None
        )
        if full is not None:
            with contextlib.suppress(OSError):  # where it happened, for the log
                traceback.print_exc()
        session.report_failure(full or error)
        return EXIT_FAILED


if __name__ == "__main__":
    print_safely()
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError):  # the log's disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: after a failure other ranks may never answer the collectives that a clean shutdown waits for.
    os._exit(code)
