"""Copies of snapshots on the next node: each launcher sends what its ranks have written to the launcher of the next
node, which keeps it in memory of its own, and gives it back to a node that has lost its own. Knows no torch.

The launchers do this, out of the segments that they hold (``core/segments.py``): a rank only leaves out a snapshot
while its last one is not copied yet, so two slots are enough and what all nodes have copied is whole at every moment.
One thread a rank; a copy travels with its SHA-256, and counts once the next node has compared it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.core.segments import COPIED, UNKNOWN, RankSegments, Segment, SegmentReader, StoredSnapshot
from manyhands.launch.nodes import Exchange, host_name

CHUNK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 12
POLL_S = 0.01  # a new snapshot is found after this time
LIMIT_S = 60.0  # that a connection may be silent
TOKEN_S = 10.0  # for who connects to show the token
MAX_STRANGERS = 64  # connections at a time that have not shown it; more are closed
GRACE_S = 30.0  # in which a launch ends that another node has ended


class Group(Protocol):
    """What is asked of ``launch.team.Team``."""

    channel: Any
    node: int
    num_nodes: int
    attempt: int


@dataclass(frozen=True)
class Peer:
    """Where a launcher's ``Keeper`` listens."""

    host: str
    port: int
    token: str


class Keeper:
    """Answers other launchers: takes copies into ``kept``, and gives them, or this node's ``own`` snapshots. Listens at
    the address ``host`` of this machine (None: at all of them). Who does not know the token is closed out in silence.
    """

    def __init__(self, own: RankSegments, kept: RankSegments, host: str | None) -> None:
        self._paths = {"own": own.paths, "kept": kept.paths}
        self.token = secrets.token_hex(16)
        both = host is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or (host is not None and ":" in host) else socket.AF_INET
        self._listener = socket.create_server((host or "", 0), family=family, dualstack_ipv6=both)
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._strangers: set[socket.socket] = set()
        self._lock, self._is_closed = threading.Lock(), False
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name="snapshot-copies", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    connection.close()
                    continue
                self._open.add(connection)
                self._strangers.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        until: float | None = time.monotonic() + TOKEN_S
        with (
            contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError, EOFError, RecursionError),
            connection,
        ):
            while True:
                request = receive_line(connection, until)
                if not secrets.compare_digest(str(request["token"]), self.token):
                    break
                until = None
                connection.settimeout(None)
                with self._lock:
                    self._strangers.discard(connection)
                with contextlib.closing(Segment(self._paths[request["of"]][request["rank"]])) as segment:
                    if request["do"] == "put":
                        _take(connection, segment, request)
                    else:
                        _give(connection, segment)
        with self._lock:
            self._open.discard(connection)
            self._strangers.discard(connection)

    def close(self) -> None:
        """Copies under way are broken off; what was whole stays."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


def _take(connection: socket.socket, segment: Segment, request: Mapping[str, Any]) -> None:
    """A copy, into the older slot. One of an earlier step than those that are kept is of a run that went back."""
    step, num_bytes = int(request["step"]), int(request["bytes"])
    try:
        if segment.slot_bytes < num_bytes:
            segment.make_room(int(request["slot_bytes"]))
    except OSError as error:
        send_line(connection, {"error": error.strerror or str(error)})
        return
    for later, slot in segment.committed().items():
        if later >= step:
            segment.clear(slot).release()
    slot = segment.oldest()
    memory = segment.clear(slot)[:num_bytes]
    send_line(connection, {})
    digest = receive_into(connection, memory)
    sent = receive_exactly(connection, len(UNKNOWN))
    if sent == digest:
        segment.commit(slot, step, num_bytes, digest)
    send_line(connection, {"is_whole": sent == digest})


def _give(connection: socket.socket, segment: Segment) -> None:
    """All that is whole there, the oldest first."""
    found = sorted(segment.committed().items())
    spans = [segment.read(slot) for _, slot in found]
    steps = [{"step": step, "bytes": len(span)} for (step, _), span in zip(found, spans, strict=True)]
    send_line(connection, {"slot_bytes": segment.slot_bytes, "steps": steps})
    for (_, slot), span in zip(found, spans, strict=True):
        digest = hashlib.sha256()
        for begin in range(0, len(span), CHUNK_BYTES):
            chunk = span[begin : begin + CHUNK_BYTES]
            digest.update(chunk)
            connection.sendall(chunk)
        known = segment.digest(slot)
        connection.sendall(digest.digest() if known == UNKNOWN else known)


class Sender:
    """Copies one rank's snapshots to ``peer``, each as soon as it is whole, until ``close``. Where that fails,
    ``report`` hears why, once, and the rank waits for no copies any more.
    """

    def __init__(self, reader: SegmentReader, rank: int, peer: Peer, report: Callable[[str], None]) -> None:
        self._reader, self._rank, self._peer, self._report = reader, rank, peer, report
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="snapshot-copies", daemon=True)
        reader.begin_copies()
        self._thread.start()

    def _run(self) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        try:
            with connect(self._peer) as self._connection:
                while not self._closing.is_set():
                    found = self._reader.newest()
                    if found is None or found.step == self._reader.last_copied():
                        self._closing.wait(POLL_S)
                        continue
                    digest = self._send(self._connection, found, buffer)
                    if digest is not None and self._reader.newest() == found:
                        self._reader.mark_copied(found, digest)
        except (OSError, EOFError, ValueError) as error:
            # The next node's launcher may only be the first to end this attempt.
            grace_s = GRACE_S if isinstance(error, (ConnectionError, EOFError)) else 0.0
            self._stop_waiting(grace_s)
            if not self._closing.is_set():
                self._report(str(error) or type(error).__name__)
        self._stop_waiting(math.inf)

    def _stop_waiting(self, for_s: float) -> None:
        """Has the rank wait for no copies, until ``close`` or so long; again and again: one that makes room for its
        snapshots forgets it.
        """
        end = time.monotonic() + for_s
        while time.monotonic() < end and not self._closing.wait(POLL_S):
            self._reader.end_copies()

    def _send(self, connection: socket.socket, found: StoredSnapshot, buffer: memoryview) -> bytes | None:
        """The digest of what the next node has now; None where the rank has gone on to write there."""
        request = {"do": "put", "of": "kept", "rank": self._rank, "token": self._peer.token}
        sizes = {"step": found.step, "bytes": found.num_bytes, "slot_bytes": found.slot_bytes}
        send_line(connection, request | sizes)
        if why := receive_line(connection).get("error"):
            raise OSError(0, f"the next node has no memory for them: {why}")
        digest, sent = hashlib.sha256(), 0
        while sent < found.num_bytes:
            count = self._reader.read_into(buffer, found, sent)
            if not count:  # the rank is making its segment anew: anything is sent, and does not count
                count = min(len(buffer), found.num_bytes - sent)
            digest.update(buffer[:count])
            connection.sendall(buffer[:count])
            sent += count
        is_same = self._reader.newest() == found
        connection.sendall(digest.digest() if is_same else UNKNOWN)
        return digest.digest() if receive_line(connection)["is_whole"] else None

    def close(self) -> None:
        self._closing.set()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)


def fetch(peer: Peer, of: str, rank: int, segment: Segment) -> list[int]:
    """Puts what ``peer`` has of a rank into ``segment``, beside what is there; returns the steps. OSError, EOFError or
    ValueError where it cannot be had.
    """
    fetched = []
    with connect(peer) as connection:
        send_line(connection, {"do": "get", "of": of, "rank": rank, "token": peer.token})
        found = receive_line(connection)
        if found["steps"] and segment.slot_bytes < found["slot_bytes"]:
            segment.make_room(found["slot_bytes"])
        for each in found["steps"]:
            known = segment.committed()
            slot = known.get(each["step"], segment.oldest())
            memory = segment.clear(slot)[: each["bytes"]]
            digest = receive_into(connection, memory)
            if receive_exactly(connection, len(UNKNOWN)) != digest:
                raise ValueError(f"the copy of step {each['step']} is damaged")
            segment.commit(slot, each["step"], each["bytes"], digest)
            fetched.append(each["step"])
    return fetched


# -- one attempt of a launch


class NodeMemory:
    """Segments of this node's ranks, and those in which it keeps copies, from one attempt of a launch to the next.
    ``own`` is None where the run keeps no snapshots or the system has no such memory, ``kept`` where there is one node.
    """

    def __init__(self) -> None:
        self.own: RankSegments | None = None
        self.kept: RankSegments | None = None

    def open(self, num_local: int, num_before: int) -> None:
        """For so many ranks here and on the node before; what is there already stays."""
        with contextlib.suppress(OSError, AttributeError):
            if self.own is None or len(self.own.paths) != num_local:
                self.own = _renew(self.own, num_local)
            if num_before and (self.kept is None or len(self.kept.paths) != num_before):
                self.kept = _renew(self.kept, num_before)

    def close(self) -> None:
        for segments in (self.own, self.kept):
            if segments is not None:
                segments.close()
        self.own = self.kept = None


def _renew(old: RankSegments | None, count: int) -> RankSegments:
    if old is not None:
        old.close()
    return RankSegments(count)


@contextlib.contextmanager
def copying(
    memory: NodeMemory, group: Group, is_sharded: bool, report: Callable[[str], None]
) -> Iterator[Mapping[str, str]]:
    """Within, snapshots of this node's ranks are copied to the next node; before, what this node has lost is fetched.
    Yields variables for the ranks. All nodes do this together. Where ranks are replicas, each node has all of it and
    nothing is copied.
    """
    channel: Exchange = group.channel
    own, kept = memory.own, memory.kept
    address = group.channel.address
    keeper = Keeper(own, kept, address) if own is not None and kept is not None else None
    try:
        mine = None
        if keeper is not None:
            mine = {"host": address or host_name(), "port": keeper.port, "token": keeper.token}
        found = channel.gather(f"snapshots {group.attempt}", mine)
        if own is None or None in found:  # a node has no such memory
            yield {}
            return
        peers = [Peer(**fields) for fields in found]
        others = [peers[(group.node + distance) % group.num_nodes] for distance in range(1, group.num_nodes)]
        restore(own, others, is_sharded, report)
        channel.gather(f"restored {group.attempt}", True)  # from here on copies are overwritten
        said = threading.Event()

        def fail(why: str) -> None:
            if not said.is_set():
                said.set()
                report(f"warning: snapshots are not copied to the next node any more: {why}")

        ranks = range(len(own.paths)) if is_sharded else ()
        with contextlib.ExitStack() as closing:
            for rank in ranks:
                closing.callback(Sender(own.reader(rank), rank, others[0], fail).close)
            yield {COPIED: "1"} if is_sharded else {}
    finally:
        if keeper is not None:
            keeper.close()


def restore(own: RankSegments, others: Sequence[Peer], is_sharded: bool, report: Callable[[str], None]) -> None:
    """Fetches what this node's ranks had, where their own memory has nothing or is damaged. ``others``: the next node
    first; it alone has copies of shards, and any has those of replicas.
    """

    def restore_rank(rank: int) -> tuple[list[int], list[int], str]:
        with contextlib.closing(Segment(own.paths[rank])) as segment:
            damaged, why = segment.clear_damaged(), ""
            if segment.committed() and not damaged:
                return [], [], ""
            for peer in others[:1] if is_sharded else others:
                try:
                    fetched = fetch(peer, "kept" if is_sharded else "own", rank, segment)
                except (OSError, EOFError, ValueError, KeyError) as error:
                    why = str(error) or type(error).__name__
                    continue
                if fetched:
                    return damaged, fetched, ""
            return damaged, [], why

    ranks = range(len(own.paths)) if is_sharded else range(1)
    with ThreadPoolExecutor(max(1, len(ranks))) as threads:
        found = list(threads.map(restore_rank, ranks))
    if any(damaged for damaged, *_ in found):
        report("warning: snapshots in this machine's memory are damaged")
    if steps := [step for _, fetched, _ in found for step in fetched]:
        report(f"snapshots up to step {max(steps)} were fetched from another node's memory")
    if whys := [why for *_, why in found if why]:
        report(f"note: no snapshots could be fetched from another node: {whys[0]}")


# -- the wire: lines of JSON, and bytes whose number they say


def connect(peer: Peer) -> socket.socket:
    connection = socket.create_connection((peer.host, peer.port), LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_line(connection: socket.socket, until: float | None = None) -> dict[str, Any]:
    """EOFError where it ended, TimeoutError where it is not there ``until`` then; ValueError where that is no line of
    ours.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError("line too long")
        if until is not None:
            connection.settimeout(max(1e-3, until - time.monotonic()))
        line += receive_exactly(connection, 1)
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    memory = memoryview(bytearray(num_bytes))
    receive_into(connection, memory)
    return bytes(memory)


def receive_into(connection: socket.socket, memory: memoryview) -> bytes:
    """Fills ``memory``; its SHA-256. EOFError where the connection ended before."""
    digest, done = hashlib.sha256(), 0
    while done < len(memory):
        count = connection.recv_into(memory[done : done + CHUNK_BYTES])
        if not count:
            raise EOFError("the connection has ended")
        digest.update(memory[done : done + count])
        done += count
    return digest.digest()
