"""A worker without a model: does what its folder's ``fake.json`` says for its rank. Imports no torch unless told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from manyhands.errors import UserError
from manyhands.launch.failure import write_failure
from manyhands.launch.heartbeat import Heartbeat
from manyhands.launch.run_folder import RunFolder


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
        write_failure(folder, rank, "train", error)
        raise


def act(what: str, folder: RunFolder, rank: int, heartbeat: Heartbeat) -> None:
    deadline = time.monotonic() + 60
    match what:
        case "end":
            return
        case "environment":
            (folder.path / f"environment-{rank}.json").write_text(json.dumps(dict(os.environ)))
        case "raise":
            time.sleep(0.3)
            raise ValueError("the cat sat on the keyboard")
        case "user error":
            raise UserError("row 7 has no trained token", where="data.jsonl:7", fix="mend it")
        case "lost peer":  # fails at once, as a consequence of what comes later
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        case "exit 3":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), 9)
        case "stop":
            heartbeat.beat("save", 2)
            os.kill(os.getpid(), 19)
        case "beat":  # works on and on
            while time.monotonic() < deadline:
                heartbeat.beat("train", 2)
                time.sleep(0.05)
        case "wait":  # for a peer, in a collective
            time.sleep(60)
        case "wait with child":  # and something it has started
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
        case "deaf":  # waits, and does not hear SIGTERM
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)


if __name__ == "__main__":
    main()
