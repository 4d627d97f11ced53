"""Starting a run from Python: by a launcher of its own beside this process, or in this process where it is a rank.

The launcher is a process, so that signals, environment variables and file descriptors of a script or a notebook stay as
they are. Imports no torch.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from manyhands.api.callbacks import Callbacks, Follower, name_object
from manyhands.api.display import PIPE_VARIABLES, TERMINAL_VARIABLES, Display, open_display
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import LAUNCHER_PID, detect_launcher
from manyhands.launch.run.folder import RunFolder

POLL_S = 0.2


def start(
    load: Callable[[], LoadedRun],
    *,
    fresh: bool = False,
    callbacks: Callbacks,
    hooks: Sequence[Any] = (),
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Trains the run to its end; returns its folder. ``load`` is called once, by rank 0 where there are ranks already.

    Raises ``UserError``, ``KeyboardInterrupt`` after Ctrl-C, and what a callback has raised.
    """
    if os.environ.get(LAUNCHER_PID):
        raise UserError(
            "a rank of a run would start a run",
            where=str(getattr(sys.modules.get("__main__"), "__file__", "a worker")),
            why="the file was imported by a rank, and what it calls is not behind `if __name__ == '__main__':`",
            fix="put the call behind that line",
        )
    try:
        if detect_launcher().kind == "none":
            named = [part for hook in hooks for part in ("--hook", name_object(hook))]
            named += [
                part for name, one in (metrics or {}).items() for part in ("--metric", f"{name}={name_object(one)}")
            ]
            return _start_processes(load(), fresh=fresh, callbacks=callbacks, arguments=named)
        from manyhands.api.rank import run_as_rank

        return run_as_rank(load, fresh=fresh, callbacks=callbacks, hooks=hooks, metrics=metrics)
    except UserError as error:
        error.fix = error.fix.replace("--fresh", "fresh=True")
        raise error.with_traceback(None) from None  # the user's own lines are all that helps


def on_first_rank(work: Callable[[], object]) -> None:
    """``work`` in this process alone, or by rank 0 while the others wait for it."""
    launcher = detect_launcher()
    if launcher.kind == "none" or launcher.world_size == 1:
        work()
        return
    from manyhands.api.rank import run_on_first_rank

    run_on_first_rank(launcher, work)


def _start_processes(loaded: LoadedRun, *, fresh: bool, callbacks: Callbacks, arguments: Sequence[str]) -> Path:
    show = open_display()
    environment = {k: v for k, v in os.environ.items() if show is None or k not in TERMINAL_VARIABLES}
    sys.stdout.flush()  # what was printed before stands above what the run prints
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "manyhands.api.launcher", str(writing)],
        stdin=subprocess.PIPE,
        stdout=None if show is None else subprocess.PIPE,
        stderr=None if show is None else subprocess.STDOUT,
        env=environment | ({} if show is None else PIPE_VARIABLES),
        pass_fds=(writing,),
        process_group=0,  # Ctrl-C on a terminal comes to this process, which passes it on once
    )
    os.close(writing)
    assert child.stdin is not None
    run = TypeAdapter(LoadedRun).dump_python(loaded, mode="json")
    child.stdin.write(json.dumps({"run": run, "fresh": fresh, "arguments": list(arguments)}).encode() + b"\n")
    child.stdin.flush()  # and stays open: at its end the launcher knows that this process is gone
    lines = threading.Thread(target=_pass_on, args=(child.stdout, show), daemon=True) if show is not None else None
    if lines is not None:
        lines.start()
    waiting = _Waiting(child, reading, callbacks, show)
    try:
        return waiting.to_the_end()
    finally:
        child.stdin.close()
        child.wait()
        if lines is not None:
            lines.join()
        if show is not None:
            show.end()
        os.close(reading)


class _Waiting:
    """Until the launcher has ended: its messages, the rows of the run, Ctrl-C."""

    def __init__(
        self, child: subprocess.Popen[bytes], reading: int, callbacks: Callbacks, show: Display | None
    ) -> None:
        self.child, self.reading, self.callbacks, self.show = child, reading, callbacks, show
        self.folder: Path | None = None
        self.follower: Follower | None = None
        self.error: UserError | None = None
        self.code: int | None = None
        self.interrupts = 0
        self._text = b""

    def to_the_end(self) -> Path:
        while self.code is None and self.error is None:
            try:
                ended = self._wait()
            except KeyboardInterrupt:
                self._interrupt()
                continue
            if ended:
                break
        self._look()
        if self.callbacks.error is not None:
            raise self.callbacks.error
        if self.error is not None:
            raise self.error
        if self.code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if self.code != 0 or self.folder is None:
            code = self.child.wait() if self.code is None else self.code
            raise UserError(
                "the run has ended" if self.code else "the launcher ended without a message",
                where=str(self.folder or ""),
                why=f"exit code {code}" + (f", {signal.Signals(-code).name}" if code < 0 else ""),
                fix="the same call resumes it",
                exit_code=abs(code) or EXIT_FAILED,
            )
        return self.folder

    def _wait(self) -> bool:
        """A moment, or until a message comes. True at the end of all messages."""
        ready, _, _ = select.select([self.reading], [], [], POLL_S)
        self._look()
        if not ready:
            return False
        text = os.read(self.reading, 1 << 16)
        self._text += text
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return not text

    def _take(self, message: dict[str, Any]) -> None:
        if "folder" in message:
            self.folder = Path(message["folder"])
            self.follower = Follower(RunFolder(self.folder).metrics)
            if self.show is not None:
                self.show.begin(self.folder)
        elif "error" in message:
            self.error = UserError.from_json(message["error"])
        else:
            self.code = message["code"]

    def _look(self) -> None:
        for row in self.follower.read() if self.follower is not None else ():
            self.callbacks(row)
            if self.show is not None:
                self.show.take(row)
        if self.callbacks.error is not None and not self.interrupts:
            if self.folder is not None and self.code is None and self.error is None:
                folder = RunFolder(self.folder)
                with contextlib.suppress(OSError), open(folder.launcher_log, "a", encoding="utf-8") as log:
                    self.callbacks.explain(folder, log)
            self._interrupt()

    def _interrupt(self) -> None:
        """Once: the run saves its state. Again: it ends at once."""
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(self.interrupts, 2)]
        self.interrupts += 1
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)


def _pass_on(stream: Any, show: Display) -> None:
    for line in stream:
        show.line(line.decode(errors="replace").rstrip("\n"))
