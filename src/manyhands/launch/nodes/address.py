"""Addresses of nodes: ``HOST:PORT``, connections, and the interface that reaches another machine; and the secret of a
run, which both sides of a connection prove to know without saying it. Each chooses a nonce, so that a proof which was
overheard is none on another connection. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError

LOCAL_HOST = "127.0.0.1"
LOOPBACK = ("localhost", LOCAL_HOST, "::1")
QUERY_S = 3.0
RETRY_S = 0.2  # between two attempts to reach node 0
REFUSED_S = 5.0  # of refusals until who comes is told what they may mean
MAX_KNOCK_BYTES = 1 << 10  # from whom nothing is known yet
MAX_HELLO_BYTES = 1 << 20  # from who knows the secret
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
    """A connection. ``node`` is None before its hello; ``nonces`` of both sides, once the secret is proven."""

    socket: socket.socket
    node: int | None = None
    nonces: tuple[str, str] | None = None
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
        limit = MAX_LINE_BYTES if self.node is not None else MAX_HELLO_BYTES if self.nonces else MAX_KNOCK_BYTES
        if max(map(len, (*lines, rest))) > limit:
            raise ValueError("line too long")
        self.received = bytearray(rest)
        return [bytes(line) for line in lines]


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def open_listener(address: Address, backlog: int) -> socket.socket:
    """Listening at the address where that is this machine's, else at all of the machine's: a machine's own name often
    is a loopback address for itself, and a service's address is nobody's. UserError where the port is in use or the
    name cannot be resolved.
    """
    try:
        family, _, _, _, bound = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        host = str(bound[0])
        if (is_loopback(host) and not is_loopback(address.host)) or not is_local(host, family):
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


def open_connection(
    address: Address,
    greeting: Mapping[str, Any],
    secret: bytes,
    timeout_s: float,
    report: Callable[[str], object] = lambda line: None,
) -> socket.socket:
    """A connection whose other end knows the secret and has answered the greeting; what it has said is still to be
    read. Tried again until ``timeout_s`` have passed; then the last OSError.

    Who ends the connection without a word is no node 0: another program that had the port before it, or a proxy that
    takes connections for a machine that is still starting; or a node 0 that has another secret. ``report`` hears of
    that once.
    """
    begin, is_reported = time.monotonic(), False
    deadline = begin + timeout_s
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), timeout=max(1.0, timeout_s / 10))
            try:
                _greet(connection, greeting, secret, deadline)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise
            if isinstance(error, ConnectionResetError) and not is_reported and time.monotonic() - begin > REFUSED_S:
                is_reported = True
                report(f"note: at {address}, {error.strerror}; trying on")
            time.sleep(RETRY_S)
            continue
        set_options(connection)
        return connection


def _greet(connection: socket.socket, greeting: Mapping[str, Any], secret: bytes, deadline: float) -> None:
    if connection.getsockname() == connection.getpeername():  # where nobody listens, a port of one's own may be met
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    try:
        nonces = knock(connection, secret, deadline)
        proven = {**greeting, "proof": prove(secret, "hello", *nonces)}
        connection.sendall(json.dumps(proven).encode() + b"\n")
        connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
        if connection.recv(1, socket.MSG_PEEK):
            return
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "a program listens there that does not answer as node 0 does") from None
    except (ConnectionError, ValueError, KeyError, TypeError, RecursionError):
        pass
    why = "a program listens there that ends the connection: no node 0 yet, or one that has another secret"
    raise ConnectionResetError(errno.ECONNRESET, f"{why} (output.dir is not shared, or {SECRET} differs)")


def knock(connection: socket.socket, secret: bytes, deadline: float) -> tuple[str, str]:
    """The first lines of a connection, by which each side proves to the other that it knows the secret; the nonces of
    both. Some OSError, ValueError, KeyError or TypeError where the other end does not.
    """
    mine = new_nonce()
    connection.sendall(
        json.dumps({"kind": "knock", "nonce": mine, "proof": prove(secret, "knock", mine)}).encode() + b"\n"
    )
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
        data = connection.recv(MAX_KNOCK_BYTES)
        line += data
        if not data or len(line) > MAX_KNOCK_BYTES or time.monotonic() > deadline + RETRY_S:
            raise ConnectionResetError(errno.ECONNRESET, "no answer")
    its = json.loads(line)
    if not is_proof(its["proof"], secret, "open", mine, its["nonce"]):
        raise ValueError("not the secret")
    return mine, its["nonce"]


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


def query(address: Address, message: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """The first line that is answered there within ``QUERY_S``, by who knows the secret; ``{}`` if none is."""
    try:
        with open_connection(address, message, secret, QUERY_S) as connection:
            connection.settimeout(QUERY_S)
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_HELLO_BYTES))
    except (OSError, ValueError, RecursionError):
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
    """The name of the interface that has this IPv4 address, such as ``eth0`` or ``lo``; None where none has."""
    import fcntl

    if ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def network_environment(address: str | None) -> dict[str, str]:
    """Variables by which gloo and NCCL listen and connect at this address of the machine alone: by themselves gloo
    takes the one that the machine's own name resolves to, often the loopback, and NCCL any that is up. Empty where no
    interface has it.
    """
    interface = interface_of(address) if address else None
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def address_among(others: Sequence[str | None]) -> str | None:
    """The address with which this machine reaches the first of these that is known."""
    return next((address_towards(other, 1) for other in others if other), None)


def own_address(host: str, port: int) -> str | None:
    """This machine's address among the nodes, where node 0 is at ``host``; None if it is the loopback's.

    On node 0 itself the route to its own name may be the loopback: then the address that the name has for others.
    """
    found = address_towards(host, port)
    return None if found is None or is_loopback(found) else found


SECRET, SECRET_FILE = "MANYHANDS_SECRET", "MANYHANDS_SECRET_FILE"  # a text; a path
SHARED_FILE = ".manyhands-secret"  # in output.dir, which all nodes share
SEEN_S = 10.0  # until what another machine has written is seen on this one
_NUM_BYTES = 32


def read_secret(output: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """What ``MANYHANDS_SECRET`` is, or the file that ``MANYHANDS_SECRET_FILE`` names; else a random one in the folder
    ``output``, made by the first node that looks for it and readable by its owner alone. UserError where it cannot be
    had.
    """
    if text := environ.get(SECRET, "").strip():
        return text.encode()
    path = Path(environ[SECRET_FILE]) if environ.get(SECRET_FILE) else None
    try:
        text = (path.read_text(encoding="utf-8") if path is not None else _read_shared(output / SHARED_FILE)).strip()
    except (OSError, ValueError) as error:
        raise UserError(
            "the secret that the nodes share cannot be read",
            where=f"environment: {SECRET_FILE}={path}" if path is not None else str(output / SHARED_FILE),
            why=getattr(error, "strerror", None) or str(error),
            fix=f"correct that file, or set the same {SECRET} on every machine",
        ) from error
    if not text:
        raise UserError(
            "the file of the secret that the nodes share is empty",
            where=str(path or output / SHARED_FILE),
            fix=f"remove it, or set the same {SECRET} on every machine",
        )
    return text.encode()


def _read_shared(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # NFS may show a file of another machine late, or empty at first
        deadline = time.monotonic() + SEEN_S
        while not (text := path.read_text(encoding="ascii")).endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.1)
        return text
    with open(descriptor, "w", encoding="ascii") as file:
        text = secrets.token_hex(_NUM_BYTES) + "\n"
        file.write(text)
    return text


def new_nonce() -> str:
    return secrets.token_hex(_NUM_BYTES)


def prove(secret: bytes, *said: str) -> str:
    """What only who knows the secret can say of these texts: HMAC-SHA-256 (RFC 2104)."""
    return hmac.new(secret, "\n".join(said).encode(), hashlib.sha256).hexdigest()


def is_proof(proof: object, secret: bytes, *said: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), prove(secret, *said).encode())
