"""What the first ranks of several nodes exchange over torch's store, where one of them ends."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from manyhands.core.errors import UserError
from manyhands.worker.nodes import FAILED, NodeMap, StoreExchange

NODES = NodeMap(node=0, names=("gpu0", "gpu1"), ranks=((0,), (1,)), addresses=(None, None))


class EndedStore(dist.HashStore):
    """Its server, rank 0, has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


def test_an_ended_rank_0_is_named():
    with pytest.raises(UserError, match="rank 0 ended") as caught:
        StoreExchange(EndedStore(), NODES).gather("hello", 1)
    assert caught.value.why == "Connection reset by peer"


def test_a_bug_on_one_node_ends_the_others():
    exchange = StoreExchange(dist.HashStore(), NODES)
    with pytest.raises(KeyError), exchange.failing_together():
        {}["no such key"]
    assert "unexpected error on gpu0: KeyError" in json.loads(exchange.store.get(FAILED))["what"]
