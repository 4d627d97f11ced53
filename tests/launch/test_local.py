"""Processes that end well, badly, or never: each launch ends in bounded time, says one thing, and leaves nobody
behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.core.errors import UserError
from manyhands.launch.environment import Launcher, choose_threads, worker_environment
from manyhands.launch.local import start, workers
from manyhands.planner.hardware import AMD_ENVIRONMENT

HERE = Path(__file__).parent
WAIT_S = 240.0  # busy machines are slow
LONG_S = 300.0


@pytest.fixture(autouse=True)
def fake_module_path(monkeypatch):
    paths = [str(HERE), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MASTER_PORT", raising=False)


def launch(planned, *acts: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """(exit code, the one error as text)."""
    folder, plan = planned(*acts)
    others = set(psutil.Process().children(recursive=True))  # the persistent world of other tests
    try:
        code, text = start.run_workers(folder, plan, timeout_s=timeout_s, module="fake_worker"), ""
    except UserError as error:
        code, text = error.exit_code, str(error)
    assert set(psutil.Process().children(recursive=True)) == others
    return code, text


def test_workers_get_the_plans_environment_and_keep_the_users(planned, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    before = dict(os.environ)
    folder, plan = planned("environment", "environment")
    plan = plan.model_copy(update={"environment": {"NCCL_DEBUG": "INFO", "MH_TEST": "1"}})
    assert start.run_workers(folder, plan, timeout_s=60, module="fake_worker") == 0
    seen = json.loads((folder.path / "environment-1.json").read_text())
    assert (seen["NCCL_DEBUG"], seen["MH_TEST"], seen["TOKENIZERS_PARALLELISM"]) == ("WARN", "1", "false")
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MANYHANDS_LAUNCHER_PID"]) == ("1", "2", str(os.getpid()))
    assert {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PYTEST"))} == {
        k: v for k, v in before.items() if not k.startswith(("TORCHELASTIC", "PYTEST"))
    }
    assert not folder.ranks.exists()


def test_amds_variables_are_never_set_over_the_users(planned):
    _, plan = planned("environment", "environment")
    plan = plan.model_copy(update={"environment": AMD_ENVIRONMENT})
    given = {"HSA_ENABLE_SDMA": "0", "OMP_NUM_THREADS": "3"}
    added = worker_environment(plan, 2, given)
    assert "HSA_ENABLE_SDMA" not in added and "OMP_NUM_THREADS" not in added
    assert added["HSA_NO_SCRATCH_RECLAIM"] == "1" and added["HSA_FORCE_FINE_GRAIN_PCIE"] == "1"


def test_an_exception_is_shown_once_with_its_log(planned, capfd):
    code, text = launch(planned, "lost peer", "raise")
    assert code == 1
    assert "rank 1 failed in stage 'train': ValueError: the cat sat on the keyboard" in text
    assert "logs/rank-1.log" in text and "raise ValueError" in text
    assert "".join(capfd.readouterr()) == "", "the agent's own report is silenced"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("acts", "code", "words"),
    [
        # Rank 0 has lost its peer long before the peer's own word is on disk, as on a machine that is loaded.
        (("lost peer", "raise late"), 1, ["rank 1 failed in stage 'train': ValueError: the cat sat on the keyboard"]),
        (("lost peer", "raise, written late"), 1, ["rank 1 failed in stage 'train': ValueError: the cat sat on the "]),
        (("lost peer", "kill late"), 1, ["rank 1 was killed (SIGKILL)"]),
        (("lost peer", "abort late"), 1, ["rank 1 was killed (SIGABRT)"]),
        (("lost peer", "lost peer"), 1, ["lost its peers in stage 'train', and none of them reported a cause"]),
        (("wait", "user error"), 2, ["error: row 7 has no loss token\n  where: data.jsonl:7\n"]),
        (("wait", "exit 3"), 1, ["rank 1 ended with exit code 3", "rank 1 says hello"]),
        (("wait", "kill"), 1, ["rank 1 was killed (SIGKILL)", "out of memory"]),
    ],
)
def test_the_first_cause_is_named(planned, monkeypatch, acts, code, words):
    monkeypatch.setattr("manyhands.launch.local.watch.GRACE_S", 1.0)
    ended, text = launch(planned, *acts)
    assert ended == code and all(word in text for word in words), text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("acts", "words"),
    [
        (
            ("deaf", "stop"),
            ["rank 1 made no progress", "stage 'save', step 2", "SIGSTOP", "rank 0: stage 'train', step 1"],
        ),
        (("hang", "wait"), ["rank 0 made no progress", "it hangs"]),
        (("wait", "hang"), ["rank 1 made no progress", "it hangs"]),
        (("wait", "wait"), ["ranks 0, 1 made no progress", "no single rank is the cause"]),
    ],
)
def test_a_rank_that_hangs_is_named_in_bounded_time(planned, monkeypatch, acts, words):
    monkeypatch.setattr("manyhands.launch.local.watch.GRACE_S", 1.0)
    code, text = launch(planned, *acts, timeout_s=3)
    assert code == 1 and all(word in text for word in words), text


@pytest.mark.ci
def test_a_survivor_that_holds_the_gil_is_not_waited_for(planned, monkeypatch):
    """As a kernel launch may that waits for a peer that is gone. Torch's agent alone gives it 30 s."""
    monkeypatch.setattr("manyhands.launch.local.watch.GRACE_S", LONG_S)
    begin = time.monotonic()
    code, text = launch(planned, "frozen", "kill when the other is deaf")
    assert code == 1 and "rank 1 was killed (SIGKILL)" in text
    assert time.monotonic() - begin < 25


