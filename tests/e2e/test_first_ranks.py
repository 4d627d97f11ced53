"""The first ranks of a launch import while the launcher imports torch's agent: the run is the same, and nothing is left
of them where the launch ends before they train. Real processes: in a fork all is imported already.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import NO_VERIFY, WAIT_S, Ended, Place, Run, at_step, train_command

pytestmark = pytest.mark.slow  # runs in processes of their own
STANDBY = "manyhands.worker.standby"
SLOW = {"manyhands.worker.run": f"import time\ntime.sleep({WAIT_S})"}


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("restarts", [3, 0])
def test_they_stood_by_and_train_as_others_do(place: Place, whole: tuple[Ended, Run], restarts: int) -> None:
    name = f"stood-by-{restarts}"
    mark = place.folder / name
    act = (
        f"command = pathlib.Path('/proc/self/cmdline').read_text()\n"
        f"pathlib.Path('{mark}-' + str(self.rank.world.rank)).write_text(command)"
    )
    command = train_command(name, "--gpus", "2", f"launch.restarts={restarts}")
    with place.start(*command, plant=NO_VERIFY | at_step(1, act), may_fork=False) as process:
        assert process.wait(WAIT_S) == 0, place.output.read_text()
    for rank in range(2):
        assert STANDBY in (place.folder / f"{name}-{rank}").read_text()
    assert "error" not in place.output.read_text() and "warning" not in place.output.read_text().lower()
    assert place.run(name).course() == whole[1].course()


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_nothing_is_left_of_them_where_the_launch_ends_first(place: Place, received: signal.Signals) -> None:
    command = train_command(f"ended-{received.name}", "--gpus", "2")
    with place.start(*command, plant=SLOW, may_fork=False) as process:
        launcher, deadline = psutil.Process(process.pid), time.monotonic() + WAIT_S
        found: list[psutil.Process] = []
        while len(found) < 2 or not handles_sigterm(process.pid):
            assert process.poll() is None and time.monotonic() < deadline, place.output.read_text()
            time.sleep(0.02)
            found = [child for child in launcher.children() if STANDBY in " ".join(child.cmdline())]
        process.send_signal(received)
        code = process.wait(60.0)
        gone, left = psutil.wait_procs(found, 10.0)
        assert not left and len(gone) == 2
    if received == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + received, place.output.read_text()
        assert "nothing was saved yet" in place.output.read_text() and "Traceback" not in place.output.read_text()
