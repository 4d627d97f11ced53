"""What a rank is doing at this moment, written by itself when asked: the Python stacks of its threads and its last
collectives. Imports no torch.

Whoever wants to know puts a token into ``.ranks/ask``; the thread that writes each rank's heartbeat answers, so ranks
of other machines do too. One that cannot answer, because a compiled library holds the interpreter, is asked by a signal
(``STACK_SIGNAL``), whose handler is faulthandler's and needs no interpreter.
"""

import contextlib
import faulthandler
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from manyhands.core.files import read_json, write_atomically, write_json
from manyhands.launch.run.folder import RunFolder

STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 is SLURM's notice
MAX_FRAMES = 80
MAX_COLLECTIVES = 10  # the last ones, and as many of those that have not ended
MAIN = "MainThread"
OWN_THREADS = ("heartbeat", "watch", "stop-signal", "save-signal")  # of ours, always waiting

_KEPT: list[IO[str]] = []  # faulthandler writes to a file descriptor, which must stay open


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({shorten(self.file)}:{self.line})"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered, as torch's flight recorder has it."""

    name: str  # all_reduce
    group: str
    number: int  # in its group, from 1
    sizes: str  # of the inputs
    done: bool
    started: bool = True  # by the device; what is only queued waits for work before it

    def __str__(self) -> str:
        group = "" if self.group == "default_pg" else f" of group {self.group}"
        return f"{self.name} number {self.number}{group}, sizes {self.sizes}"


@dataclass(frozen=True)
class RankStacks:
    """What a rank has said of itself. ``threads``: by name, the innermost frame first."""

    threads: dict[str, list[Frame]] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()  # the newest last
    text: str = ""  # stacks as another tool has written them, where the rank could not answer

    @property
    def main(self) -> list[Frame]:
        return self.threads.get(MAIN, [])

    @property
    def waits_in(self) -> Collective | None:
        """The oldest collective that has not ended: on a GPU others may be queued behind it."""
        return next((one for one in self.collectives if not one.done), None)


def shorten(file: str) -> str:
    """A path as a reader needs it: from its package on."""
    for mark in ("/site-packages/", "/src/manyhands/", "/lib/python3"):
        _, found, rest = file.rpartition(mark)
        if found:
            return f"manyhands/{rest}" if "manyhands" in mark else rest if "site" in mark else rest.partition("/")[2]
    return Path(file).name


# In a rank.


class StackDumper:
    """Writes one rank's stacks on request. ``dump_if_requested`` costs a look at one file while nobody asks."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._answered = read_token(folder)  # of an earlier launch
        self._seen: object = None

    def dump_if_requested(self, read_collectives: Callable[[], list[dict[str, Any]]]) -> None:
        """Writes what this rank does now, if that was asked since the last call."""
        with contextlib.suppress(OSError, RuntimeError):
            seen = self._folder.stack_request.stat().st_mtime_ns
            if seen == self._seen:
                return
            self._seen = seen
            token = read_token(self._folder)
            if token and token != self._answered:
                self._answered = token
                fields = {"token": token, "threads": read_threads(), "collectives": read_collectives()}
                write_json(self._folder.stacks(self._rank), fields)


def read_threads() -> dict[str, list[tuple[str, int, str]]]:
    """The stacks of this process's Python threads, the main thread first, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[str, list[tuple[str, int, str]]] = {}
    for ident, top in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if name in OWN_THREADS:
            continue
        name = MAIN if ident == threading.main_thread().ident else name
        stack = traceback.StackSummary.extract(traceback.walk_stack(top), limit=MAX_FRAMES, lookup_lines=False)
        found[name if name not in found else f"{name} {ident}"] = [(f.filename, f.lineno or 0, f.name) for f in stack]
    return dict(sorted(found.items(), key=lambda item: item[0] != MAIN))


def listen_for_signal(folder: RunFolder, rank: int) -> None:
    """From now on ``STACK_SIGNAL`` writes this process's stacks into a file of the run, in whatever state it is."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no such signal here, or not the main thread
        file = open(folder.stack(rank), "w", encoding="utf-8")
        file.write(f"pid {os.getpid()}\n")
        file.flush()
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        _KEPT.append(file)


# In whoever asks.


def request_stacks(folder: RunFolder) -> str:
    """Asks all ranks; returns the token that their answers carry."""
    token = secrets.token_hex(8)
    write_atomically(folder.stack_request, token)
    return token


def read_token(folder: RunFolder) -> str:
    try:
        return folder.stack_request.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_stacks(folder: RunFolder, rank: int, token: str) -> RankStacks | None:
    """The rank's answer to ``token``, or None as long as there is none."""
    fields = read_json(folder.stacks(rank))
    if not isinstance(fields, dict) or fields.get("token") != token:
        return None
    threads = {name: [Frame(*frame) for frame in stack] for name, stack in fields["threads"].items()}
    return RankStacks(threads, tuple(Collective(**one) for one in fields["collectives"]))


def signal_for_stack(folder: RunFolder, rank: int, pid: int) -> bool:
    """Sends ``STACK_SIGNAL`` to a rank of this machine if it listens: others would be killed by it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open(folder.stack(rank), encoding="utf-8") as file:
            listens = file.readline().strip() == f"pid {pid}"
        if listens:
            os.kill(pid, STACK_SIGNAL)
        return listens
    return False


def read_stack(folder: RunFolder, rank: int) -> str:
    """What ``STACK_SIGNAL`` has written so far, the newest part; "" before."""
    try:
        text = folder.stack(rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, _, written = text.partition("\n")
    return written.strip()


def parse_faulthandler(text: str) -> dict[str, list[Frame]]:
    """Threads of faulthandler's text; the one that the signal has met is the main thread, as Python arranges."""
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            name = MAIN if line.startswith("Current") else line.split()[1]
            frames = threads[name] = []  # of several dumps the newest
        elif line.startswith("  File ") and (parts := line.strip().rsplit(", line ", 1)):
            number, _, function = parts[1].partition(" in ")
            frames.append(Frame(parts[0].removeprefix("File ").strip('"'), int(number), function))
    return threads