@pytest.mark.ci
def test_one_that_ticks_is_given_time_after_a_cause(planned, monkeypatch):
    """Until torch's agent, which gives it 30 s, has lost its patience."""
    monkeypatch.setattr("manyhands.launch.local.watch.GRACE_S", 6.0)
    begin = time.monotonic()
    code, _ = launch(planned, "deaf", "kill when the other is deaf")
    assert code == 1 and time.monotonic() - begin > 6


@pytest.mark.ci
def test_a_rank_that_works_slowly_is_waited_for_by_those_that_cannot_go_on(planned):
    """Nine seconds of work, a limit of three: the rank that waits for it is no cause to end the run."""
    assert launch(planned, "work slowly, then end", "wait for slow work, then end", timeout_s=3) == (0, "")


@pytest.mark.ci
def test_slow_ranks_that_beat_are_left_alone(planned):
    folder, plan = planned("beat", "wait")
    (folder.path / "fake.json").write_text(json.dumps(["beat", "beat"]))
    timer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(6); os.kill({os.getpid()}, 2)"])
    assert start.run_workers(folder, plan, timeout_s=2, module="fake_worker", report=lambda text: None) == 130
    timer.wait()


def lives(process: psutil.Process) -> bool:
    try:
        return (
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        )  # nobody may be there to reap an orphan
    except psutil.NoSuchProcess:
        return False


LAUNCHER = """
import sys
from manyhands.launch.local import start, workers
from manyhands.launch.run.folder import RunFolder
folder = RunFolder(sys.argv[1])
sys.exit(start.run_workers(folder, folder.read_plan(), timeout_s=600, module="fake_worker"))
"""


def start_launcher(folder) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The launcher in a process of its own, and the processes it has started, once all of them are up."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + WAIT_S
    logs = [folder.log(0), folder.log(1)]
    while not all(log.exists() and log.read_text().endswith("ready\n") for log in logs):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return launcher, psutil.Process(launcher.pid).children(recursive=True)


@pytest.mark.ci
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_says_how_to_go_on(planned, number, code):
    folder, _ = planned("wait with child", "wait")
    (folder.checkpoints / "step-000005").mkdir(parents=True)
    (folder.checkpoints / "step-000005" / "manifest.json").write_text("{}")
    launcher, workers = start_launcher(folder)
    assert len(workers) == 3
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == code
    again = "Ctrl-C again" if number == signal.SIGINT else "a second SIGTERM"
    said = "the ranks finish their step, save and end, within 30 s"
    assert output.splitlines() == [
        f"{number.name}: {said}; {again} ends them at once, without saving",
        f"{number.name}: the run has ended, saved at step 5; the same command resumes from there",
    ]
    assert [worker for worker in workers if lives(worker)] == []
    assert folder.read_status()["state"] == "interrupted"


