"""The first ranks of a launch import while the launcher imports torch's agent: the run is the same, and nothing is left
of them where the launch ends before they train. Real processes: in a fork all is imported already.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import psutil
import pytest

from tests.e2e.runs import NO_VERIFY, WAIT_S, Ended, Place, Run, at_step, kill_all, train_command

pytestmark = pytest.mark.slow  # runs in processes of their own
STANDBY = "manyhands.worker.standby"
SLOW = {"manyhands.worker.run": f"import time\ntime.sleep({WAIT_S})"}


@contextlib.contextmanager
def launched(place: Place, name: str, *keys: str, plant: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    with open(place.output, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *train_command(name, "--gpus", "2", *keys)],
            cwd=place.folder,
            env=place.variables(plant, None),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_all(process.pid)
            process.wait()


@pytest.mark.parametrize("restarts", [3, 0])
def test_they_stood_by_and_train_as_others_do(place: Place, whole: tuple[Ended, Run], restarts: int) -> None:
    name = f"stood-by-{restarts}"
    mark = place.folder / name
    act = (
        f"command = pathlib.Path('/proc/self/cmdline').read_text()\n"
        f"pathlib.Path('{mark}-' + str(self.rank.world.rank)).write_text(command)"
    )
    with launched(place, name, f"launch.restarts={restarts}", plant=NO_VERIFY | at_step(1, act)) as process:
        assert process.wait(WAIT_S) == 0, place.output.read_text()
    for rank in range(2):
        assert STANDBY in (place.folder / f"{name}-{rank}").read_text()
    assert "error" not in place.output.read_text() and "warning" not in place.output.read_text().lower()
    assert place.run(name).course() == whole[1].course()


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_nothing_is_left_of_them_where_the_launch_ends_first(place: Place, received: signal.Signals) -> None:
    with launched(place, f"ended-{received.name}", plant=SLOW) as process:
        launcher, deadline = psutil.Process(process.pid), time.monotonic() + WAIT_S
        while len(found := [child for child in launcher.children() if STANDBY in " ".join(child.cmdline())]) < 2:
            assert process.poll() is None and time.monotonic() < deadline, place.output.read_text()
            time.sleep(0.02)
        time.sleep(1.0)  # its handlers are there
        process.send_signal(received)
        code = process.wait(60.0)
        gone, left = psutil.wait_procs(found, 10.0)
        assert not left and len(gone) == 2
    if received == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + received, place.output.read_text()
        assert "nothing was saved yet" in place.output.read_text() and "Traceback" not in place.output.read_text()
