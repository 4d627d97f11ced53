"""Processes that stand by for a restart: taken where they fit, replaced where they do not, gone with their launcher."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from manyhands.core.files import write_json
from manyhands.launch.heartbeat import Beat
from manyhands.launch.rank_process import RankProcess
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.standby import COMMAND, CORES_EACH, Standbys, read_modules, write_modules
from manyhands.launch.watch import worker_pids

pytest.importorskip("torch")
WAIT_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.ranks.mkdir(parents=True)
    write_json(made.modules, ["json", "no.such.module"])
    return made


def train(folder: RunFolder, *ranks: int) -> None:
    for rank in ranks:
        write_json(folder.beat(rank), asdict(Beat(rank, os.getpid(), "train", 1, 0.0, 0.0)))


class Handler:
    """What torch's agent makes for each rank, as far as starting it goes."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank_id = local_rank
        self._stdout = self._stderr = None

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        environment = {**os.environ, "RANK": str(self.local_rank_id), **variables}
        return SubprocessHandler._popen(self, (sys.executable, *COMMAND, *arguments), environment)


@pytest.fixture
def standbys() -> Iterator[Standbys]:
    with contextlib.closing(Standbys(after_s=0.0)) as made:
        yield made


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def waiting() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):  # of another test, not asked for its exit code
            found += [child] if "manyhands.worker.standby" in child.cmdline() else []
    return found


def is_ready(standbys: Standbys, rank: int) -> bool:
    return rank in standbys._waiting and standbys._waiting[rank].is_ready


def test_a_process_that_waits_becomes_the_rank_of_the_next_attempt(
    folder: RunFolder, standbys: Standbys, capfd: pytest.CaptureFixture[str]
) -> None:
    with standbys.serving(folder, range(1)):
        first = Handler(0).start("--help", MASTER_PORT="1")
        assert isinstance(first, RankProcess), "its end is seen at once"
        assert first.wait(WAIT_S) == 0 and not waiting(), "no rank trains yet"
        usage = capfd.readouterr().out
        train(folder, 0)
        wait_until(lambda: is_ready(standbys, 0))
        [process] = waiting()
        assert process.pid not in worker_pids(), "no rank so far"
    with standbys.serving(folder, range(1)):
        folder.beat(0).unlink()
        second = Handler(0).start("--help", MASTER_PORT="2")
        assert second.pid == process.pid and second.wait(WAIT_S) == 0
    assert usage.startswith("usage: manyhands.worker") and capfd.readouterr().out == usage