def test_a_signal_before_the_first_rank_leaves_an_interrupted_run(planned, monkeypatch):
    """Torch's agent is imported after the run's state is written."""
    folder, plan = planned("wait", "wait")
    monkeypatch.setattr(workers, "agent_config", lambda *a, **options: signal.raise_signal(signal.SIGINT))
    said: list[str] = []
    assert start.run_workers(folder, plan, timeout_s=60, module="fake_worker", report=said.append) == 130
    assert said == ["SIGINT: the run has ended, nothing was saved yet; the same command starts it again"]
    assert folder.read_status()["state"] == "interrupted"


def test_ctrl_c_while_a_rank_imports_ends_it_silently(tmp_path):
    (tmp_path / "pydantic.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "manyhands.worker", "run.yaml"]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.ci
def test_a_run_that_was_finished_when_the_signal_came_stays_finished(planned):
    folder, _ = planned("finish when asked", "finish when asked")
    launcher, _ = start_launcher(folder)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 0 and output.splitlines()[1:] == ["SIGTERM arrived too late: the run is finished"]
    assert folder.read_status()["state"] == "finished"


def test_a_signal_is_answered_before_the_ranks_answer_it_and_a_second_ends_them(planned):
    folder, _ = planned("deaf", "deaf")
    launcher, _ = start_launcher(folder)
    launcher.send_signal(signal.SIGTERM)
    line = launcher.stdout.readline()
    assert launcher.poll() is None and "SIGTERM: the ranks finish their step" in line and "a second SIGTERM" in line
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=28)  # torch's agent alone takes 30 s more
    assert launcher.returncode == 143 and output.startswith("SIGTERM: the run has ended, nothing was saved yet")


@pytest.mark.parametrize(
    ("kind", "rank_has", "agent_had", "expected"),
    [
        ("manyhands", "1", None, 1),
        ("none", "3", None, 3),
        ("torchrun", "1", "1", 1),
        ("torchrun", "1", None, 8),  # torchrun's own
        ("accelerate", "4,2", "4,2", 4),
    ],
)
def test_the_users_number_of_threads_is_kept(planned, tmp_path, monkeypatch, kind, rank_has, agent_had, expected):
    _, plan = planned("end")
    plan = plan.model_copy(update={"environment": {"OMP_NUM_THREADS": "8"}})
    monkeypatch.setenv("OMP_NUM_THREADS", rank_has)
    begun_with = b"" if agent_had is None else f"OMP_NUM_THREADS={agent_had}\0".encode()
    (tmp_path / "environ").write_bytes(b"HOME=/\0" + begun_with)
    monkeypatch.setattr("manyhands.launch.environment.Path", lambda path: tmp_path / "environ")
    assert choose_threads(plan, Launcher(kind)) == expected


@pytest.mark.ci
def test_workers_do_not_outlive_a_killed_launcher(planned):
    folder, _ = planned("wait", "wait")
    launcher, workers = start_launcher(folder)
    launcher.kill()
    launcher.communicate(timeout=WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while any(map(lives, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) == 2 and not any(map(lives, workers))


def test_a_port_in_use_says_who_should_change_what(planned, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        code, text = launch(planned, "end")
    assert code == 2
    assert "is in use" in text and "unset MASTER_PORT" in text


def free_port_of_nobody() -> str:
    """A free port below those that the kernel hands out, which other tests' processes take at any moment."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no free port")


@pytest.mark.ci
def test_the_users_port_is_free_again_for_the_next_attempt(planned, monkeypatch):
    """Also while the error of the one before, and with it its frames, is still held."""
    held, port = [], free_port_of_nobody()
    monkeypatch.setenv("MASTER_PORT", port)
    folder, plan = planned("environment", "raise when heard")  # a rank that failed earlier would end the other
    for _ in range(2):
        with pytest.raises(UserError, match="the cat sat on the keyboard") as caught:
            start.run_workers(folder, plan, timeout_s=60, module="fake_worker")
        held.append(caught.value)
        seen = json.loads((folder.path / "environment-0.json").read_text())
        assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("127.0.0.1", port)
        assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
        (folder.path / "environment-0.json").unlink()
        (folder.path / "heard").unlink()


@pytest.mark.ci
def test_a_launcher_that_is_killed_leaves_no_folder(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder, _ = planned("wait", "wait")
    launcher, _ = start_launcher(folder)
    launcher.kill()
    launcher.communicate(timeout=WAIT_S)
    assert not [path.name for path in (tmp_path / "temporary").iterdir() if path.is_dir()]
