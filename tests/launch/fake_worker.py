"""A worker without a model: does what its folder's ``fake.json`` says for its rank. Imports no torch unless told to."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from manyhands.core.errors import UserError
from manyhands.launch.diagnose.failure import looks_like_consequence, wait_for_cause, write_failure
from manyhands.launch.local.heartbeat import Heartbeat, read_beat
from manyhands.launch.run.folder import RunFolder

LONG_S = 300.0  # longer than any test waits


def main() -> None:
    folder = RunFolder(sys.argv[sys.argv.index("--run-folder") + 1])
    rank = int(os.environ["RANK"])
    folder.logs.mkdir(parents=True, exist_ok=True)
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("train", 1)
    print(f"rank {rank} says hello", flush=True)
    what = json.loads((folder.path / "fake.json").read_text())[rank]
    try:
        act(what, folder, rank, heartbeat)
    except Exception as error:
        if what == "raise, written late":
            sleep_beyond_loss(folder)
        write_failure(folder, rank, "train", error)
        if looks_like_consequence(error):
            wait_for_cause(folder, rank, int(os.environ["WORLD_SIZE"]), limit_s=LONG_S)
        raise
    heartbeat.close()


def act(what: str, folder: RunFolder, rank: int, heartbeat: Heartbeat) -> None:
    deadline = time.monotonic() + LONG_S
    match what:
        case "end":
            return
        case "environment":
            (folder.path / f"environment-{rank}.json").write_text(json.dumps(dict(os.environ)))
            (folder.path / "heard").touch()
        case "bad device":  # wherever there is more than one rank
            if os.environ["WORLD_SIZE"] == "1":
                return
            time.sleep(0.3)
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        case "raise" | "raise late" | "raise, written late":
            if what == "raise late":
                sleep_beyond_loss(folder)
            raise ValueError("the cat sat on the keyboard")
        case "raise when heard":
            while not (folder.path / "heard").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise ValueError("the cat sat on the keyboard")
        case "user error":
            raise UserError("row 7 has no loss token", where="data.jsonl:7", fix="mend it")
        case "lost peer" if os.environ["WORLD_SIZE"] == "1":
            return
        case "lost peer":  # fails at once, as a consequence of what comes later
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        case "exit 3":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), 9)
        case "kill when the other is deaf":
            while not (folder.path / "deaf").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
        case "kill once" | "wait unless killed once":  # in the first launch of this folder; then both end well
            if (mark := folder.path / "killed").exists():
                return
            if what == "kill once":
                mark.touch()
                os.kill(os.getpid(), 9)
            heartbeat.count_collectives = lambda: 1
            sleep()
        case "kill late":
            sleep_beyond_loss(folder)
            os.kill(os.getpid(), 9)
        case "abort late":
            sleep_beyond_loss(folder)
            os.abort()
        case "stop":
            heartbeat.beat("save", 2)
            os.kill(os.getpid(), 19)
        case "beat":  # works on and on
            while time.monotonic() < deadline:
                heartbeat.beat("train", 2)
                time.sleep(0.05)
        case "wait":  # for a peer, in a collective
            heartbeat.count_collectives = lambda: 1
            sleep()
        case "work slowly, then end":  # while others wait
            heartbeat.beat("train", 1)
            for _ in range(180):
                time.sleep(0.05)
                heartbeat.beat("train", 1)
        case "wait for slow work, then end":
            heartbeat.count_collectives = lambda: 1
            while not ((other := read_beat(folder, 0)) and other.done) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1)  # it still has something to do
        case "finish when asked":
            signal.signal(signal.SIGTERM, lambda *_: (folder.write_status("finished"), heartbeat.close(), os._exit(0)))
            sleep()
        case "fail when finished":
            folder.write_status("finished")
            raise ValueError("the cat sat on the keyboard")
        case "hang":
            time.sleep(LONG_S)
        case "wait with child":  # and something it has started
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            sleep()
        case "deaf":  # waits, and does not hear SIGTERM
            heartbeat.count_collectives = lambda: 1
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            (folder.path / "deaf").touch()
            time.sleep(LONG_S)
        case "frozen":  # in a call that holds the GIL; it would save when asked to end
            heartbeat.count_collectives = lambda: 1
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            (folder.path / "deaf").touch()
            mutex = ctypes.create_string_buffer(64)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # no signal interrupts it


def sleep_beyond_loss(folder: RunFolder) -> None:
    """Until rank 0 has reported the loss of its peer, and as long as an impatient launcher needs to end this."""
    while not folder.failure(0).exists():
        time.sleep(0.05)
    time.sleep(2)


def sleep() -> None:
    print("ready", flush=True)
    time.sleep(LONG_S)


if __name__ == "__main__":
    main()
