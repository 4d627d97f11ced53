"""Before there is a process group, over the store: what rank 0 makes and every rank gets; and of several nodes under
another launcher (torchrun, accelerate, srun), which ranks share a machine, and what the first rank of each finds out
with those of the others, over a channel as between our own launchers, before rank 0 plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from manyhands.core.errors import EXIT_FAILED, PeerError, UserError
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import HostFacts
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import Launcher, apply_variables
from manyhands.launch.local.heartbeat import this_host
from manyhands.launch.nodes.address import (
    LOCAL_HOST,
    Address,
    address_among,
    network_environment,
    new_nonce,
    own_address,
)
from manyhands.launch.nodes.channel import Channel
from manyhands.launch.nodes.info import UNREACHABLE, NodeGroup, check_nodes, clean_name, describe_node, host_name
from manyhands.launch.nodes.preflight import find_group
from manyhands.launch.nodes.start import failing_together

POLL_S = 0.2
FAILED = "nodes/failed"
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")  # of torchrun and accelerate, of srun


@dataclass(frozen=True)
class NodeMap:
    """Which ranks are where. Nodes are in the order of their first ranks."""

    node: int  # of this rank
    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    addresses: tuple[str | None, ...]  # among the nodes; none: not known

    @property
    def num_nodes(self) -> int:
        return len(self.ranks)

    def leads(self, rank: int) -> bool:
        """Whether the rank is its node's first."""
        return rank == self.ranks[self.node][0]

    @property
    def environment(self) -> dict[str, str]:
        """For gloo and NCCL: the interface by which the nodes reach each other; on one machine the loopback."""
        own = self.addresses[self.node] or address_among(self.addresses) if self.num_nodes > 1 else None
        return network_environment(own or LOCAL_HOST)


def describe_rank(launcher: Launcher) -> str:
    """What a rank says of itself when it comes. No two processes say the same."""
    number = next((os.environ[name] for name in _NODE_NUMBERS if os.environ.get(name)), "")
    fields = {"node": f"{number} {this_host()} {host_name()}", "host": host_name(), "pid": os.getpid()}
    fields |= {"address": own_address(launcher.master_addr, launcher.master_port), "claim": secrets.token_hex(8)}
    return json.dumps(fields)


def read_map(store: dist.Store, launcher: Launcher) -> NodeMap:
    """From what all ranks have said."""
    said = [json.loads(store.get(f"here/{rank}")) for rank in range(launcher.world_size)]
    keys = list(dict.fromkeys(fields["node"] for fields in said))
    ranks = tuple(tuple(rank for rank, fields in enumerate(said) if fields["node"] == key) for key in keys)
    first = [said[group[0]] for group in ranks]
    return NodeMap(
        node=keys.index(said[launcher.rank]["node"]),
        names=tuple(clean_name(fields["host"]) for fields in first),
        ranks=ranks,
        addresses=tuple(fields["address"] for fields in first),
    )


def find_group_over_store(
    store: dist.Store,
    launcher: Launcher,
    nodes: NodeMap,
    load: Callable[[], LoadedRun],
    *,
    fresh: bool,
    report: Callable[[str], None],
    timeout_s: float,
) -> tuple[LoadedRun, NodeGroup | None]:
    """On the first rank of each node: the run, and all nodes with this one's samples; None where the run is finished.

    UserError, the same on each, where one of them cannot take part.
    """
    with contextlib.closing(_open_channel(store, launcher, nodes, timeout_s)) as channel, failing_together(channel):
        loaded = load()
        config, _ = apply_variables(loaded.config)
        channel.silence_s = config.parallel.timeout_s
        host = read_host_facts().model_copy(update={"name": nodes.names[nodes.node]})
        infos = channel.gather(
            "node", describe_node(config, nodes.node, nodes.num_nodes, host, nodes.addresses[nodes.node])
        )
        check_nodes(infos)
        hosts = tuple(HostFacts.model_validate(info["facts"]) for info in infos)
        num_ranks = tuple(len(ranks) for ranks in nodes.ranks)
        config, group = find_group(channel, config, hosts, num_ranks, nodes.addresses, fresh=fresh, report=report)
    store.set(f"places/{nodes.node}", json.dumps(group.places if group is not None else {}))
    return replace(loaded, config=config), group


