"""How fast the nodes reach each other: by InfiniBand's or RoCE's adapters as their driver says, else measured over TCP
in a few seconds, each direction alone. Knows no torch.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.facts.types import Figure
from manyhands.launch.address import address_among
from manyhands.launch.nodes import Exchange

FIRST_BYTES, MORE_BYTES = 2 << 20, 64 << 20  # what a slow link gets, and a fast one beside
ENOUGH_S = 0.2  # a first part that took longer tells enough
LIMIT_S = 20.0  # for one pair, both directions
ALL_PAIRS = 8  # nodes; of more, each is measured with the next one alone
SLOW = 0.5  # of the others' speed: named
MAX_STRANGERS = 64  # connections at a time that have not shown the key; the oldest makes room

_CHUNK = bytes(1 << 20)
_KEY_BYTES = 16
Report = Callable[[str], Any]


def measure_links(
    exchange: Exchange, addresses: Sequence[str | None], report: Report, root: Path = Path("/")
) -> Figure | None:
    """GB/s from one node to another, of the slowest pair; called on all nodes. None where no address is known.

    UserError, on all of them, where one cannot open a connection to another: gloo and NCCL could not either.
    """
    adapters = exchange.gather("adapters", adapter_gb_s(root))
    if all(adapters):
        return Figure(value=min(adapters), source="driver: InfiniBand or RoCE adapters")
    own = addresses[exchange.node] or address_among(addresses)
    known = [address for address in exchange.gather("addresses", own) if address]
    if len(known) < exchange.num_nodes:
        return None
    found = _measure(exchange, known)
    speeds = {(a, b): speed for row in found for a, b, speed in row}
    if not speeds:
        return None
    (a, b), slowest = min(speeds.items(), key=lambda item: item[1])
    names, usual = exchange.names, statistics.median(speeds.values())
    if slowest < SLOW * usual and exchange.node == 0:
        report(
            f"note: {names[a]} sends to {names[b]} at {_format(slowest)}, the others at {_format(usual)}: "
            "every step waits for it"
        )
    return Figure(value=float(f"{slowest / 1e9:.3g}"), source=f"measured over TCP, {names[a]} to {names[b]}")


def adapter_gb_s(root: Path = Path("/")) -> float:
    """GB/s of all active InfiniBand and RoCE ports of this machine together; 0 where there are none."""
    total = 0.0
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state, rate = (port / "state").read_text(), re.match(r"[\d.]+", (port / "rate").read_text())
            if "ACTIVE" in state and rate:
                total += float(rate[0]) / 8
    return total


def rounds_of(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs: all pairs, each once; of many nodes only neighbors."""
    if num_nodes > ALL_PAIRS:
        even = [(node, node + 1) for node in range(0, num_nodes - 1, 2)]
        return [even, [(node, node + 1) for node in range(1, num_nodes - 1, 2)]]
    nodes: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    rounds = []
    for _ in range(len(nodes) - 1):
        half = len(nodes) // 2
        pairs = zip(nodes[:half], reversed(nodes[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        nodes = [nodes[0], nodes[-1], *nodes[1:-1]]
    return rounds


def _measure(exchange: Exchange, addresses: Sequence[str]) -> list[list[tuple[int, int, float]]]:
    """By node: (from, to, bytes/s) of the pairs that it has measured."""
    family = socket.AF_INET6 if ":" in addresses[exchange.node] else socket.AF_INET
    speeds: list[tuple[int, int, float]] = []
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((addresses[exchange.node], 0))
        listener.listen(2)
        listener.settimeout(LIMIT_S)
        key = secrets.token_bytes(_KEY_BYTES)  # others that find the port are no node
        found = exchange.gather("link ports", [listener.getsockname()[1], key.hex()])
        for number, pairs in enumerate(rounds_of(exchange.num_nodes)):
            pair = next((pair for pair in pairs if exchange.node in pair), None)
            trouble = None
            try:
                if pair is not None and pair[0] == exchange.node:
                    port, its_key = found[pair[1]]
                    speeds += _measure_with(pair, addresses[pair[1]], port, bytes.fromhex(its_key))
                elif pair is not None:
                    _answer_one(listener, key)
            except OSError as error:
                trouble = [*(pair or ()), str(error.strerror or error)]
            failed = next((each for each in exchange.gather(f"link {number}", trouble) if each), None)
            if failed:
                raise _unreachable(exchange, addresses, failed)
    return exchange.gather("links", speeds)


def _measure_with(pair: tuple[int, int], address: str, port: int, key: bytes) -> list[tuple[int, int, float]]:
    until = time.monotonic() + LIMIT_S
    with socket.create_connection((address, port), timeout=LIMIT_S) as connection:
        connection.sendall(key)
        there, size = 0.0, FIRST_BYTES
        for size in (FIRST_BYTES, MORE_BYTES):
            there = _send(connection, size, until)
            if there > ENOUGH_S:
                break
        speed = size / there
        connection.sendall((0).to_bytes(8, "big") + size.to_bytes(8, "big"))
        begin = time.monotonic()
        _receive(connection, size, until)
        return [(*pair, speed), (pair[1], pair[0], size / max(1e-6, time.monotonic() - begin))]


def _send(connection: socket.socket, size: int, until: float) -> float:
    """Seconds until the other side has all of it."""
    begin = time.monotonic()
    connection.sendall(size.to_bytes(8, "big"))
    _send_part(connection, size, until)
    _receive(connection, 1, until)
    return max(1e-6, time.monotonic() - begin)


def _send_part(connection: socket.socket, size: int, until: float) -> None:
    for start in range(0, size, len(_CHUNK)):
        connection.settimeout(_left(until))
        connection.sendall(_CHUNK[: size - start])


def _answer_one(listener: socket.socket, key: bytes) -> None:
    """The other side of ``_measure_with``, for the first that has the key. Others are heard at the same time: one that
    is slow with it keeps nobody waiting.
    """
    until = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        said: dict[socket.socket, bytes] = {}
        while True:
            for ready, _ in selector.select(_left(until)):
                if ready.fileobj is listener:
                    connection, _ = listener.accept()
                    said[opened.enter_context(connection)] = b""
                    selector.register(connection, selectors.EVENT_READ)
                    for stranger in list(said)[: len(said) - MAX_STRANGERS]:
                        _forget(selector, said, stranger)
                    continue
                visitor = cast(socket.socket, ready.fileobj)
                if visitor not in said:
                    continue
                try:
                    data = visitor.recv(len(key) - len(said[visitor]))
                except OSError:
                    data = b""
                said[visitor] += data
                if secrets.compare_digest(said[visitor], key):
                    return _answer(visitor, until)
                if not data or len(said[visitor]) == len(key):
                    _forget(selector, said, visitor)


def _forget(selector: selectors.BaseSelector, said: dict[socket.socket, bytes], stranger: socket.socket) -> None:
    selector.unregister(stranger)
    del said[stranger]
    stranger.close()


def _answer(connection: socket.socket, until: float) -> None:
    """Takes what comes, confirms it, and at last sends as much as is asked."""
    while size := int.from_bytes(_receive(connection, 8, until), "big"):
        _receive(connection, size, until)
        connection.sendall(b"1")
    size = int.from_bytes(_receive(connection, 8, until), "big")
    _send_part(connection, min(size, MORE_BYTES), until)


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    """The last bytes of ``size`` that come, ``_KEY_BYTES`` at most."""
    last, left = b"", size
    while left:
        connection.settimeout(_left(until))
        data = connection.recv(min(left, len(_CHUNK)))
        if not data:
            raise OSError("the connection ended")
        left -= len(data)
        last = (last + data)[-_KEY_BYTES:]
    return last


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"slower than {FIRST_BYTES >> 20} MiB each way in {LIMIT_S:g} s, or nothing arrives")
    return left


def _unreachable(exchange: Exchange, addresses: Sequence[str], failed: Sequence[Any]) -> UserError:
    a, b, why = failed
    names = exchange.names
    return UserError(
        f"{names[a]} cannot exchange data with {names[b]}",
        where=f"{addresses[a]} and {addresses[b]}, a free port",
        why=why,
        fix="open all TCP ports between the nodes: gloo and NCCL connect on ports of their own choice",
        exit_code=EXIT_FAILED,
    )


def _format(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