def test_one_that_still_imports_is_waited_for(
    folder: RunFolder, standbys: Standbys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would have to import the same, from the beginning."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(5)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    write_json(folder.modules, ["slow_to_import"])
    with standbys.serving(folder, range(1)):
        Handler(0).start("--help").wait(WAIT_S)
        train(folder, 0)
        wait_until(lambda: bool(waiting()))
        assert not is_ready(standbys, 0)
        [process] = waiting()
    with standbys.serving(folder, range(1)):
        folder.beat(0).unlink()
        second = Handler(0).start("--help")
        assert second.pid == process.pid and second.wait(WAIT_S) == 0


def test_a_stop_while_one_is_waited_for_leaves_nothing(
    folder: RunFolder, standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standbys.serving(folder, range(1)):
        Handler(0).start("--help").wait(WAIT_S)
        train(folder, 0)
        wait_until(lambda: is_ready(standbys, 0))
        [process] = waiting()
    monkeypatch.setattr("manyhands.launch.standby._Standby.becomes_ready", Mock(side_effect=KeyboardInterrupt))
    with standbys.serving(folder, range(1)):
        folder.beat(0).unlink()
        with pytest.raises(KeyboardInterrupt):
            Handler(0).start("--help")
    assert not process.is_running()


def test_after_a_restart_they_are_made_ready_at_once(folder: RunFolder) -> None:
    with contextlib.closing(Standbys(after_s=3600.0)) as standbys:
        for attempt in range(2):
            with standbys.serving(folder, range(1)):
                Handler(0).start("--help").wait(WAIT_S)
                train(folder, 0)
                if not attempt:
                    time.sleep(2.5)
                    assert not waiting(), "a short run pays for none"
                else:
                    wait_until(lambda: is_ready(standbys, 0))
            folder.beat(0).unlink()


def test_another_environment_needs_another_process(folder: RunFolder, standbys: Standbys) -> None:
    with standbys.serving(folder, range(1)):
        Handler(0).start("--help").wait(WAIT_S)
        train(folder, 0)
        wait_until(lambda: is_ready(standbys, 0))
    [process] = waiting()
    with standbys.serving(folder, range(1)):
        folder.beat(0).unlink()
        second = Handler(0).start("--help", CUDA_VISIBLE_DEVICES="1")
        assert second.pid != process.pid and second.wait(WAIT_S) == 0
    assert not process.is_running()


def test_one_that_was_killed_is_replaced(folder: RunFolder, standbys: Standbys) -> None:
    with standbys.serving(folder, range(2)):
        for rank in range(2):
            Handler(rank).start("--help").wait(WAIT_S)
        train(folder, 0)
        time.sleep(2.5)
        assert not waiting(), "rank 1 does not train"
        train(folder, 0, 1)
        wait_until(lambda: is_ready(standbys, 0) and is_ready(standbys, 1))
        standbys._waiting[1].process.kill()
        wait_until(lambda: standbys._waiting[1].process.poll() is None and is_ready(standbys, 1))
    standbys._waiting[0].process.kill()
    folder.beat(0).unlink()
    with standbys.serving(folder, range(2)):
        assert Handler(0).start("--help").wait(WAIT_S) == 0, "started anew"


def test_as_many_start_at_once_as_there_are_cores_for(
    folder: RunFolder, standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.launch.standby.count_cores", lambda: 3 * CORES_EACH - 1)
    begun: list[int] = []

    def start(environment: Mapping[str, str], folder: RunFolder) -> Mock:
        begun.append(int(environment["RANK"]))
        one = Mock(begun_before=[])
        one.becomes_ready.side_effect = lambda: one.begun_before.append(len(begun))
        one.process.poll.return_value = None
        return one

    monkeypatch.setattr("manyhands.launch.standby._start", start)
    standbys._environments = {rank: {"RANK": str(rank)} for rank in range(5)}
    standbys._attempt = attempt = (folder, range(5))
    standbys._make_ready(attempt)
    assert begun == [0, 1, 2, 3, 4]
    assert [one.begun_before for one in standbys._waiting.values()] == [[2], [2], [4], [4], [5]]


def test_on_a_second_machine_they_are_of_its_own_ranks(
    folder: RunFolder, standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's agent numbers local ranks from 0, whatever their ranks are."""
    begun: list[str] = []
    one = Mock(**{"process.poll.return_value": None})
    monkeypatch.setattr(
        "manyhands.launch.standby._start", lambda environment, folder: begun.append(environment["RANK"]) or one
    )
    standbys._environments = {local: {"RANK": str(4 + local)} for local in range(2)}
    standbys._attempt = attempt = (folder, range(4, 6))
    standbys._make_ready(attempt)
    assert begun == ["4", "5"]


def test_where_no_process_can_be_started_the_ranks_live_on(
    folder: RunFolder, standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts them must not end: its processes would be signalled."""
    with standbys.serving(folder, range(1)):
        Handler(0).start("--help").wait(WAIT_S)
        monkeypatch.setattr("manyhands.launch.standby._start", Mock(side_effect=OSError(11, "no more processes")))
        train(folder, 0)
        time.sleep(2.5)
        monkeypatch.undo()
        wait_until(lambda: is_ready(standbys, 0))


def test_a_disk_that_does_not_answer_for_once_ends_nothing(
    folder: RunFolder, standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network's file system may; ranks that were such processes would be signalled with the thread's end."""
    with standbys.serving(folder, range(1)):
        Handler(0).start("--help").wait(WAIT_S)
        stale = Mock(side_effect=OSError(116, "Stale file handle"))
        monkeypatch.setattr("manyhands.launch.standby.read_beat", stale)
        train(folder, 0)
        wait_until(lambda: stale.called)
        monkeypatch.undo()
        wait_until(lambda: is_ready(standbys, 0))


LAUNCHER = """
import json, sys, time
from pathlib import Path
sys.path[:0] = {path}
from tests.launch.test_standby import Handler, is_ready
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.standby import Standbys
standbys = Standbys(after_s=0.0)
with standbys.serving(RunFolder(Path(sys.argv[1])), range(1)):
    Handler(0).start("--help").wait()
    while not is_ready(standbys, 0):
        time.sleep(0.05)
    print(json.dumps(standbys._waiting[0].process.pid), flush=True)
    time.sleep(600)
"""


def test_none_outlives_its_launcher(folder: RunFolder) -> None:
    train(folder, 0)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", LAUNCHER.format(path=[root, *sys.path]), str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = next(json.loads(line) for line in launcher.stdout if line.strip().isdigit())
        process = psutil.Process(pid)
        launcher.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_modules_come_in_the_order_in_which_they_were_imported(folder: RunFolder) -> None:
    write_modules(folder)
    names = read_modules(folder)
    assert names.index("manyhands") < names.index("manyhands.core.files") and "json" not in names
    folder.modules.write_text("{")
    assert read_modules(folder) == []
