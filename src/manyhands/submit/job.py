"""What a job asks of any cluster, from the run, its plan and the ``submit`` section. Pure: the files that schedulers
take are made from it in ``slurm.py``, ``kubernetes.py`` and ``skypilot.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from manyhands import __version__
from manyhands.config.read import RunFileDumper
from manyhands.config.schema import RunConfig, SubmitSection
from manyhands.config.sources import list_sources
from manyhands.core.errors import UserError
from manyhands.core.limits import GIB
from manyhands.core.secret_values import find_secrets
from manyhands.facts.types import GpuKind, HostFacts
from manyhands.planner.checkpoints import STAGING
from manyhands.planner.types import Plan

Target = Literal["slurm", "kubernetes", "skypilot"]
MAX_CORES = 8  # of a process: its own, its data workers', and those of the libraries
SAVE_S, SAVE_BYTES_PER_S = 120, GIB // 2  # SLURM looks once a minute; a slow shared disk
HOST_BYTES = 4 * GIB  # of a process beside what it offloads
_UNITS = {"d": 86400, "h": 3600, "m": 60}
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|KEY)$")
_ASSIGNED = re.compile(r"""(?<![\w-])([A-Z][A-Z0-9_]*)=["']?[^\s"'$`]""")  # a value, not where to take it from
# Keys of `submit` that only one kind of cluster reads.
ONLY: dict[str, tuple[Target, ...]] = {
    "save_before_s": ("slurm",),
    "cpus_per_gpu": ("slurm", "kubernetes"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "namespace": ("kubernetes",),
    "runtime": ("kubernetes",),
}


@dataclass(frozen=True)
class ClusterJob:
    """One run on one cluster. ``config`` is what the job trains: the run with an absolute ``output.dir``.

    ``num_per_node``: processes, and GPUs if there are any, on each of ``num_nodes`` machines. ``cores``: of a process.
    ``host_bytes``: memory that a machine must have because the plan offloads to it; None where it does not.
    ``files``: folder on this machine for what is submitted.
    """

    config: RunConfig
    files: Path
    num_nodes: int
    num_per_node: int
    gpu: GpuKind | None
    cores: int
    host_bytes: int | None
    time_limit_s: int | None
    save_before_s: int
    number: int = 1  # of the run's submissions and dry runs

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def section(self) -> SubmitSection:
        return self.config.submit

    @property
    def folder(self) -> Path:
        """The run's, where the job runs."""
        return Path(self.config.output.dir) / self.config.name

    @property
    def run_json(self) -> Path:
        """Of this submission alone: a job in the queue reads it when it starts."""
        return self.files / f"run-{self.number}.json"

    @property
    def size(self) -> str:
        what = self.gpu.name if self.gpu is not None else "process" + "es" * (self.num_per_node > 1)
        nodes = f"{self.num_nodes} machines with " if self.num_nodes > 1 else ""
        return f"{nodes}{self.num_per_node} {'× ' * (self.gpu is not None)}{what}"

    @property
    def title(self) -> str:
        """First comment of every file."""
        return f"{self.name}: {self.size}; written by manyhands {__version__}"


def describe_job(config: RunConfig, plan: Plan | None, host: HostFacts, files: Path, *, number: int = 1) -> ClusterJob:
    """``plan``: None where model and data are only on the cluster. ``host``: one of its machines.

    UserError where keys of ``submit`` contradict the run, or a secret would be written down.
    """
    section = config.submit
    _refuse_secrets(config)
    device = plan.layout.device if plan is not None else "cuda" if host.gpus else "cpu"
    asked = config.parallel.gpus
    total = asked if asked != "auto" else max(1, len(host.gpus)) * host.num_nodes
    total = plan.layout.world_size if plan is not None else total
    num_nodes = host.num_nodes if device == "cuda" else 1
    if device == "cuda" and total != len(host.gpus) * num_nodes:
        raise UserError(
            f"the run takes {total} of {len(host.gpus) * num_nodes} GPUs that the job would ask for",
            where=f"parallel.gpus: {config.parallel.gpus}",
            fix="leave parallel.gpus out: --gpus and submit.gpus have the number",
        )
    num_per_node = total // num_nodes
    gpu = host.kind if device == "cuda" else None
    time_limit_s = None if section.time_limit is None else parse_duration(section.time_limit)
    save_before_s = _save_before(section, plan)
    if time_limit_s is not None and save_before_s >= time_limit_s:
        raise UserError(
            f"the run would be told to save {save_before_s} s before a limit of {time_limit_s} s",
            where="submit.time_limit, submit.save_before_s",
            fix="raise submit.time_limit, or lower submit.save_before_s",
        )
    cores = section.cpus_per_gpu
    return ClusterJob(
        config=config,
        files=files,
        num_nodes=num_nodes,
        num_per_node=num_per_node,
        gpu=gpu,
        cores=max(1, min(MAX_CORES, host.num_cores // num_per_node)) if cores == "auto" else cores,
        host_bytes=_host_bytes(plan, num_per_node),
        time_limit_s=time_limit_s,
        save_before_s=save_before_s,
        number=number,
    )


def parse_duration(limit: int | str) -> int:
    """Seconds of ``36:00:00``, ``1-12:00:00``, ``1d12h``, ``90m`` or a number of seconds."""
    if isinstance(limit, int):
        return limit
    if ":" not in limit:
        return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhm])", limit))
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def local_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, absolute path) of everything that the run reads from a disk rather than from the hub."""
    for key, value in (("model.name", config.model.name), ("method.adapter", config.method.adapter)):
        if value and (Path(value).is_absolute() or Path(value).expanduser().exists()):
            yield key, _absolute(value)
    template = config.model.chat_template
    if template and "{" not in template and Path(template).is_absolute():
        yield "model.chat_template", _absolute(template)
    for rules in list_sources(config):
        if not rules.source.path.startswith("hub:"):
            yield rules.place, _absolute(rules.source.path)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def under_volume(path: str, section: SubmitSection) -> bool:
    """Whether a path lies in one of ``submit.volumes``."""
    return any(Path(path).is_relative_to(mount) for mount in section.volumes)


def refuse_lost_folder(config: RunConfig, where: str) -> None:
    """UserError where the run's folder would end with the machine that it is on."""
    if under_volume(config.output.dir, config.submit):
        return
    mounts = next(iter(config.submit.volumes), "/mnt/runs")
    raise UserError(
        "the run's folder would be lost with the machine, and nothing could be resumed",
        where=f"output.dir: {config.output.dir}",
        why=f"{where} keeps only what is in submit.volumes"
        + (f": {', '.join(config.submit.volumes)}" if config.submit.volumes else ", of which there are none"),
        fix=f"write output.dir: {mounts}"
        + ("" if config.submit.volumes else f" and submit.volumes: {{{mounts}: NAME}}, NAME being the volume"),
    )


class _Blocks(RunFileDumper):
    """Text of several lines, such as commands, as it is; text that kubectl takes for a number (1e3, 08) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Blocks.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


def to_yaml(job: ClusterJob, *documents: dict[str, Any]) -> str:
    """The content of a file, its keys in the given order."""
    return f"# {job.title}\n" + yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, width=120)


def unread_keys(section: SubmitSection, target: Target) -> list[str]:
    """Keys of the section that are set and that this kind of cluster does not have."""
    found = [
        f"submit.{key}"
        for key, targets in ONLY.items()
        if target not in targets and getattr(section, key) != type(section).model_fields[key].default
    ]
    outside = target == "slurm" and section.image is None  # paths are the nodes' own
    return found + ["submit.volumes"] * (outside and bool(section.volumes))


def _refuse_secrets(config: RunConfig) -> None:
    """By name in the job's environment and commands, by value anywhere in the run."""
    section = config.submit
    named = [(name, f"submit.environment.{name}") for name in section.environment if _SECRET.search(name.upper())]
    for key in ("setup", "options"):
        found = (name for text in getattr(section, key) for name in _ASSIGNED.findall(text))
        named += [(name, f"submit.{key}") for name in found if _SECRET.search(name)]
    for name, where in named[:1]:
        raise UserError(
            f"{name} looks like a secret, and the job's file is no place for one",
            where=where,
            fix=f"write submit.secrets: {{{name}: NAME}}, NAME being a Kubernetes Secret; sbatch and sky take the"
            " value from this shell",
        )
    for key, text in _texts(config.model_dump(mode="json")):
        if secrets := find_secrets(text):
            raise UserError(
                f"{secrets[0]} would be written into the job's files",
                where=key,
                fix="take it from the environment: submit.secrets: {NAME: SECRET}, and $NAME in commands",
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each text of the run with its key, names of keys included: those of ``submit.volumes`` are the user's."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield key, name
            yield from _texts(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value


def _save_before(section: SubmitSection, plan: Plan | None) -> int:
    if section.save_before_s != "auto":
        return section.save_before_s
    size = plan.disk.checkpoint_bytes if plan is not None and plan.disk is not None else 0
    return SAVE_S + -(-size // SAVE_BYTES_PER_S)


def _host_bytes(plan: Plan | None, num_per_node: int) -> int | None:
    """What is offloaded; a checkpoint is staged where there is room, and written without where there is none."""
    terms = {} if plan is None else {name: size for name, size in plan.memory.host_terms.items() if name != STAGING}
    return num_per_node * (sum(terms.values()) + HOST_BYTES) if terms else None
