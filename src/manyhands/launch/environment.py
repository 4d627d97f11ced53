"""Environment variables of processes: who started this one, read from what launchers set, and those of our workers.

The latter are written here alone, and never over what the user has set. Starts nothing, imports no torch.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhands.config.read import ParsedFile
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.machine import count_cores
from manyhands.core.units import count_of
from manyhands.importers.accelerate import read_environment
from manyhands.launch import slurm
from manyhands.launch.nodes.address import LOOPBACK, is_loopback
from manyhands.launch.slurm import read_integer
from manyhands.planner.types import Plan

Kind = Literal["manyhands", "torchrun", "accelerate", "slurm", "none"]

_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Launcher:
    """One process's place among those started with it. ``none``: started alone, by hand."""

    kind: Kind
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT
    has_own_cores: bool = False  # the cores that a process sees are its own, not shared with the machine's other ranks

    has_own_gpu: bool = False  # the one GPU that a process sees is its own (srun --gpus-per-task=1)

    @property
    def device_index(self) -> int:
        """Of this process's GPU among those that it sees."""
        return 0 if self.has_own_gpu else self.local_rank

    @property
    def is_one_machine(self) -> bool:
        """Whether it is known, to every rank alike, that all ranks are on this machine."""
        tells = self.kind == "slurm" or "LOCAL_WORLD_SIZE" in os.environ
        return is_loopback(self.master_addr) or (tells and self.local_world_size == self.world_size)

    @property
    def num_sharing_cores(self) -> int:
        return 1 if self.has_own_cores else self.local_world_size


def detect_launcher(environ: Mapping[str, str] = os.environ) -> Launcher:
    """torchrun, accelerate, Kubernetes and our own launcher set RANK, WORLD_SIZE and MASTER_*; SLURM its own names.

    RANK wins over SLURM, as torchrun may run inside a SLURM job. UserError if the variables contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _check(_from_torch_variables(environ))
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ:
        # accelerate 1.15 (utils/launch.py, prepare_simple_launcher_cmd_env) sets it for several processes
        raise UserError(
            "accelerate launch has started one process of several",
            where="environment: MASTER_ADDR is set, RANK and WORLD_SIZE are not",
            why="without `--multi_gpu` or a distributed_type of GPUs it starts one process a machine, "
            "whatever --num_processes is",
            fix="on CPUs use `manyhands train FILE parallel.device=cpu parallel.gpus=N`; on GPUs add --multi_gpu; "
            "for one process set --num_processes 1",
        )
    if slurm.is_task(environ):
        return _check(Launcher("slurm", **slurm.read_task(environ)))
    return Launcher("none")


def refuse_silent_single(launcher: Launcher, config: RunConfig, num_gpus: int | None = None) -> None:
    """UserError where one process would leave GPUs idle. ``num_gpus``: visible ones, counted if not given."""
    asked = config.parallel.gpus
    slurm.refuse_idle(launcher.kind, launcher.world_size, launcher.local_world_size, asked, config.parallel.device)
    # One task of srun is no choice of one process: jobs and interactive shells have it by default.
    alone = launcher.kind == "none" or (launcher.kind == "slurm" and launcher.world_size == 1)
    if not alone or asked == 1:
        return
    if num_gpus is None and config.parallel.device != "cpu":
        from manyhands.facts.host import read_host_facts

        num_gpus = len(read_host_facts().gpus)
    num_gpus = 0 if config.parallel.device == "cpu" else num_gpus or 0
    if asked == "auto" and num_gpus <= 1:
        return
    raise UserError(
        "this one process would train alone",
        where=f"parallel.gpus: {asked}; {count_of(num_gpus, 'GPU')} visible",
        why="`python -m manyhands.worker` is one rank, and no launcher has started others",
        fix="use `manyhands train RUN.yaml`, or `torchrun --nproc_per_node=N -m manyhands.worker RUN.yaml`; "
        "for a single process set parallel.gpus=1",
    )


# What launchers of several machines set where a program starts: torchrun's own variables (Kubeflow's Trainer sets
# them), and SkyPilot's.
_NUM_NODES = ("PET_NNODES", "SKYPILOT_NUM_NODES", "GROUP_WORLD_SIZE")
_RENDEZVOUS = ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "MASTER_ADDR")


def refuse_alone(config: RunConfig, environ: Mapping[str, str] = os.environ) -> None:
    """UserError where `manyhands train` would train alone though run file or environment name several machines."""
    nodes, where = config.parallel.nodes, ""
    if nodes == 1:
        return
    if nodes != "auto":
        where = f"parallel.nodes: {nodes}"
    for name in _NUM_NODES:
        if not where and environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            where = f"environment: {name}={environ[name]}"
    for name in _RENDEZVOUS:
        host = environ.get(name, "").rsplit(":", 1)[0] if name == "PET_RDZV_ENDPOINT" else environ.get(name, "")
        if not where and host and not is_loopback(host):
            where = f"environment: {name}={environ[name]}"
    if where:
        raise UserError(
            "this machine would train alone",
            where=where,
            why="the run is for several machines, and nothing says which one this is",
            fix="add --nodes N --node-rank R --rendezvous HOST:PORT on each; for one machine set parallel.nodes=1",
        )


def accelerate_settings(environ: Mapping[str, str] = os.environ) -> dict[str, Path | ParsedFile]:
    """What ``accelerate launch`` was asked for, to be merged with the run file as ``--accelerate-config`` is; nothing
    under another launcher. Its default precision, `no`, asks nothing.
    """
    asked = read_environment(environ)
    return {} if asked is None else {"accelerate": asked}


# Ours, for scripts and commands that are to stay as they are.
FORCE_SINGLE_GPU = "MANYHANDS_FORCE_SINGLE_GPU"  # 1: one process, whatever the run says
NUM_PROCESSES = "MANYHANDS_NUM_PROCESSES"  # parallel.gpus where the run leaves it open
COMPILE_MAXIMUM = "MANYHANDS_COMPILE_MAXIMUM"  # 1: parallel.compile=true where the run leaves it open
# Variables that guides set and that nothing here reads, and what does the same.
_UNREAD = {
    "UNSLOTH_FORCE_SINGLE_GPU": f"parallel.gpus=1, or {FORCE_SINGLE_GPU}=1,",
    "UNSLOTH_COMPILE_MAXIMUM": f"parallel.compile=true, or {COMPILE_MAXIMUM}=1,",
}
_ASYNC_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


def requested_processes(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of processes that our variables ask for, or None. UserError for what is no number."""
    if _is_on(environ, FORCE_SINGLE_GPU):
        return 1
    text = environ.get(NUM_PROCESSES, "")
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise UserError(
            f"{NUM_PROCESSES} is not a number of processes: {text!r}",
            where="environment",
            fix="unset it, or set it to N",
        )
    return int(text)


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").lower()
    if text not in ("", "0", "1", "true", "false"):
        raise UserError(f"{name} is neither 0 nor 1: {text!r}", where="environment", fix="unset it, or set it to 1")
    return text in ("1", "true")


