"""SLURM's environment variables: which task of a step this process is, and starts that would leave tasks or GPUs idle.

``srun`` starts the tasks of a *step*. A batch script runs once, on the first node, outside of any step; it has
SLURM_PROCID=0 and SLURM_NTASKS as if it were the first task (22.05). Starts nothing, imports no torch.
"""

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from manyhands.core.errors import UserError

# Below the range from which kernels hand out ports, above what services use.
_FIRST_PORT, _NUM_PORTS = 20000, 10000
# Steps above are SLURM's own: the batch script's, the shell's of salloc.
_MAX_STEP = 0xFFFFFF00


def is_task(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started this process."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) <= _MAX_STEP


def read_task(environ: Mapping[str, str]) -> dict[str, Any]:
    """This task's place among those of its step, as fields of ``Launcher``. The master is the step's first host.

    The port follows from job, step and how often the job was queued again: steps side by side do not meet, nor does a
    rank with one that is left over from before.
    """
    world_size = read_integer(environ, "SLURM_STEP_NUM_TASKS", read_integer(environ, "SLURM_NTASKS", 1))
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if world_size > 1 and not nodelist and "MASTER_ADDR" not in environ:
        raise UserError(
            "SLURM names no hosts",
            where="SLURM_JOB_NODELIST",
            fix="start with srun, or set MASTER_ADDR to rank 0's host",
        )
    master_addr = environ.get("MASTER_ADDR") or (
        expand_hosts(nodelist)[0] if nodelist and world_size > 1 else "127.0.0.1"
    )
    local_world_size = _local_world_size(environ, world_size)
    # Of a task with a GPU of its own it is the one, otherwise all of the node's with commas.
    has_one = environ.get("SLURM_STEP_GPUS", "").isdecimal()
    return {
        "rank": read_integer(environ, "SLURM_PROCID", 0),
        "local_rank": read_integer(environ, "SLURM_LOCALID", 0),
        "world_size": world_size,
        "local_world_size": local_world_size,
        "master_addr": master_addr,
        "master_port": read_integer(environ, "MASTER_PORT", _choose_port(environ)),
        "has_own_gpu": has_one and 1 < local_world_size <= read_integer(environ, "SLURM_GPUS_ON_NODE", 0),
        "has_own_cores": "SLURM_CPUS_PER_TASK" in environ,  # srun binds each task to them
    }


def block_save_signal() -> None:
    """In a job, before threads start: SIGUSR1, by which SLURM announces the end of a job's time, ends no process.

    ``StopSignal`` waits for it. A blocked signal, unlike a handler, stays so in all that this process starts: SLURM may
    send it to these too.
    """
    if "SLURM_JOB_ID" in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def refuse_unknown_host(host: str, attempts: int = 3) -> None:
    """UserError where the first host of a step has no address here: torch would ask for one until its time is up."""
    for left in reversed(range(attempts)):
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if left:
                time.sleep(1.0)
                continue
            raise UserError(
                f"rank 0's host {host} has no address on {socket.gethostname()}",
                where="SLURM_STEP_NODELIST",
                why=error.strerror or str(error),
                fix="set MASTER_ADDR to an address of it, which `scontrol show node` names",
            ) from None


def _choose_port(environ: Mapping[str, str]) -> int:
    job, step = read_integer(environ, "SLURM_JOB_ID", 0), read_integer(environ, "SLURM_STEP_ID", 0)
    restarts = read_integer(environ, "SLURM_RESTART_COUNT", 0)
    return _FIRST_PORT + (job + 3331 * step + 1709 * restarts) % _NUM_PORTS


def _local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    """From ``SLURM_STEP_TASKS_PER_NODE``, e.g. ``"4(x2),3"``: 4 tasks on each of two nodes, 3 on the next."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return world_size // max(1, read_integer(environ, "SLURM_NNODES", 1)) or 1
    tasks: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(repeat or 1)
    node = read_integer(environ, "SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else 1


def refuse_idle(
    kind: str,
    world_size: int,
    local_world_size: int,
    asked: int | str,
    device: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> None:
    """UserError where one worker would train outside of the tasks that the job has, or tasks with fewer GPUs than their
    node has been given. ``asked``: ``parallel.gpus``, which may say that this is meant.
    """
    num_tasks = read_integer(environ, "SLURM_NTASKS", 1)
    if kind == "none" and asked != 1 and num_tasks > 1 and "SLURM_JOB_ID" in environ:
        raise UserError(
            "this one process would train alone",
            where=f"SLURM job {environ['SLURM_JOB_ID']}: {num_tasks} tasks, none of which srun has started",
            why="a batch script runs once, on the first node of its job",
            fix="write `srun python -m manyhands.worker RUN.yaml`; for a single process set parallel.gpus=1",
        )
    num_gpus = read_integer(environ, "SLURM_GPUS_ON_NODE", 0)
    if kind != "slurm" or device == "cpu" or asked == world_size or num_gpus <= local_world_size:
        return
    raise UserError(
        f"{num_gpus - local_world_size} of {num_gpus} GPUs of this node would be idle",
        where=f"SLURM_GPUS_ON_NODE={num_gpus}, {local_world_size} task(s) on it",
        why="each task is one process with one GPU",
        fix=f"srun --ntasks-per-node={num_gpus}, or parallel.gpus={world_size} to use fewer",
    )


def read_place(environ: Mapping[str, str] = os.environ) -> tuple[int, int, str, int] | None:
    """(node, number of nodes, host and port of node 0) where srun started one task a node; else None."""
    if not is_task(environ):
        return None
    task, num_nodes = read_task(environ), read_integer(environ, "SLURM_STEP_NUM_NODES", 1)
    if num_nodes == 1 or task["world_size"] != num_nodes:
        return None
    return task["rank"], num_nodes, task["master_addr"], task["master_port"]


def refuse_outside_step(environ: Mapping[str, str] = os.environ) -> None:
    """UserError where `manyhands train` would start a run in each task, or on only one of a job's nodes."""
    if is_task(environ) and (num_tasks := read_integer(environ, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UserError(
            "`manyhands train` starts the processes of a node itself, but srun has started it several times there",
            where=f"SLURM job {environ.get('SLURM_JOB_ID', '?')}: {num_tasks} tasks",
            why="each would train a run of its own, or wait for the first one's folder",
            fix="`srun --ntasks-per-node=1 manyhands train RUN.yaml`, or a task for each GPU and"
            " `srun python -m manyhands.worker RUN.yaml`",
        )
    num_nodes = read_integer(environ, "SLURM_JOB_NUM_NODES", 1)
    if not is_task(environ) and num_nodes > 1:
        raise UserError(
            "`manyhands train` would use one node of this job",
            where=f"SLURM job {environ.get('SLURM_JOB_ID', '?')}: {num_nodes} nodes",
            why="it starts processes on the machine it runs on, and srun starts it on each",
            fix="`srun --ntasks-per-node=1 manyhands train RUN.yaml`, or --nodes=1 for the job",
        )


def expand_hosts(nodelist: str) -> list[str]:
    """``"gpu[01-03,7],login1"`` -> ``["gpu01", ..., "gpu7", "login1"]``: SLURM's host lists."""
    nodelist = nodelist.strip()
    if not re.fullmatch(r"[^\[\]\s]*(\[\d[\d,-]*\][^\[\]\s]*)*", nodelist) or not nodelist:
        raise UserError(
            f"cannot read the host list {nodelist!r}",
            where="SLURM_JOB_NODELIST",
            fix="set MASTER_ADDR to rank 0's host",
        )
    hosts: list[str] = []
    for pattern in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", pattern)
        choices = [_expand_range(part) if index % 2 else [part] for index, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _expand_range(text: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def read_integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name} is not a number: {text!r}", where="environment", fix=f"unset {name}, or let the launcher set it"
        ) from None
