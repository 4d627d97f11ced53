"""Processes of a run as forks of this one, which has imported what they need: the seconds in which Python starts and
imports torch and transformers are left out. Everything else is theirs as if they had been started: session, parent,
signals, environment, folder, output, and no open file of this process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from manyhands.worker import __main__ as worker

Plants = Mapping[str, str]  # code, by the module that it is added to
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PREPARED = 0  # the process that has imported everything
_FORKS: set[int] = set()  # pids of this process's own, which their ``Fork`` waits for
MODULES = (  # imported by a run in the course of its stages
    "manyhands.cli.main",
    "manyhands.launch.local.start",
    "manyhands.worker.run",
    "manyhands.preview.collect",
    "numpy.testing",
    "peft",
    "torch._inductor.config",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
)


def prepare(*more: str) -> None:
    """Imports what forks will need, and has processes whose parent ends become this one's children."""
    for name in (*MODULES, *more):
        importlib.import_module(name)
    global _PREPARED
    _PREPARED = os.getpid()
    torch.set_num_threads(1)  # threads would not be there after a fork
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class Fork:
    """A child that runs ``call`` and ends with what it returns; as subprocess.Popen for those who wait for it."""

    def __init__(
        self,
        call: Callable[[], int],
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        output: Path | None = None,
        plants: Plants | None = None,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            _FORKS.add(self.pid)
            return
        code = 1
        try:
            _leave_parent(dict(environment), folder, output)
            for name, source in (plants or {}).items():
                exec(source, importlib.import_module(name).__dict__)
            code = call()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(["fork"], timeout)
            time.sleep(0.01)
        return code


def _leave_parent(environment: dict[str, str], folder: Path | None, output: Path | None) -> None:
    gc.freeze()  # what the parent has open is not closed by what it leaves here
    os.setsid()
    if os.getppid() == _PREPARED:  # of a matrix that is ended nothing goes on
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 4096)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        assert stream is not None
        stream.reconfigure(write_through=True)  # type: ignore[attr-defined]


def run_worker(arguments: Sequence[str]) -> Callable[[], int]:
    """``python -m manyhands.worker ARGUMENTS``."""

    def call() -> int:
        sys.argv, sys.modules["__main__"] = ["manyhands.worker", *arguments], worker  # for processes that it spawns
        return worker.main(list(arguments))

    return call


def run_launcher(
    module: ModuleType, call: Callable[[], Any], plants: Plants, *, forks_ranks: bool
) -> Callable[[], int]:
    """``call``, whose ranks are forks with ``plants`` where torch's agent would start them, if ``forks_ranks``."""

    def popen(self: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        name, arguments = command[command.index("-m") + 1], command[command.index("-m") + 2 :]
        assert name == "manyhands.worker", command
        return Fork(run_worker(arguments), environment=environment, plants=plants)

    def launch() -> int:
        sys.argv, sys.modules["__main__"] = [module.__name__], module
        if forks_ranks:
            SubprocessHandler._popen = popen  # type: ignore[method-assign]
        return call() or 0

    return launch


def children() -> list[psutil.Process]:
    """All that this process has started and that still lives, also where its parent has ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
            elif child.ppid() == os.getpid() and child.pid not in _FORKS:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue
    return found
