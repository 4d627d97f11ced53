"""``python -m manyhands.demo.page [FOLDER] [--port N]``: the page with two finished runs and a live one.

The finished ones are short forms of the demo with two learning rates; they are trained the first time, which takes some
minutes on two CPU cores. The live one comes from the queue.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path

from manyhands.cli.runs import PORT, ui
from manyhands.core.errors import UserError
from manyhands.demo import demo_words
from manyhands.launch.run.folder import RunFolder
from manyhands.ui.commands import command_of
from manyhands.ui.queue import Queue

RATES = ("1e-3", "3e-3")
SHORT = ("stop.max_steps=16", "evaluate.every_steps=4", "evaluate.max_tokens=1000")
LIVE = ("stop.epochs=20", "stop.max_tokens=null", "evaluate.every_steps=10", "checkpoint.every_steps=20")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make ui-demo")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/page"))
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    train = ["train", *demo_words(), f"output.dir={folder}"]
    for rate in RATES:
        name = f"rate-{rate}"
        if not RunFolder(folder / name).is_finished:
            print(f"training {name}, which the page will show", flush=True)
            words = [*train, f"name={name}", f"optimizer.learning_rate={rate}", *SHORT]
            if code := subprocess.run(command_of(words)).returncode:
                raise SystemExit(code)
    with contextlib.suppress(UserError):  # it is at work since the last time
        Queue(folder).add([*train, "name=live", *LIVE, "--fresh"], "live")
    print("a third run starts; it continues if the page is closed, and Stop ends it", flush=True)
    ui(folder, arguments.port)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
