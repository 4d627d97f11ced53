"""What each node says of itself before planning, what must be equal, what they are together. No torch, no sockets."""

import hashlib
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import manyhands
from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.text import flatten, printable
from manyhands.data.tokenize.summary import PreparedData
from manyhands.facts.types import Figure, GpuFacts, HostFacts

PACKAGES = ("torch", "transformers", "safetensors")
MAX_SHOWN = 12  # keys that differ
FIX_OF_LOST = "see what became of that machine or process; the same command on every node resumes"
MISSING = "missing"  # UserError.kind where nodes have not come; ``data`` has their numbers
UNREACHABLE = "unreachable"  # UserError.kind where node 0 has not answered
LATER = "later"  # UserError.kind of a node that is to come again soon
NodeInfo = dict[str, Any]


@dataclass(frozen=True)
class NodeGroup:
    """All nodes of a launch, as the one that plans sees them. ``num_ranks``: processes of each node."""

    hosts: tuple[HostFacts, ...]
    num_ranks: tuple[int, ...]
    data: PreparedData | None = None  # once prepared
    places: dict[str, str] = field(default_factory=dict)  # of this node: fields of the plan that name its own folders
    link: Figure | None = None  # GB/s from node to node

    @property
    def world_size(self) -> int:
        return sum(self.num_ranks)


def describe_node(config: RunConfig, node: int, num_nodes: int, host: HostFacts, address: str | None) -> NodeInfo:
    """What a node says of itself, as JSON."""
    return {
        "claim": secrets.token_hex(8),  # no two starts say the same
        "node": node,
        "nodes": num_nodes,
        "host": host.name,
        "address": address,
        "run": config.model_dump(mode="json"),
        "digest": config.digest,
        "versions": read_versions(),
        "facts": host.model_dump(mode="json"),
    }


def check_node(known: Mapping[int, NodeInfo], new: NodeInfo) -> UserError | None:
    """Why a node cannot be one of those that are known; None if it can."""
    first = known[min(known)]
    mine, its = f"node {first['node']} ({first['host']})", f"node {new['node']} ({new['host']})"
    if new["nodes"] != first["nodes"]:
        return UserError(
            f"{mine} was started for {first['nodes']} nodes, {its} for {new['nodes']}",
            where="--nodes",
            fix="give the same --nodes on every machine",
        )
    if not 0 <= new["node"] < first["nodes"]:
        return UserError(
            f"there is no node {new['node']} of {first['nodes']}: {new['host']} was started with that rank",
            where="--node-rank",
            fix=f"number the machines from 0 to {first['nodes'] - 1}",
        )
    if new["node"] in known:
        return UserError(
            f"node {new['node']} came twice: from {known[new['node']]['host']} and from {new['host']}",
            where="--node-rank",
            fix="give each machine a --node-rank of its own, and start the run once on each",
        )
    if new["digest"] != first["digest"]:
        return UserError(
            f"{its} came with another run than {mine}",
            where=f"runs {first['run']['name']!r} and {new['run']['name']!r}",
            why=f"keys differ ({first['host']} -> {new['host']})",
            fix="start the same run file with the same overrides on every machine",
            details=_differing(first["run"], new["run"]),
        )
    if new["versions"] != first["versions"]:
        return UserError(
            f"{its} has other versions than {mine}",
            where=f"{first['host']} -> {new['host']}",
            fix="install the same on every machine",
            details=_differing(first["versions"], new["versions"]),
        )
    return None


def explain_missing(missing: Sequence[int], num_nodes: int, there: str, waited_s: float) -> UserError:
    return UserError(
        f"{len(missing)} of {num_nodes} nodes did not come: {', '.join(f'node {node}' for node in missing)}",
        where=f"waited {waited_s:g} s (parallel.timeout_s); there: {there}",
        why="they were not started, ended early, or cannot reach the rendezvous",
        fix="start the same command on each machine, with --node-rank from 0 to the number of nodes less one",
        exit_code=EXIT_FAILED,
        kind=MISSING,
        data={f"node {node}": node for node in missing},
    )


def explain_unreachable(node: str, address: str, waited_s: float, error: OSError) -> UserError:
    """Node 0, as seen from ``node``."""
    return UserError(
        f"{node} found no node 0 at {address} within {waited_s:g} s",
        where=f"--rendezvous {address}",
        why=error.strerror or str(error),
        fix="start node 0 there, and see that this machine can reach that address and port",
        exit_code=EXIT_FAILED,
        kind=UNREACHABLE,
    )


def explain_unopened(error: Exception, host: str) -> UserError:
    """Node 0's store for the ranks cannot listen."""
    return UserError(
        f"torch's store cannot be opened on node 0 ({host})",
        where=f"a free port of {host}",
        why=str(error).partition("\n")[0] or type(error).__name__,
        fix="see that node 0 may open sockets and listen on its free ports; the same command on every node resumes",
        exit_code=EXIT_FAILED,
    )


def explain_lost(node: str, by: str, why: str, kind: str = "") -> UserError:
    """``node``, as seen from the node ``by``."""
    return UserError(
        f"{node} is lost", where=f"noticed by {by}", why=why, fix=FIX_OF_LOST, exit_code=EXIT_FAILED, kind=kind
    )


