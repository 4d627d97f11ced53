"""A command of ours as a process beside a script or a notebook. Imports no torch."""

import subprocess
import sys
import tempfile

from manyhands.core.errors import UserError
from manyhands.core.text import printable


def run_module(*words: str) -> str:
    """Runs ``python -m`` these words; returns its standard output, passes progress on, raises its ``UserError``."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        subprocess.Popen([sys.executable, "-m", *words], stdout=output, stderr=subprocess.PIPE, text=True) as child,
    ):
        said: list[str] = []
        assert child.stderr is not None
        try:
            for line in child.stderr:
                said.append(line)
                if not line.startswith(("error:", "  ")):
                    print(printable(line), end="", file=sys.stderr, flush=True)
        except BaseException:  # a notebook's interrupt reaches this process alone; what was written so far is kept
            child.terminate()
            child.wait()
            raise
        child.wait()
        output.seek(0)
        text = output.read()
    if child.returncode:
        # without a message of ours, the last line, where a traceback says what happened
        begin = next((n for n, line in enumerate(said) if line.startswith("error: ")), len(said) - 1)
        what, *rest = "".join(said[begin:]).strip().split("\n") if said else [f"exit code {child.returncode}"]
        raise UserError(what.removeprefix("error: "), details=[line.strip() for line in rest])
    return text
