"""Each rank's output goes into its own log file; rank 0 keeps the terminal for what a person wants to see."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


def redirect_output(log: Path) -> TextIO:
    """Sends file descriptors 1 and 2, so also what C++ libraries write, to ``log`` (appended); returns the old
    stdout.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return terminal
