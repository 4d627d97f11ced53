"""Runs that wait for this machine: a file in the folder of the runs, and a process (``python -m manyhands.ui.queue
FOLDER``, or ``manyhands sweep``) that starts the next one when the GPUs are free. Neither needs the page.
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
START_S = 60.0  # a process that began so long after its item was started has got the number of another
MAX_ENDED = 30  # items that are kept once they have ended
State = dict[str, Any]


def _is_item(value: Any) -> bool:
    """Whether this can be shown and run: the file may be damaged."""
    kinds = {"id": int, "title": str, "words": list}
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())


class Queue:
    """``queue.json``: ``{"paused": false, "gpus": [], "items": [...]}`` in the order in which they start. An item has
    ``id``, ``words`` of the command line, ``cwd``, and ``started``, ``pid``, ``gpu``, ``ended``, ``code`` as they come.
    ``gpus``: by uuid, one run on each; without any, one run at a time has the machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.file = self.folder / "queue.json"
        self.logs = self.folder / ".queue"

    def read(self) -> State:
        value = read_json(self.file)
        items = value.get("items") if isinstance(value, dict) else None
        items = [one for one in items if _is_item(one)] if isinstance(items, list) else []
        value = value if isinstance(value, dict) else {}
        gpus = value.get("gpus")
        gpus = [str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
        return {"paused": bool(value.get("paused")), "gpus": gpus, "items": items}

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
            number = self.append(state, words, title)
        self.start_runner()
        return number

    @staticmethod
    def append(state: State, words: Sequence[str], title: str) -> int:
        """``add`` within a change; starts nothing."""
        if any(one["words"] == list(words) and is_open(one) for one in state["items"]):
            raise UserError("this is in the queue already", where=title)
        number: int = 1 + max((one["id"] for one in state["items"]), default=0)
        state["items"].append(
            {"id": number, "title": title, "words": list(words), "cwd": os.getcwd(), "added": time.time()}
        )
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


def is_open(item: Mapping[str, Any]) -> bool:
    """Whether the item waits or is at work; not where it was ended while nobody looked."""
    if "ended" in item or "pid" not in item:
        return "ended" not in item
    with contextlib.suppress(psutil.Error, TypeError, ValueError):
        process = psutil.Process(item["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < item["started"] + START_S
    return False


def run_queue(
    queue: Queue,
    is_free: Callable[[Path, str | None], bool],
    look_s: float = LOOK_S,
    on_change: Callable[[Mapping[str, Any]], None] = lambda item: None,
) -> bool:
    """Starts what waits until all has ended or it is paused. False where another process does. ``on_change``: items."""
    queue.logs.mkdir(parents=True, exist_ok=True)
    with (queue.logs / "runner").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        children: dict[int, subprocess.Popen[bytes]] = {}
        while True:
            for number in _find_ended(queue, children):
                child = children.pop(number, None)
                on_change(_change_item(queue, number, ended=time.time(), code=child and child.returncode))
            state = queue.read()
            at_work = [one for one in state["items"] if "started" in one and "ended" not in one]
            waiting = next((one for one in state["items"] if "started" not in one), None)
            if waiting is None or state["paused"]:
                if not at_work:
                    return True
            else:
                taken = {one.get("gpu") for one in at_work}
                for gpu in state["gpus"] or [None]:
                    if gpu not in taken and is_free(queue.folder, gpu):
                        child = _start_item(queue, waiting["id"], gpu)
                        if child is not None:
                            children[waiting["id"]] = child
                            on_change(waiting)
                        break
                else:
                    time.sleep(look_s)
                    continue
            time.sleep(min(look_s, 1.0))


def _find_ended(queue: Queue, children: Mapping[int, subprocess.Popen[bytes]]) -> list[int]:
    """Items that have ended since: children, and what an earlier process has started."""
    ended = []
    for one in queue.read()["items"]:
        child = children.get(one["id"])
        if "started" in one and "ended" not in one and (child.poll() is not None if child else not is_open(one)):
            ended.append(one["id"])
    return ended


def _change_item(queue: Queue, number: int, **changes: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    with queue.change() as state:
        for one in state["items"]:
            if one["id"] == number:
                one |= changes
                found = one
    return found


def _start_item(queue: Queue, number: int, gpu: str | None) -> subprocess.Popen[bytes] | None:
    """The child has a session of its own: it survives this process. None where it cannot be started."""
    with queue.change() as state:
        item = next((one for one in state["items"] if one["id"] == number), None)
        if item is None:  # removed meanwhile
            return None
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
                    env=None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                )
        except OSError as error:  # the folder that it was started from is gone
            queue.log(number).write_text(f"{error}\n", encoding="utf-8")
            item |= {"ended": time.time(), "code": 1}
            return None
        item |= {"pid": child.pid} | ({} if gpu is None else {"gpu": gpu})
    return child


def is_machine_free(folder: Path, gpu: str | None = None) -> bool:
    """Whether nobody uses this GPU; without one, whether nobody uses any, and no run of the folder is at work."""
    from manyhands.facts.host import read_host_facts

    if gpu is None and any(is_at_work(RunFolder(path.parent)) for path in folder.glob("*/run.json")):
        return False
    gpus = [one for one in read_host_facts().gpus if gpu in (None, one.uuid)]
    return all(one.free_bytes >= FREE_SHARE * one.memory_bytes for one in gpus)


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
    name = read_object(folder.run_json).get("name") or folder.read_config().name  # which says what is wrong with it
    if name != path.name:
        raise UserError("the run's folder has another name than the run", where=str(path), fix=f"rename it to {name}")
    return ["train", str(path / folder.run_json.name), f"output.dir={path.parent}"]


def describe(queue: Queue, read_log: Callable[[Path], list[str]]) -> Mapping[str, Any]:
    """For the page: every item with its state and the end of its output."""
    state = queue.read()
    items = []
    for one in state["items"]:
        words = {0: "finished", 130: "interrupted", 143: "interrupted", None: "unknown"}  # ended without the runner
        word = "waiting" if "started" not in one else words.get(one.get("code"), "failed")
        word = "running" if word == "unknown" and is_open(one) else word
        lines = read_log(queue.log(one["id"]))[-8:] if "started" in one else []
        shown = {key: one.get(key) for key in ("id", "title", "added", "started", "ended", "code")}
        items.append({**shown, "words": " ".join(["manyhands", *one["words"]]), "state": word, "log": lines})
    return {"paused": state["paused"], "items": items}


if __name__ == "__main__":
    run_queue(Queue(Path(sys.argv[1])), is_machine_free)
