"""Nodes as threads of this process, which do what nodes do together (``launch.nodes.Exchange``)."""

from __future__ import annotations

import threading
from typing import Any

from manyhands.core.errors import UserError


class Node:
    """One node's end of a fake channel; ``run`` calls the same function on all nodes, side by side."""

    def __init__(self, node: int, num_nodes: int, board: dict[str, list[Any]], barrier: threading.Barrier) -> None:
        self.node, self.num_nodes, self.board, self.barrier = node, num_nodes, board, barrier

    @property
    def names(self) -> list[str]:
        return [f"gpu{node}" for node in range(self.num_nodes)]

    def gather(self, key: str, value: Any) -> list[Any]:
        self.board.setdefault(key, [None] * self.num_nodes)[self.node] = value
        try:
            self.barrier.wait(30)
        except threading.BrokenBarrierError:
            if None in self.board[key]:
                raise
        return list(self.board[key])

    def fail(self, error: UserError) -> None:
        self.barrier.abort()


def on_all(num_nodes: int, work: Any) -> list[Any]:
    """``work(node)`` of each node; an error as text."""
    board: dict[str, list[Any]] = {}
    barrier, results = threading.Barrier(num_nodes), [None] * num_nodes

    def run(node: Node) -> None:
        try:
            results[node.node] = work(node)
        except UserError as error:
            results[node.node] = str(error)
            node.fail(error)
        except threading.BrokenBarrierError:
            results[node.node] = "ended by another"

    threads = [threading.Thread(target=run, args=(Node(n, num_nodes, board, barrier),)) for n in range(num_nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