def explain_ending(node: str, first: str) -> UserError:
    """``node`` has come back sooner than ``first`` has ended what it was lost in."""
    return UserError(
        f"{first} is still ending the run that {node} was lost in",
        where="--rendezvous",
        fix="start this node again in a minute",
        exit_code=EXIT_FAILED,
        kind=LATER,
    )


def check_nodes(infos: Sequence[NodeInfo]) -> None:
    """UserError unless these are the nodes of one run."""
    known: dict[int, NodeInfo] = {}
    for info in infos:
        error = check_node(known, info) if known else None
        if error is not None:
            raise error
        known[info["node"]] = info


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = flatten(old), flatten(new)
    found = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in before | after
             if before.get(key) != after.get(key)]  # fmt: skip
    more = [f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return found[:MAX_SHOWN] + more


def read_versions() -> dict[str, str]:
    """What must be the same on every node: Python, libraries, and this program's own files."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    found |= {name: families.installed_version(name) or "none" for name in PACKAGES}
    return found | {"manyhands": manyhands.__version__, "code of manyhands": digest_of_code()}


@cache
def digest_of_code() -> str:
    """Of the package's files: an edited checkout has the version of the one it was made from."""
    root, digest = Path(manyhands.__file__).parent, hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.toml") for path in root.rglob(kind)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def join_hosts(hosts: Sequence[HostFacts]) -> HostFacts:
    """What can be relied on everywhere: of each GPU, the cores and the memory the least that a node has."""
    pairs = zip(*(host.gpus for host in hosts), strict=False)
    kinds = {host.kind.name if host.kind else None for host in hosts}
    unusable = next((host for host in hosts if host.unusable_gpus is not None), None)
    return HostFacts(
        name=hosts[0].name,
        gpus=tuple(_least(gpus) for gpus in pairs),
        num_cores=min(host.num_cores for host in hosts),
        memory_bytes=min(host.memory_bytes for host in hosts),
        free_memory_bytes=min(host.free_memory_bytes for host in hosts),
        kind=hosts[0].kind if len(kinds) == 1 else None,
        has_flash4=all(host.has_flash4 for host in hosts),
        unusable_gpus=unusable.unusable_gpus if unusable is not None else None,
        lost_gpus=tuple(f"{host.name}: {lost}" for host in hosts for lost in host.lost_gpus),
    )


def _least(gpus: Sequence[GpuFacts]) -> GpuFacts:
    """One GPU that can do what all of these can."""
    weakest = min(gpus, key=lambda gpu: (gpu.has_bfloat16, gpu.compute_capability or (0, 0), gpu.memory_bytes))
    memory, free = min(gpu.memory_bytes for gpu in gpus), min(gpu.free_bytes for gpu in gpus)
    return weakest.model_copy(update={"memory_bytes": memory, "free_bytes": free})


def count_ranks(config: RunConfig, hosts: Sequence[HostFacts]) -> tuple[int, ...]:
    """Processes of each node: one a GPU, or equal parts of parallel.gpus. UserError where they cannot be."""
    vendors = {gpu.vendor for host in hosts for gpu in host.gpus}
    without = [host.name for host in hosts if not host.gpus]
    asked, on_cpu = config.parallel.gpus, config.parallel.device == "cpu"
    if not on_cpu and (len(vendors) > 1 or (without and len(without) < len(hosts))):
        raise UserError(
            "the nodes have GPUs of different makers" if len(vendors) > 1 else f"{', '.join(without)} has no GPU",
            where="; ".join(f"{host.name}: {describe_gpus(host)}" for host in hosts),
            why="they cannot train together",
            fix="leave that machine out, or set parallel.device=cpu",
        )
    counts = [1 if on_cpu or not host.gpus else len(host.gpus) for host in hosts]
    if asked != "auto":
        if asked % len(hosts):
            raise UserError(
                f"parallel.gpus is {asked}, which {len(hosts)} nodes cannot share equally",
                where="parallel.gpus: the number on all nodes",
                fix=f"set parallel.gpus to a multiple of {len(hosts)}, or to auto",
            )
        each = asked // len(hosts)
        few = [host.name for host, count in zip(hosts, counts, strict=True) if count < each and host.gpus]
        if few and not on_cpu:
            raise UserError(
                f"parallel.gpus is {asked}, {each} for each of {len(hosts)} nodes, and {', '.join(few)} has fewer",
                where="; ".join(f"{host.name}: {describe_gpus(host)}" for host in hosts),
                fix="set a smaller parallel.gpus, or auto",
            )
        counts = [each] * len(hosts)
    return tuple(counts)


def describe_gpus(host: HostFacts) -> str:
    """The names of its GPUs with their numbers, or ``no GPU``."""
    names = [gpu.name for gpu in host.gpus]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"


def host_name() -> str:
    return socket.gethostname() or os.uname().nodename


def clean_name(name: object) -> str:
    """A host's name as another machine gives it, on one line and without what a terminal obeys."""
    return " ".join(printable(str(name)).split())
