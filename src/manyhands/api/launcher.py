"""``python -m manyhands.api.launcher FD``: the process that ``manyhands.train`` starts, which starts the ranks.

Reads the run, and how to start it, as a line of JSON from standard input, whose end means that the caller is gone;
writes JSON lines to the file descriptor: the folder, then the exit code or the error.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import explain_refused
from manyhands.core.text import print_safely
from manyhands.importers.load import LoadedRun
from manyhands.launch.local.start import start
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.resume import folder_of


def main(argv: list[str]) -> int:
    descriptor, asked = int(argv[0]), json.loads(_read_line())
    loaded, fresh = TypeAdapter(LoadedRun).validate_python(asked["run"]), asked["fresh"]
    threading.Thread(target=_end_with_caller, daemon=True).start()

    def report(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, json.dumps(message).encode() + b"\n")

    @contextlib.contextmanager
    def beside(folder: RunFolder) -> Iterator[None]:
        report(folder=str(folder.path))
        yield

    os.set_inheritable(descriptor, False)
    if not fresh:
        report(folder=str(folder_of(loaded.config).path))
    try:
        code = start(loaded, fresh=fresh, beside=beside, arguments=asked["arguments"])
    except UserError as error:
        report(error=error.to_json())
        return error.exit_code
    except OSError as error:
        if (refused := explain_refused(error, folder_of(loaded.config).path)) is None:
            raise
        report(error=refused.to_json())
        return refused.exit_code
    report(code=code)
    return code


def _read_line() -> bytes:
    """Without a buffer, which a thread that reads on would hold while the process ends."""
    text = b""
    while not text.endswith(b"\n") and (more := os.read(sys.stdin.fileno(), 1 << 16)):
        text += more
    return text


def _end_with_caller() -> None:
    """Once the caller is gone nobody waits for the run: it is asked to end, as by Ctrl-C, and saves its state."""
    while os.read(sys.stdin.fileno(), 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    print_safely()
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = EXIT_FAILED
    sys.exit(code)