def _open_channel(store: dist.Store, launcher: Launcher, nodes: NodeMap, timeout_s: float) -> Channel:
    """Between first ranks of nodes. The store has only port and secret: its calls hang on a cut link."""
    mine = {"node": nodes.node, "host": nodes.names[nodes.node], "address": nodes.addresses[nodes.node]}
    rank, host = launcher.rank, nodes.addresses[0] or launcher.master_addr
    secret = broadcast_from_rank0(store, rank, "secret", new_nonce, timeout_s).encode()
    channel = Channel(nodes.node, nodes.num_nodes, mine, silence_s=timeout_s, secret=secret)
    try:
        port = broadcast_from_rank0(store, rank, "port", lambda: str(channel.listen(Address(host, 0))), timeout_s)
        if rank != 0:
            channel.connect(Address(host, int(port)), timeout_s)
        channel.wait_for_all(timeout_s)
    except BaseException as error:
        channel.close()
        if isinstance(error, UserError) and error.kind == UNREACHABLE:
            error.where = "at a free port that rank 0 has chosen"
            error.fix = "let the nodes reach each other at all ports; their ranks need it too"
        raise
    return channel


def refuse_second_claim(store: dist.Store, rank: int, mine: str) -> None:
    """UserError, on all ranks, where two processes come as the same rank."""
    said = store.compare_set(f"here/{rank}", "", mine).decode()
    if said == mine:
        return
    first, second = json.loads(said), json.loads(mine)
    error = UserError(
        f"two processes registered as rank {rank}: process {first['pid']} on {first['host']} and process"
        f" {second['pid']} on {second['host']}",
        why="two machines were started with the same node rank, or the run was started twice",
        fix="give each machine a node rank of its own, and start the run once on each",
        exit_code=EXIT_FAILED,
    )
    store.set(FAILED, error.to_json())
    raise error


def broadcast_from_rank0(store: dist.Store, rank: int, key: str, make: Callable[[], str], timeout_s: float) -> str:
    """``make()`` runs on rank 0 alone; every rank gets its text. A failure of rank 0 reaches all ranks at once."""
    if rank == 0:
        try:
            text = make()
        except BaseException as error:
            code = (
                error.exit_code
                if isinstance(error, UserError)
                else error.code
                if isinstance(error, SystemExit)
                else EXIT_FAILED
            )
            store.set(key, f"error {code} {error}")
            raise
        store.set(key, "value " + text)
        return text
    deadline = time.monotonic() + timeout_s
    while not has_key(store, key):
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {rank} waited {timeout_s:g} s for rank 0's {key}",
                why="rank 0 prepares data and plan for all; it is still busy, or it ended",
                exit_code=EXIT_FAILED,
            )
        time.sleep(POLL_S)
    kind, _, text = store.get(key).decode().partition(" ")
    if kind == "error":
        code_text, _, message = text.partition(" ")
        raise FirstRankFailed(int(code_text), message)
    return text


class FirstRankFailed(PeerError):
    """Rank 0 has failed and reports it; this rank only ends, with the same exit code."""

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(f"rank 0 failed (exit code {exit_code})")
        self.exit_code, self.text = exit_code, text


def has_key(store: dist.Store, key: str) -> bool:
    """UserError where rank 0, which serves the store, has ended."""
    try:
        return store.check([key])
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            "rank 0 ended before it had a plan for all",
            why=str(error).splitlines()[0],
            fix="read rank 0's output; the machine it runs on may have run out of memory",
            exit_code=EXIT_FAILED,
        ) from error


def shutdown_barrier(store: dist.Store, launcher: Launcher, timeout_s: float) -> None:
    """Ends before the process group forms: rank 0, which may serve the store, waits for the others."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(
        dist.DistError, RuntimeError
    ):  # the store has ended, and with it all that is to be waited for
        if launcher.rank != 0:
            store.add("left", 1)
            return
        while store.add("left", 0) < launcher.world_size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)
