"""Starting a command that needs torch in a process of its own, so that this one stays light."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from manyhands.core.errors import EXIT_FAILED, EXIT_TERMINATED, UserError

GRACE_S = 10.0


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Runs ``python -m module arguments`` on this terminal and returns its exit code.

    Ctrl-C reaches the child as well (one process group): it gets ``GRACE_S`` seconds to end, and ``KeyboardInterrupt``
    is raised then. SIGTERM is passed on. A child killed by a signal raises ``UserError`` with that signal's name.
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
        why = "the machine ran out of memory, most likely" if name == "SIGKILL" else ""
        exit_code = EXIT_TERMINATED if name == "SIGTERM" else EXIT_FAILED
        raise UserError(f"the process was ended by {name}", where=f"python -m {module}", why=why, exit_code=exit_code)
    return code
