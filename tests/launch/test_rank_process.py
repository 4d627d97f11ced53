"""A rank that was killed has ended for its launcher, though it still gives memory back; whoever needs that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from manyhands.launch import rank_process
from manyhands.launch.rank_process import RankProcess, await_memory, killed_by

PAUSE = [sys.executable, "-c", "import time; time.sleep(60)"]
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def start(*command: str) -> RankProcess:
    return RankProcess(list(command) or PAUSE, start_new_session=True)


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> RankProcess:
    """Killed; its parent is told nothing, as while a last thread is still at work in the kernel."""
    process = start()
    monkeypatch.setattr(subprocess.Popen, "_internal_poll", lambda self, **_: None)
    monkeypatch.setattr(subprocess.Popen, "_try_wait", lambda self, flags: (0, 0))
    os.kill(process.pid, signal.SIGKILL)
    return process


@linux
def test_a_killed_process_has_ended_before_its_last_thread(lingering: RankProcess) -> None:
    assert lingering.wait(10) == -signal.SIGKILL and lingering.poll() == -signal.SIGKILL
    assert not lingering.is_gone


@linux
def test_other_processes_have_not() -> None:
    running, exited = start(), start(sys.executable, "-c", "raise SystemExit(3)")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{exited.pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
    assert killed_by(exited.pid) is None, "an exit code is no signal: other threads may run on"
    assert exited.poll() == 3 and exited.is_gone
    assert killed_by(running.pid) is None and running.poll() is None and killed_by(2**22 + 1) is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.2)
    running.kill()
    assert running.wait() == -signal.SIGKILL


def process(*gone: bool) -> Mock:
    """One that is gone at the last of so many looks."""
    made, answers = Mock(), iter(gone)
    type(made).is_gone = property(lambda _: next(answers, gone[-1]))
    return made


def test_who_has_room_does_not_wait_and_who_has_none_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "LOOK_S", 0.0)
    free = iter([10, 20, 30, 40])
    await_memory([process(False)], 30, lambda: next(free))
    assert next(free) == 40, "three looks"
    asked = Mock(return_value=None)
    await_memory([process(True), process(False, False, True)], 0, asked)
    assert asked.call_count == 2, "nothing can start beside it"
    await_memory([], 1, Mock(side_effect=AssertionError))


def test_one_that_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "GONE_S", 0.2)
    await_memory([process(False)], 1, lambda: 0)
