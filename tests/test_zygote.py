"""A fork of the zygote is what a process of its own would be: as its parent, /proc and it itself see it."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.zygote import NAME, forking

LOOK = """
import json, os, signal, sys, threading
print(json.dumps({
    "imported": "torch" in sys.modules, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
    "folder": os.getcwd(), "path": sys.path[:2], "argv": sys.argv, "name": __name__, "variable": os.environ["VARIABLE"],
    "files": sorted(map(int, os.listdir("/proc/self/fd"))), "threads": threading.active_count(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
}), flush=True)
print(sys.stdin.readline(), end="", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with forking():
        yield


def start(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **{**pipes, **options})  # type: ignore[call-overload]


@pytest.mark.ci
def test_it_is_a_process_as_any(tmp_path: Path) -> None:
    variables = {**os.environ, "VARIABLE": "own", "PYTHONPATH": str(tmp_path / "first")}
    process = start(LOOK, "an argument", cwd=tmp_path, env=variables, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    seen = json.loads(process.stdout.readline())
    pid, folder = process.pid, str(tmp_path)
    assert seen == {
        "imported": True, "pid": pid, "parent": os.getpid(), "session": pid, "folder": folder,
        "path": ["", str(tmp_path / "first")], "argv": ["-c", "an argument"], "name": "__main__", "variable": "own",
        "files": [0, 1, 2, 3], "threads": 1, "blocked": [], "default": True,
    }  # fmt: skip
    shown = psutil.Process(pid)
    assert shown.environ() == variables and shown.cmdline()[0] == sys.executable and "argument" in shown.cmdline()[-1]
    process.stdin.write("a line\n")
    process.stdin.flush()
    assert process.wait(60) == 7 and process.stderr.read() == "a line\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(number: signal.Signals) -> None:
    process = start("import time; print('there', flush=True); time.sleep(600)")
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(number)
    assert process.wait(60) == -number


def test_what_it_raises_is_shown_and_its_exit_handlers_run() -> None:
    process = start("import atexit; atexit.register(print, 'at exit'); print('first', end=' '); 1 / 0")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "first at exit\n") and errors.endswith("division by zero\n")


def test_code_planted_by_a_path_of_its_own_comes_before_our_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; assert 'manyhands' not in sys.modules; print('planted')")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    process = start("import manyhands.worker.run", env={**os.environ, "PYTHONPATH": path})
    assert process.communicate(timeout=60)[0] == "planted\n" and process.returncode == 0


def test_a_launcher_has_forks_of_its_own() -> None:
    """And they end with it, however it ends."""
    module = "import subprocess, sys, os; print(os.getppid(), 'torch' in sys.modules, flush=True)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {module!r}])"
    process = start(code)
    assert process.communicate(timeout=60)[0].split() == [str(process.pid), "False"], "a process that starts no others"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--no-python", sys.executable]
    module += "; import psutil; print([child.cmdline() for child in psutil.Process().parent().children()])"
    agent = subprocess.Popen([*command, "-c", module], stdout=subprocess.PIPE, text=True)
    first, children = agent.communicate(timeout=60)[0].splitlines()
    assert first.split() == [str(agent.pid), "True"]
    servers = [words for words in ast.literal_eval(children) if words == [NAME]]
    assert len(servers) == 1, children


def test_processes_of_multiprocessing_are_forks_too() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(look) == (True, os.getpid())


def look() -> tuple[bool, int]:
    return "torch" in sys.modules, os.getppid()


def test_a_process_with_other_variables_that_packages_read_early_is_a_real_one(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules)"
    process = start(code, env={**os.environ, "HF_HOME": str(tmp_path)})
    assert process.communicate(timeout=60)[0] == "False\n"
    process = start(code, env={**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONHASHSEED": "42"})
    assert process.communicate(timeout=60)[0] == "True\n"
