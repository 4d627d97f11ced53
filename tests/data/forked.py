"""``subprocess.Popen`` for the process that tokenizes, as a fork of a server that has imported transformers already.

What it does is what a process of its own does, which imports for four seconds first; ``test_prepare_parallel.py`` and
``test_large_parts.py`` start some of those too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO

from manyhands.data.tokenize import parallel as tokenize_parallel
from tests.support.ranks import forks


class Forked:
    """The part of ``Popen`` that ``tokenize_parallel`` uses."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: BinaryIO, stderr: BinaryIO, env: Mapping[str, str]
    ) -> None:
        assert command[:-1] == [sys.executable, "-m", tokenize_parallel.__name__]
        assert stdin == subprocess.PIPE and stdout is stderr
        read, write = os.pipe()
        self._process = forks().Process(
            target=_main, args=(command[-1], DupFd(read), DupFd(stdout.fileno()), dict(env))
        )
        self._process.start()
        os.close(read)
        self.stdin = os.fdopen(write, "wb")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("tokenizing", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _main(folder: str, read: Any, output: Any, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(read.detach(), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    number = output.detach()
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.argv[1:] = [folder]
    tokenize_parallel.main()
