"""Nodes as threads of this process, over channels on the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from manyhands.core.errors import UserError
from manyhands.launch.nodes.address import LOCAL_HOST, Address
from manyhands.launch.nodes.channel import Channel

LONG_S = 60.0


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Results, or errors as text, of what runs side by side."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except UserError as error:
            results[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return results


def on_all(num_nodes: int, work: Callable[[Channel], Any]) -> list[Any]:
    """``work(channel)`` of each node; an error as text."""
    infos = [{"node": node, "host": f"gpu{node}"} for node in range(num_nodes)]
    channels = [Channel(info["node"], num_nodes, info, silence_s=LONG_S, secret=b"-") for info in infos]
    port = channels[0].listen(Address(LOCAL_HOST, 0))

    def run(channel: Channel) -> Any:
        if channel.node:
            channel.connect(Address(LOCAL_HOST, port), LONG_S)
        channel.wait_for_all(LONG_S)
        try:
            return work(channel)
        except UserError as error:
            channel.fail(error)
            raise

    try:
        return at_once(*(lambda channel=channel: run(channel) for channel in channels))
    finally:
        for channel in channels:
            channel.close()
