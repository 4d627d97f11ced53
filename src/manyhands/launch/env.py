"""Environment variables of the workers: the only place that writes any. What the user has set is never overwritten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from manyhands.facts.host import count_cores
from manyhands.plan.types import Plan

# The pid a worker's parent has as long as our launcher lives; also says that it was our launcher.
LAUNCHER_PID = "MANYHANDS_LAUNCHER_PID"
MAX_GPU_THREADS = 8  # a GPU rank computes little on the host; more threads only disturb its neighbours


def worker_environment(plan: Plan, num_local: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add for each worker of ``plan``: the plan's own and our defaults, less those the user has set.

    OMP_NUM_THREADS is this machine's cores shared out among its ``num_local`` ranks (torch would take all of them in
    every rank); sums on the CPU depend on it, so it is the same at each launch on the same machine.
    """
    threads = max(1, count_cores() // num_local)
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads if plan.device == "cpu" else min(threads, MAX_GPU_THREADS)),
        **plan.environment,
    }
    return {name: value for name, value in wanted.items() if name not in environ}


@contextlib.contextmanager
def launcher_environment(plan: Plan) -> Iterator[None]:
    """This process's environment while workers start, as torch's agent hands its own on to them; put back
    afterwards.
    """
    before = dict(os.environ)
    os.environ.update(worker_environment(plan, plan.world_size))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def set_worker_environment(plan: Plan, num_local: int) -> None:
    """The same inside a rank that somebody else has started (torchrun, accelerate, SLURM)."""
    os.environ.update(worker_environment(plan, num_local))
