"""Runs that wait for this machine: a file in the folder of the runs, and a process of its own (``python -m
manyhands.ui.queue FOLDER``) that starts the next one when the GPUs are free. Neither needs the page.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from manyhands.core.errors import UserError
from manyhands.core.files import read_json, read_object, write_json
from manyhands.launch.local.heartbeat import read_beats, was_killed
from manyhands.launch.run.folder import RunFolder
from manyhands.ui.commands import command_of

LOOK_S = 5.0
FREE_SHARE = 0.9  # of a GPU's memory: less means that somebody uses it
MAX_ENDED = 30  # items that are kept once they have ended
State = dict[str, Any]


class Queue:
    """``queue.json``: ``{"paused": false, "items": [...]}`` in the order in which they start. An item has ``id``,
    ``words`` of the command line, ``cwd``, and ``started``, ``pid``, ``ended``, ``code`` as it comes to them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.file = self.folder / "queue.json"
        self.logs = self.folder / ".queue"

    def read(self) -> State:
        value = read_json(self.file)
        items = value.get("items") if isinstance(value, dict) else None
        items = [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
        return {"paused": bool(isinstance(value, dict) and value.get("paused")), "items": items}

    @contextmanager
    def change(self) -> Iterator[State]:
        """The state, written back at the end; one process at a time."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.read()
            yield state
            ended = [one["id"] for one in state["items"] if "ended" in one]
            dropped = set(ended[:-MAX_ENDED])
            state["items"] = [one for one in state["items"] if one["id"] not in dropped]
            write_json(self.file, state)

    def add(self, words: Sequence[str], title: str) -> int:
        """Returns the item's number. UserError where the same waits or runs already."""
        with self.change() as state:
            if any(one["words"] == list(words) and "ended" not in one for one in state["items"]):
                raise UserError("this is in the queue already", where=title)
            number = 1 + max((one["id"] for one in state["items"]), default=0)
            state["items"].append(
                {"id": number, "title": title, "words": list(words), "cwd": os.getcwd(), "added": time.time()}
            )
        self.start_runner()
        return number

    def remove(self, number: int) -> None:
        """One that waits, or has ended."""
        with self.change() as state:
            state["items"] = [
                one for one in state["items"] if one["id"] != number or ("started" in one and "ended" not in one)
            ]

    def pause(self, paused: bool) -> None:
        """Whether no further run is started."""
        with self.change() as state:
            state["paused"] = paused
        if not paused:
            self.start_runner()

    def log(self, number: int) -> Path:
        return self.logs / f"{number}.log"

    def start_runner(self) -> None:
        """Where something waits. A second one ends at once."""
        state = self.read()
        if state["paused"] or all("started" in one for one in state["items"]):
            return
        command = [sys.executable, "-m", "manyhands.ui.queue", str(self.folder)]
        with (self.logs / "runner.log").open("ab") as log:
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )


def run_queue(queue: Queue, is_free: Callable[[Path], bool], look_s: float = LOOK_S) -> None:
    """Starts what waits, one after the other, until nothing does or the queue is paused."""
    with (queue.logs / "runner").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        while True:
            state = queue.read()
            waiting = next((one for one in state["items"] if "started" not in one), None)
            if waiting is None or state["paused"]:
                return
            if not is_free(queue.folder):
                time.sleep(look_s)
                continue
            _run_item(queue, waiting["id"])


def _run_item(queue: Queue, number: int) -> None:
    """The child has a session of its own: it goes on where this process is ended."""
    with queue.change() as state:
        item = next((one for one in state["items"] if one["id"] == number), None)
        if item is None:  # removed meanwhile
            return
        item["started"] = time.time()
        try:
            with queue.log(number).open("wb") as log:
                child = subprocess.Popen(
                    command_of(item["words"]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=item.get("cwd") or None,
                )
        except OSError as error:  # the folder that it was started from is gone
            queue.log(number).write_text(f"{error}\n", encoding="utf-8")
            item |= {"ended": time.time(), "code": 1}
            return
        item["pid"] = child.pid
    code = child.wait()
    with queue.change() as state:
        for one in state["items"]:
            if one["id"] == number:
                one |= {"ended": time.time(), "code": code}


def is_machine_free(folder: Path) -> bool:
    """Whether no run of the folder is at work, and nobody uses a GPU."""
    from manyhands.facts.host import read_host_facts

    if any(is_at_work(RunFolder(path.parent)) for path in folder.glob("*/run.json")):
        return False
    return all(gpu.free_bytes >= FREE_SHARE * gpu.memory_bytes for gpu in read_host_facts().gpus)


def is_at_work(folder: RunFolder) -> bool:
    """Whether a launcher of this machine holds the run, or its status says that it runs and it was not killed."""
    if find_launcher(folder) is not None:
        return True
    status = folder.read_status()
    return status.get("state") == "running" and not was_killed(folder, status, read_beats(folder))


def find_launcher(folder: RunFolder) -> psutil.Process | None:
    """The process that holds the run's lock; None where none does, or one of another machine."""
    holder = read_json(folder.lock_file)
    if not isinstance(holder, dict) or holder.get("host") != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, OSError, TypeError, ValueError):
        process, lock = psutil.Process(holder.get("pid")), folder.lock_file.stat()
        for link in Path(f"/proc/{process.pid}/fd").iterdir():  # its own lock, not that of one who had the number
            with contextlib.suppress(OSError):
                if os.path.samestat(link.stat(), lock):
                    return process
    return None


def stop(folder: RunFolder) -> None:
    """SIGTERM: the run saves and ends. UserError where it is not at work on this machine."""
    launcher = find_launcher(folder)
    if launcher is None:
        raise UserError(
            "no launcher of this run is at work on this machine",
            where=str(folder.path),
            fix=f"if it runs on another one, make a file {folder.stop_file.name} in its folder",
        )
    launcher.send_signal(signal.SIGTERM)


def words_to_resume(folder: RunFolder) -> list[str]:
    """The command line that continues a run: its run.json, in the folder where it is."""
    path = folder.path.resolve()
    if (name := read_object(folder.run_json).get("name")) != path.name:
        raise UserError("the run's folder has another name than the run", where=str(path), fix=f"rename it to {name}")
    return ["train", str(path / folder.run_json.name), f"output.dir={path.parent}"]


def describe(queue: Queue, read_log: Callable[[Path], list[str]]) -> Mapping[str, Any]:
    """For the page: every item with its state and the end of its output."""
    state = queue.read()
    items = []
    for one in state["items"]:
        is_alive = "pid" in one and psutil.pid_exists(one["pid"])
        words = {0: "finished", 130: "interrupted", 143: "interrupted", None: "unknown"}  # ended without the runner
        word = "waiting" if "started" not in one else words.get(one.get("code"), "failed")
        word = "running" if word == "unknown" and is_alive else word
        lines = read_log(queue.log(one["id"]))[-8:] if "started" in one else []
        shown = {key: one.get(key) for key in ("id", "title", "added", "started", "ended", "code")}
        items.append({**shown, "words": " ".join(["manyhands", *one["words"]]), "state": word, "log": lines})
    return {"paused": state["paused"], "items": items}


if __name__ == "__main__":
    run_queue(Queue(Path(sys.argv[1])), is_machine_free)
