"""Addresses of nodes: ``HOST:PORT``, connections to it, and the interface by which another machine is reached. Knows no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ASK_S = 3.0
RETRY_S = 0.2  # between two attempts to reach node 0
MAX_HELLO_BYTES = 1 << 20  # from whom nothing is known yet
MAX_LINE_BYTES = 64 << 20
_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's address


@dataclass(frozen=True)
class Address:
    """``HOST:PORT`` of node 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, where: str) -> Address:
        """UserError where it is not a host and a port."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(
                f"{text!r} is not HOST:PORT",
                where=where,
                fix="give a name or an address of node 0 that the other nodes can reach, and a free port: gpu01:29400",
            )
        return Address(host, int(port))


@dataclass
class Link:
    """A connection. ``node`` is None before its hello."""

    socket: socket.socket
    node: int | None = None
    silent_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def add(self, message: Mapping[str, Any]) -> None:
        self.unsent += json.dumps(message).encode() + b"\n"

    def send(self) -> None:
        """As much as the connection takes now. OSError where it is broken."""
        with contextlib.suppress(BlockingIOError):
            del self.unsent[: self.socket.send(bytes(self.unsent[: 1 << 20]))]

    def lines(self) -> list[bytes]:
        """Complete lines; ValueError where one is too long."""
        *lines, rest = self.received.split(b"\n")
        if len(rest) > (MAX_HELLO_BYTES if self.node is None else MAX_LINE_BYTES):
            raise ValueError("line too long")
        self.received = bytearray(rest)
        return [bytes(line) for line in lines]


def open_listener(address: Address, backlog: int) -> socket.socket:
    """Listening at the address where that is this machine's and others can reach it, else at all of the machine's.
    UserError where the port is in use or the name cannot be resolved.
    """
    try:
        family, _, _, _, bound = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        host = str(bound[0])
        # A machine's own name often is a loopback address, and a service's address is nobody's.
        if host.startswith("127.") or host == "::1" or not is_local(host, family):
            host = ""
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, address.port))
        listener.listen(backlog)
        return listener
    except OSError as error:
        raise UserError(
            f"node 0 cannot listen on {address}",
            where=f"--rendezvous {address}",
            why=error.strerror or str(error),
            fix="give an address of node 0 and a port that is free there, the same on every node",
        ) from error


def open_connection(address: Address, greeting: Mapping[str, Any], timeout_s: float) -> socket.socket:
    """A connection whose other end has answered the greeting; what it has said is still to be read. Tried again until
    ``timeout_s`` have passed; then the last OSError.

    Who ends the connection without a word is no node 0: another program that had the port before it, or a proxy that
    takes connections for a machine that is still starting.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), timeout=max(1.0, timeout_s / 10))
            try:
                _greet(connection, greeting, deadline)
            except BaseException:
                connection.close()
                raise
        except OSError:
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)
            continue
        set_options(connection)
        return connection


def _greet(connection: socket.socket, greeting: Mapping[str, Any], deadline: float) -> None:
    if connection.getsockname() == connection.getpeername():  # where nobody listens, a port of one's own may be met
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
    try:
        is_answered = connection.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "a program listens there that does not answer as node 0 does") from None
    except ConnectionError:
        is_answered = False
    if not is_answered:
        why = "a program listens there that ends the connection, as no node 0 does"
        raise ConnectionResetError(errno.ECONNRESET, why)


def set_options(connection: socket.socket) -> None:
    """Of the channel's connections: nothing blocks, and a line is sent at once."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_own(address: Address) -> bool:
    """Whether the address is this machine's."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return False
    return is_local(str(found[0]), family)


def ask(address: Address, message: Mapping[str, Any]) -> dict[str, Any]:
    """The first line that is answered there within ``ASK_S``; ``{}`` if none is."""
    try:
        with socket.create_connection((address.host, address.port), timeout=ASK_S) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_HELLO_BYTES))
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def is_local(host: str, family: int) -> bool:
    """Whether the address is one of this machine's."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def address_towards(host: str, port: int) -> str | None:
    """The address with which this machine reaches ``host``; None where there is no route. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address, such as ``eth0``; None where none has, or it is the
    loopback's: others cannot reach that.
    """
    import fcntl

    if address.startswith("127.") or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def address_among(others: Sequence[str | None]) -> str | None:
    """The address with which this machine reaches the first of these that is known."""
    return next((address_towards(other, 1) for other in others if other), None)


def own_address(host: str, port: int) -> str | None:
    """This machine's address among the nodes, where node 0 is at ``host``; None if it is the loopback's.

    On node 0 itself the route to its own name may be the loopback: then the address that the name has for others.
    """
    found = address_towards(host, port)
    return None if found is None or found in LOOPBACK or found.startswith("127.") else found
