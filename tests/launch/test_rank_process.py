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
from manyhands.launch.environment import ENDING
from manyhands.launch.rank_process import RankProcess, await_end, await_memory, exit_code_of, has_released_memory

PAUSE = [sys.executable, "-c", "import time; time.sleep(60)"]
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def start(*command: str) -> RankProcess:
    return RankProcess(list(command) or PAUSE, start_new_session=True)


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent is told nothing of an end, as while a last thread is still at work in the kernel."""
    monkeypatch.setattr(subprocess.Popen, "_internal_poll", lambda self, **_: None)
    monkeypatch.setattr(subprocess.Popen, "_try_wait", lambda self, flags: (0, 0))


@linux
@pytest.mark.usefixtures("untold")
def test_a_killed_process_has_ended_before_its_last_thread() -> None:
    killed = start()
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(10) == -signal.SIGKILL and killed.poll() == -signal.SIGKILL
    assert not killed.is_gone


@linux
@pytest.mark.usefixtures("untold")
def test_so_has_one_that_leaves_at_once_as_ranks_do_whose_peer_was_killed() -> None:
    left = start(sys.executable, "-c", "import os, threading; threading.Timer(0.1, os._exit, (143,)).start(); input()")
    assert left.wait(10) == 143 and not left.is_gone


THREAD_ALONE = """
import ctypes, threading, time
threading.Thread(target=lambda: (time.sleep(0.5), print("computes", flush=True), time.sleep(60))).start()
ctypes.CDLL(None).syscall({exit}, 3)  # of this thread alone
"""


@linux
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_one_whose_first_thread_alone_has_ended_computes_on() -> None:
    process = RankProcess([sys.executable, "-c", THREAD_ALONE.format(exit=60)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"computes\n"
    assert rank_process._read_stat(process.pid)[0] == "Z" and process.poll() is None
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()


def test_a_thread_that_gives_memory_back_computes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is that of a thread that runs; Linux marks it as exiting. So it is with the first one too."""
    killed = ["R", *"00000", str(0x400044), *"0" * 42, str(int(signal.SIGKILL))]
    for state, flags, expected in (("R", 0x400044, -9), ("D", 0x44, -9), ("R", 0x400040, None)):
        fields = [state, *killed[1:6], str(flags), *killed[7:]]
        monkeypatch.setattr(rank_process, "_read_stat", lambda pid, thread="", fields=fields: fields)
        assert exit_code_of(os.getpid()) == expected


@linux
def test_other_processes_have_not() -> None:
    running, exited = start(), start(sys.executable, "-c", "pass")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{exited.pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
    assert exit_code_of(exited.pid) is None, "0 is also what is said to those who may not know"
    assert exited.poll() == 0 and exited.is_gone
    assert exit_code_of(running.pid) is None and running.poll() is None and exit_code_of(2**22 + 1) is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.2)
    running.kill()
    assert running.wait() == -signal.SIGKILL


def process(*gone: bool) -> Mock:
    """One that is gone at the last of so many looks."""
    made, answers = Mock(), iter(gone)
    type(made).is_gone = property(lambda _: next(answers, gone[-1]))
    return made


def test_nothing_is_left_of_those_that_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "LOOK_S", 0.0)
    waited = [process(True), process(False, False, True)]
    await_end(waited)
    assert all(one.is_gone for one in waited)
    monkeypatch.setattr(rank_process, "GONE_S", 0.2)
    await_end([process(False)])  # not for ever


@linux
def test_who_has_room_does_not_wait_and_who_has_none_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "LOOK_S", 0.0)
    free, looks, running = iter([10, 20, 30, 40]), Mock(), start()
    await_memory([running.pid], 30, lambda: next(free), looks)
    assert next(free) == 40 and looks.call_count == 2, "room at the third look"
    os.kill(running.pid, signal.SIGKILL)
    await_memory([running.pid, 2**22 + 1], 30, lambda: 0, looks)  # a zombie, as nobody has asked for its exit code
    assert has_released_memory(running.pid) and Path(f"/proc/{running.pid}").exists()
    running.wait()
    await_memory([], 1, Mock(side_effect=AssertionError), looks)


@linux
def test_the_next_rank_waits_where_a_full_gpu_takes_no_further_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver needs hundreds of MiB for a process; what it says once nobody gives memory back any more is raised."""
    import torch

    from manyhands.worker.rendezvous import pick_device

    monkeypatch.setattr(rank_process, "LOOK_S", 0.0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    full, use = RuntimeError("CUDA error: out of memory"), Mock()
    monkeypatch.setattr(torch.cuda, "set_device", use)
    running = start()
    monkeypatch.setenv(ENDING, str(running.pid))
    use.side_effect = [full, full, None, None]
    assert pick_device("cuda", 0) == torch.device("cuda", 0) and use.call_count == 4
    running.kill()
    await_end([running])
    use.side_effect = [full]
    with pytest.raises(RuntimeError, match="out of memory"):
        pick_device("cuda", 0)


@linux
def test_a_zombie_whose_threads_run_on_has_given_nothing_back() -> None:
    """As a rank that was killed, whose last thread frees pinned memory."""
    threads = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    leader = start(sys.executable, "-c", threads + "; ctypes.CDLL(None).pthread_exit(None)")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{leader.pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
    assert not has_released_memory(leader.pid)
    leader.kill()
    await_memory([leader.pid], 1, lambda: 0, Mock())
    assert has_released_memory(leader.pid)


@linux
def test_one_that_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "GONE_S", 0.2)
    await_memory([os.getpid()], 1, lambda: 0, Mock())
