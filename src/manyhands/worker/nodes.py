"""Before there is a process group, over the store: what rank 0 makes and every rank gets; and of several nodes under
another launcher (torchrun, accelerate, srun), which ranks share a machine, and what the first rank of each finds out
with those of the others, before rank 0 plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from manyhands.core.errors import EXIT_FAILED, PeerError, UserError
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import HostFacts
from manyhands.importers.load import LoadedRun
from manyhands.launch.address import LOCAL_HOST, address_among, network_environment, own_address
from manyhands.launch.environment import Launcher, apply_variables
from manyhands.launch.heartbeat import this_host
from manyhands.launch.nodes import NodeGroup, check_hellos, clean_name, explain_lost, host_name, say_hello
from manyhands.launch.preflight import explain_unexpected, find_group, named

ALIVE_S = 2.0
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
) -> tuple[LoadedRun, NodeGroup | None]:
    """On the first rank of each node: the run, and all nodes with this one's samples; None where the run is finished.

    UserError, the same on each, where one of them cannot take part.
    """
    exchange = StoreExchange(store, nodes)
    with exchange.failing_together():
        loaded = load()
        config, _ = apply_variables(loaded.config)
        exchange.silence_s = config.parallel.timeout_s
        host = read_host_facts().model_copy(update={"name": nodes.names[nodes.node]})
        hello = say_hello(config, nodes.node, nodes.num_nodes, host, nodes.addresses[nodes.node])
        with exchange.staying_alive(launcher):
            hellos = exchange.gather("hello", hello)
            check_hellos(hellos)
            hosts = tuple(HostFacts.model_validate(fields["facts"]) for fields in hellos)
            num_ranks = tuple(len(ranks) for ranks in nodes.ranks)
            config, group = find_group(exchange, config, hosts, num_ranks, nodes.addresses, fresh=fresh, report=report)
    store.set(f"places/{nodes.node}", json.dumps(group.places if group is not None else {}))
    return replace(loaded, config=config), group


class StoreExchange:
    """``launch.nodes.Exchange`` over torch's store, between the first ranks of the nodes."""

    def __init__(self, store: dist.Store, nodes: NodeMap, silence_s: float = 600.0) -> None:
        self.store, self.nodes, self.silence_s = store, nodes, silence_s
        self.node, self.num_nodes = nodes.node, nodes.num_nodes

    @property
    def names(self) -> list[str]:
        return list(self.nodes.names)

    def gather(self, key: str, value: Any) -> list[Any]:
        with served_by_first_rank():
            self.store.set(f"nodes/{key}/{self.node}", json.dumps(value))
            return [self._wait_for(key, node) for node in range(self.num_nodes)]

    def fail(self, error: UserError) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.store.set(FAILED, error.to_json())

    def _wait_for(self, key: str, node: int) -> Any:
        """UserError where another node has failed, or this one is not heard any more."""
        alive, changed = "", time.monotonic()
        while not self.store.check([f"nodes/{key}/{node}"]):
            raise_failure(self.store)
            now = self.store.get(f"alive/{node}").decode() if self.store.check([f"alive/{node}"]) else ""
            if now != alive:
                alive, changed = now, time.monotonic()
            if time.monotonic() - changed > self.silence_s:
                lost, here = (f"node {number} ({self.names[number]})" for number in (node, self.node))
                raise explain_lost(lost, here, f"nothing was heard from it for {self.silence_s:g} s")
            time.sleep(POLL_S)
        return json.loads(self.store.get(f"nodes/{key}/{node}"))

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Within, an error of this node is everyone's."""
        try:
            yield
        except UserError as error:
            if not isinstance(error, OthersFailed):
                self.fail(named(error, self.names[self.node]))
            raise
        except Exception as error:
            self.fail(explain_unexpected(error, self.names[self.node]))
            raise

    @contextlib.contextmanager
    def staying_alive(self, launcher: Launcher) -> Iterator[None]:
        """Within, a thread counts, by a connection of its own: preparing data may take hours, and the store does not
        say who has died.
        """
        done = threading.Event()

        def count() -> None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                store = self.store
                if launcher.world_size > 1 and isinstance(store, dist.PrefixStore):
                    store = _own_connection(store)
                while not done.wait(ALIVE_S):
                    store.add(f"alive/{self.node}", 1)

        thread = threading.Thread(target=count, name="alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()


def _own_connection(store: dist.PrefixStore) -> dist.Store:
    """The same keys by another connection: a call that waits holds the one that it uses."""
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, dist.DistError, RuntimeError):
        return store


class OthersFailed(UserError):
    """Another node's error, which it shows itself; shown here too, as this terminal is another one."""


def raise_failure(store: dist.Store) -> None:
    """What another node has failed with, if any has."""
    if store.check([FAILED]):
        fields = json.loads(store.get(FAILED))
        raise OthersFailed(fields.pop("what"), **fields)


def refuse_second_claim(store: dist.Store, rank: int, mine: str) -> None:
    """UserError, on all ranks, where two processes come as the same rank."""
    said = store.compare_set(f"here/{rank}", "", mine).decode()
    if said == mine:
        return
    first, second = json.loads(said), json.loads(mine)
    error = UserError(
        f"rank {rank} came twice: process {first['pid']} on {first['host']} and process {second['pid']}"
        f" on {second['host']}",
        why="two machines were started with the same node rank, or the run was started twice",
        fix="give each machine a node rank of its own, and start the run once on each",
        exit_code=EXIT_FAILED,
    )
    store.set(FAILED, error.to_json())
    raise error


def from_first_rank(store: dist.Store, rank: int, key: str, make: Callable[[], str], timeout_s: float) -> str:
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
    while not is_there(store, key):
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


def is_there(store: dist.Store, key: str) -> bool:
    """UserError where rank 0, which serves the store, has ended."""
    with served_by_first_rank():
        return store.check([key])


@contextlib.contextmanager
def served_by_first_rank() -> Iterator[None]:
    """Within, an error of the store is a UserError: rank 0, which serves it, has ended."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            "rank 0 ended before it had a plan for all",
            why=str(error).splitlines()[0],
            fix="read rank 0's output; the machine it runs on may have run out of memory",
            exit_code=EXIT_FAILED,
        ) from error


def leave_together(store: dist.Store, launcher: Launcher, timeout_s: float) -> None:
    """For an end before the process group forms: rank 0, which may serve the store, stays until the others have had its
    answer.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(
        dist.DistError, RuntimeError
    ):  # the store has ended, and with it all that is to be waited for
        if launcher.rank != 0:
            store.add("left", 1)
            return
        while store.add("left", 0) < launcher.world_size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)
