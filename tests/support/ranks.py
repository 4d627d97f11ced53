"""One persistent world of processes (gloo on CPU, NCCL on GPUs) that serves all in-process distributed tests.

Importing torch and transformers takes seconds; a test session pays it once: on CPU, ranks are forks of one server
process that has imported what they need and has computed nothing. Every task gets a fresh process group of the size it
asks for, so a failed task leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TASK_TIMEOUT_S = 240.0
GROUP_TIMEOUT_S = 120.0
IMPORTED = [  # before the fork
    *(f"manyhands.worker.{name}" for name in ("run", "stages", "training", "export_stages")),
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "bitsandbytes",
    "manyhands.data.tokenize.parallel",
]


def forks() -> Any:
    """A context of ``multiprocessing`` whose processes are forks of the one server of this test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class RankFailed(Exception):
    """A task raised on a rank; the text is its traceback."""


def _serve(rank: int, pipe: Connection, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # the imported modules, hundreds of thousands of objects, are not searched for garbage again and again
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["backend"] = "cpu:gloo,cuda:nccl"
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        target, arguments, world_size, store_file = task
        try:
            store = dist.FileStore(store_file, world_size)
            limit = timedelta(seconds=GROUP_TIMEOUT_S)
            dist.init_process_group(**options, store=store, rank=rank, world_size=world_size, timeout=limit)
            module, _, name = target.partition(":")
            answer: tuple[bool, Any] = (True, getattr(importlib.import_module(module), name)(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
        pipe.send(answer)


class Ranks:
    """``size`` processes that wait for tasks. ``run("package.module:function", arguments, world_size=2)``."""

    def __init__(self, size: int = 4, device: str = "cpu", timeout_s: float = TASK_TIMEOUT_S) -> None:
        self.device, self._size, self._timeout_s = device, size, timeout_s
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn") if self.device == "cuda" else forks()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self.device), daemon=True, name=f"test-rank-{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, target: str, *arguments: Any, world_size: int) -> list[Any]:
        """The answers of ranks 0 .. world_size - 1, in order. Arguments and answers are pickled. Raises RankFailed.

        Restarts all processes after one has died or timed out; a late answer would be taken for the next task's.
        """
        store_file = tempfile.mktemp(prefix="ranks-")
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            pipe.send((target, arguments, world_size, store_file))
        answers: dict[Connection, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < world_size:
            waiting: list[Any] = [p for p in pipes if p not in answers]
            ready: list[Any] = wait(waiting, timeout=deadline - time.monotonic())
            if not ready:
                self.restart()
                raise RankFailed(
                    f"{target}: ranks {[i for i, p in enumerate(pipes) if p not in answers]} gave no answer"
                )
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = (False, f"the process ended without an answer, exit code {self._exit_code(pipe)}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store_file)
        if (self.device == "cuda" and world_size > 1) or not all(process.is_alive() for process in self._processes):
            # On GPUs always: ranks that have formed different numbers of NCCL groups before are no clean start.
            self.restart()
        failures = [f"rank {i}:\n{answers[p][1]}" for i, p in enumerate(pipes) if not answers[p][0]]
        if failures:
            raise RankFailed("\n".join(failures))
        return [answers[p][1] for p in pipes]

    def _exit_code(self, pipe: Connection) -> int | None:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=5.0)
        return process.exitcode

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(size: int = 4, device: str = "cpu", timeout_s: float = TASK_TIMEOUT_S) -> Iterator[Ranks]:
    """With ``device="cuda"`` one rank a GPU, NCCL beside gloo. ``timeout_s``: of each task."""
    world = Ranks(size, device, timeout_s)
    try:
        yield world
    finally:
        world.close()