def _apply_own(config: RunConfig, environ: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    notes, changes, parallel = [], {}, config.parallel
    asked, forced = requested_processes(environ), _is_on(environ, FORCE_SINGLE_GPU)
    name = FORCE_SINGLE_GPU if forced else NUM_PROCESSES
    if asked is not None and (forced or parallel.gpus == "auto"):
        changes["gpus"] = asked
        notes.append(f"{name}={environ[name]} is taken as parallel.gpus={asked}")
    elif asked not in (None, parallel.gpus):
        notes.append(f"{name}={environ[name]} has no effect: the run sets parallel.gpus")
    if _is_on(environ, COMPILE_MAXIMUM) and parallel.compile == "auto":
        changes["compile"] = True
        notes.append(f"{COMPILE_MAXIMUM}={environ[COMPILE_MAXIMUM]} is taken as parallel.compile=true")
    elif _is_on(environ, COMPILE_MAXIMUM) and not parallel.compile:
        notes.append(f"{COMPILE_MAXIMUM}={environ[COMPILE_MAXIMUM]} has no effect: the run sets parallel.compile")
    if changes:
        config = config.model_copy(update={"parallel": parallel.model_copy(update=changes)})
    return config, notes


def apply_variables(config: RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[RunConfig, list[str]]:
    """The run with what guides set by variables that neither NCCL nor torch reads as meant, and what to say about them.

    ``NCCL_TIMEOUT`` (seconds) is parallel.timeout_s unless the run sets that. UserError where it is no number of
    seconds.
    """
    config, notes = _apply_own(config, environ)
    text = environ.get("NCCL_TIMEOUT", "")
    if text:
        if not text.isdecimal() or not int(text):
            raise UserError(
                f"NCCL_TIMEOUT is not a number of seconds: {text!r}",
                where="environment",
                fix="unset it, or set parallel.timeout_s",
            )
        if "timeout_s" in config.parallel.model_fields_set:
            notes.append(f"NCCL_TIMEOUT={text} has no effect: the run sets parallel.timeout_s")
        else:
            parallel = config.parallel.model_copy(update={"timeout_s": int(text)})
            config = config.model_copy(update={"parallel": parallel})
            notes.append(f"NCCL_TIMEOUT={text} is taken as parallel.timeout_s (NCCL itself has no such variable)")
    for name in (name for name in _ASYNC_ERRORS if name in environ):
        meaning = "it disables torch's NCCL watchdog" if environ[name] == "0" else "its default is on as well"
        notes.append(f"{name}={environ[name]} is passed to torch: {meaning}; parallel.timeout_s ends a rank that hangs")
    notes += [f"{name} is not read: {same} does the same" for name, same in _UNREAD.items() if environ.get(name)]
    return config, notes


def _from_torch_variables(environ: Mapping[str, str]) -> Launcher:
    rank = read_integer(environ, "RANK", 0)
    world_size = read_integer(environ, "WORLD_SIZE", 1)
    if "WORLD_SIZE" not in environ:
        raise UserError(
            "RANK is set, WORLD_SIZE is not",
            where=f"environment: RANK={environ['RANK']}",
            why="the number of processes is unknown",
            fix="start the processes with torchrun or accelerate, set WORLD_SIZE, or unset RANK to run alone",
        )
    if world_size > 1 and ("RANK" not in environ or "MASTER_ADDR" not in environ):
        missing = "RANK" if "RANK" not in environ else "MASTER_ADDR"
        raise UserError(
            f"WORLD_SIZE is {world_size}, but {missing} is not set",
            where="environment",
            fix=f"start the processes with torchrun or accelerate, or set {missing} for each of them",
        )
    master_addr = environ.get("MASTER_ADDR", "127.0.0.1")
    one_host = master_addr in LOOPBACK
    # Kubernetes' PyTorchJob sets neither of the local ones: one process a pod.
    return Launcher(
        kind=_kind(environ),
        rank=rank,
        local_rank=read_integer(environ, "LOCAL_RANK", rank if one_host else 0),
        world_size=world_size,
        local_world_size=read_integer(
            environ, "LOCAL_WORLD_SIZE", world_size if one_host else 1 + read_integer(environ, "LOCAL_RANK", 0)
        ),
        master_addr=master_addr,
        master_port=read_integer(environ, "MASTER_PORT", _DEFAULT_PORT),
    )


def _kind(environ: Mapping[str, str]) -> Kind:
    if LAUNCHER_PID in environ:
        return "manyhands"
    return "accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"


def _check(launcher: Launcher) -> Launcher:
    if not 0 <= launcher.rank < launcher.world_size or not 0 <= launcher.local_rank < launcher.local_world_size:
        raise UserError(
            f"rank {launcher.rank} of {launcher.world_size}, local rank {launcher.local_rank}"
            f" of {launcher.local_world_size}: inconsistent",
            where=f"environment, read as {launcher.kind}",
            fix="let one launcher set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset them",
        )
    return launcher


# The pid a worker's parent has as long as our launcher lives; also says that it was our launcher.
LAUNCHER_PID = "MANYHANDS_LAUNCHER_PID"
PLACES = "MANYHANDS_PLACES"  # of several nodes: where model, adapter and samples are on this one, as JSON
ATTEMPT = "MANYHANDS_ATTEMPT"  # of our launcher to run these ranks, counted from 1
MAX_GPU_THREADS = 8  # a GPU rank computes little on the host; more threads only disturb its neighbors


def worker_environment(plan: Plan, num_local: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add for each worker of ``plan``: the plan's own and our defaults, less those the user has set.

    OMP_NUM_THREADS is this machine's cores shared out among its ``num_local`` ranks (torch would take all of them in
    every rank); sums on the CPU depend on it, so it is the same at each launch on the same machine.
    """
    threads = max(1, count_cores() // num_local)
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads if plan.layout.device == "cpu" else min(threads, MAX_GPU_THREADS)),
        **plan.environment,
    }
    return {name: value for name, value in wanted.items() if name not in environ}


def choose_threads(plan: Plan, launcher: Launcher) -> int:
    """Of torch in this rank: the user's OMP_NUM_THREADS, else the plan's, which has one for a CPU as its sums depend on
    it, else what ``worker_environment`` has added.

    torchrun and accelerate set the variable to 1 in every rank where the user has not: what their own process began
    with tells.
    """
    text, is_users = os.environ["OMP_NUM_THREADS"], True
    if launcher.kind in ("torchrun", "accelerate"):
        try:
            begun_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:
            begun_with = []
        is_users = any(variable.startswith(b"OMP_NUM_THREADS=") for variable in begun_with)
    text = text if is_users else plan.environment.get("OMP_NUM_THREADS", text)
    first = text.split(",")[0].strip()  # of nested regions each has its own
    return int(first) if first.isdecimal() and int(first) else 1


@contextlib.contextmanager
def launcher_environment(
    plan: Plan, num_local: int | None = None, added: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The environment that workers inherit, restored afterwards. ``num_local``: ranks here. ``added``: of this node."""
    with restored_environment():
        os.environ.update({name: value for name, value in (added or {}).items() if name not in os.environ})
        os.environ.update(worker_environment(plan, num_local or plan.layout.world_size))
        os.environ[LAUNCHER_PID] = str(os.getpid())
        yield


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Afterwards this process's variables are those of before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def localize(plan: Plan, text: str | None) -> Plan:
    """The plan with this node's own folders (``PLACES``), or the plan itself."""
    places = json.loads(text) if text else {}
    adapter = places.pop("adapter_folder", None)
    if adapter is not None and plan.adapter is not None:
        places["adapter"] = plan.adapter.model_copy(update={"folder": adapter})
    return plan.model_copy(update=places) if places else plan
