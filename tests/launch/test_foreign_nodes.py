"""Nodes under another launcher, which come together over torch's store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from manyhands.core.errors import UserError
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import Launcher
from manyhands.worker import nodes as nodes_module
from manyhands.worker.nodes import NodeMap, broadcast_from_rank0, find_group_over_store
from tests.launch.builders import make_config
from tests.launch.channels import LONG_S, at_once


class EndedStore(dist.HashStore):
    """Its server, rank 0, has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


def test_an_ended_rank_0_is_named() -> None:
    with pytest.raises(UserError, match="rank 0 ended") as caught:
        broadcast_from_rank0(EndedStore(), 1, "run", lambda: "", LONG_S)
    assert caught.value.why == "Connection reset by peer"


def find_groups(*loads: Any) -> list[Any]:
    """What the first rank of each node finds, or its error as text."""
    store, names, ranks = (
        dist.HashStore(),
        tuple(f"gpu{node}" for node in range(len(loads))),
        tuple((node,) for node in range(len(loads))),
    )

    def find(node: int) -> Any:
        launcher = Launcher("torchrun", node, 0, len(loads), 1, "127.0.0.1")
        nodes = NodeMap(node, names, ranks, (None,) * len(loads))
        options: dict[str, Any] = {"fresh": False, "report": print, "timeout_s": LONG_S}
        return find_group_over_store(store, launcher, nodes, loads[node], **options)

    return at_once(*(lambda node=node: find(node) for node in range(len(loads))))


def test_nodes_exchange_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_group(channel: Any, config: Any, hosts: Any, num_ranks: Any, *_: Any, **__: Any) -> Any:
        found = channel.gather("x", channel.node)
        return config, SimpleNamespace(places={}, found=found, hosts=[host.name for host in hosts], ranks=num_ranks)

    monkeypatch.setattr(nodes_module, "find_group", find_group)
    groups = [group for _, group in find_groups(*[lambda: LoadedRun(make_config())] * 3)]
    assert [(group.found, group.hosts, group.ranks) for group in groups] == [
        ([0, 1, 2], ["gpu0", "gpu1", "gpu2"], (1, 1, 1))
    ] * 3


def test_another_run_on_one_node_is_named_on_each() -> None:
    texts = find_groups(lambda: LoadedRun(make_config()), lambda: LoadedRun(make_config(seed=7)))
    assert texts[0] == texts[1] and "came with another run than node 0 (gpu0)" in texts[0]


@pytest.mark.parametrize("node", [0, 1])
def test_a_failure_on_one_node_ends_the_others(node: int) -> None:
    def fail() -> Any:
        raise UserError("no run file")

    loads = [lambda: LoadedRun(make_config()), lambda: LoadedRun(make_config())]
    texts = find_groups(*loads[:node], fail, *loads[node + 1 :])
    assert texts[0] == texts[1] and "error: no run file" in texts[0] and f"on gpu{node}" in texts[0]
