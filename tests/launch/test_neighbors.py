"""Copies of snapshots on the next node: whole or not there, and back on a node that has lost its own. Nodes are threads
of this process, each with a launcher's memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.core.segments import COPIED, RankSegments, Segment, SegmentReader
from manyhands.launch import neighbors
from manyhands.launch.neighbors import Keeper, NodeMemory, Peer, Sender, copying, fetch
from tests.launch.fake_nodes import on_all

WAIT_S = 60.0


def write(path: str, step: int, content: bytes) -> Segment:
    """As a rank does."""
    segment = Segment(path)
    if segment.slot_bytes < len(content):
        segment.make_room(len(content))
    slot = segment.oldest()
    segment.clear(slot)[: len(content)] = content
    segment.commit(slot, step, len(content))
    return segment


def contents(segments: RankSegments, rank: int) -> dict[int, bytes]:
    """Of a copy of the file: whoever has the file itself mapped is killed where it is made shorter meanwhile."""
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(Path(segments.paths[rank]).read_bytes())
        with contextlib.closing(Segment(file.name)) as segment:
            return {step: bytes(segment.read(slot)) for step, slot in segment.committed().items()}


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def memories() -> Iterator[list[NodeMemory]]:
    made = [NodeMemory() for _ in range(3)]
    for memory in made:
        memory.open(2, 2)
        if memory.own is None or memory.kept is None:
            pytest.skip("this system has no memfd")
    yield made
    for memory in made:
        memory.close()


@pytest.fixture
def pair(memories: list[NodeMemory]) -> Iterator[tuple[RankSegments, RankSegments, Peer]]:
    """Of two nodes: what the first one's ranks write, what the second keeps, and where that listens."""
    own, other, kept = memories[0].own, memories[1].own, memories[1].kept
    assert own is not None and other is not None and kept is not None
    keeper = Keeper(other, kept, "127.0.0.1")
    yield own, kept, Peer("127.0.0.1", keeper.port, keeper.token)
    keeper.close()


@contextlib.contextmanager
def sending(own: RankSegments, peer: Peer, said: list[str] | None = None) -> Iterator[Sender]:
    sender = Sender(own.reader(0), 0, peer, ([] if said is None else said).append)
    try:
        yield sender
    finally:
        sender.close()


def together(memories: list[NodeMemory], attempt: int, work: Callable[[int], Any], is_sharded: bool = True) -> Any:
    """One attempt on all nodes: what is said and the variables of each, once ``work(node)`` is done on all."""
    barrier, said = threading.Barrier(len(memories)), [[] for _ in memories]

    def run(channel: Any) -> dict[str, str]:
        channel.address = "127.0.0.1"
        group = SimpleNamespace(channel=channel, node=channel.node, num_nodes=len(memories), attempt=attempt)
        with copying(memories[channel.node], group, is_sharded, said[channel.node].append) as variables:
            work(channel.node)
            barrier.wait(WAIT_S)
        return dict(variables)

    return on_all(len(memories), run), said


def test_a_node_that_comes_back_empty_gets_what_it_had(memories: list[NodeMemory]) -> None:
    """Three nodes of two ranks; the second one's memory goes with it, and with it the copies of the first."""

    def content(node: int, rank: int, step: int) -> bytes:
        return f"{node} {rank} {step} ".encode() * 5000

    def take_steps(node: int) -> None:
        own = memories[node].own
        assert own is not None
        for step in (6, 7):
            for rank in range(2):
                segment = write(own.paths[rank], step, content(node, rank, step))
                wait_for(segment.is_copied)

    variables, said = together(memories, 1, take_steps)
    assert variables == [{COPIED: "1"}] * 3 and said == [[], [], []]
    memories[1].close()
    memories[1].open(2, 2)
    _, said = together(memories, 2, lambda node: None)
    assert said == [[], ["snapshots up to step 7 were fetched from another node's memory"], []]
    for node, memory in enumerate(memories):
        assert memory.own is not None
        for rank in range(2):
            assert contents(memory.own, rank) == {step: content(node, rank, step) for step in (6, 7)}
    assert memories[1].kept is not None
    wait_kept = memories[1].kept
    together(memories, 3, lambda node: wait_for(lambda: 7 in contents(wait_kept, 1)))  # the first one's, sent again


def test_where_memory_is_damaged_the_copy_takes_its_place(memories: list[NodeMemory]) -> None:
    memories.pop().close()
    own = memories[0].own
    assert own is not None

    def take_a_step(node: int) -> None:
        if node == 0:
            for rank in range(2):
                wait_for(write(own.paths[rank], 5, b"sound" * 999).is_copied)

    together(memories, 1, take_a_step)
    with contextlib.closing(Segment(own.paths[1])) as segment:
        segment.slots()[3:5] = b"!!"
    _, said = together(memories, 2, lambda node: None)
    assert said[0] == [
        "warning: snapshots in this machine's memory are damaged",
        "snapshots up to step 5 were fetched from another node's memory",
    ]
    assert contents(own, 1) == contents(own, 0) == {5: b"sound" * 999}


def test_replicas_are_not_copied_but_given_to_a_node_that_has_none(memories: list[NodeMemory]) -> None:
    own = [memory.own for memory in memories]
    assert own[0] is not None and own[1] is not None
    write(own[0].paths[0], 3, b"all of it")
    variables, said = together(memories, 1, lambda node: None, is_sharded=False)
    assert variables == [{}, {}, {}]
    assert contents(own[1], 0) == {3: b"all of it"} and contents(own[1], 1) == {}
    assert said[1] == said[2] == ["snapshots up to step 3 were fetched from another node's memory"] and not said[0]


def test_where_a_node_has_no_such_memory_nothing_is_copied(memories: list[NodeMemory]) -> None:
    memories[1].close()
    variables, said = together(memories, 1, lambda node: None)
    assert variables == [{}, {}, {}] and said == [[], [], []]


def test_a_copy_that_arrives_otherwise_does_not_count(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, kept, peer = pair
    read, num_read = SegmentReader.read_into, 0

    def flip(self: SegmentReader, memory: memoryview, *arguments: Any) -> int:
        """The bytes change on their way, after they were hashed, the first time."""
        nonlocal num_read
        num_read += 1
        return read(self, memory, *arguments)

    receive = neighbors.receive_into

    def receive_flipped(connection: Any, memory: memoryview) -> bytes:
        digest = receive(connection, memory)
        return bytes(32) if num_read == 1 and len(memory) > 1000 else digest

    monkeypatch.setattr(SegmentReader, "read_into", flip)
    monkeypatch.setattr(neighbors, "receive_into", receive_flipped)
    segment = write(own.paths[0], 4, b"x" * 2000)
    with sending(own, peer):
        wait_for(segment.is_copied)
    assert num_read > 1 and contents(kept, 0) == {4: b"x" * 2000}


def test_a_snapshot_that_is_written_over_while_it_is_read_does_not_count(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank even makes its file shorter and larger meanwhile, which would kill whoever had it mapped."""
    own, kept, peer = pair
    monkeypatch.setattr(neighbors, "CHUNK_BYTES", 1 << 16)
    segment, read, num_read = write(own.paths[0], 4, b"a" * 2**20), SegmentReader.read_into, 0

    def read_slowly(self: SegmentReader, memory: memoryview, of: Any, begin: int) -> int:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            segment.make_room(2**21)
        if num_read == 5:
            write(own.paths[0], 5, b"b" * 2**21)
        if num_read == 2:
            os.ftruncate(self._fd, 0)
        return read(self, memory, of, begin)

    monkeypatch.setattr(SegmentReader, "read_into", read_slowly)
    with sending(own, peer):
        wait_for(lambda: 5 in contents(kept, 0))
        wait_for(Segment(own.paths[0]).is_copied)
    assert contents(kept, 0) == {5: b"b" * 2**21}


def test_copies_of_steps_that_are_done_again_go(pair: Any) -> None:
    own, kept, peer = pair
    with sending(own, peer):
        for step in (6, 7):
            wait_for(write(own.paths[0], step, b"first" * step).is_copied)
        with contextlib.closing(Segment(own.paths[0])) as segment:
            for slot in (0, 1):
                segment.clear(slot).release()
        wait_for(write(own.paths[0], 6, b"again" * 6).is_copied)
    assert contents(kept, 0) == {6: b"again" * 6}


@pytest.mark.parametrize("why", ["memory", "gone"])
def test_a_next_node_that_cannot_take_copies_is_said_once_and_not_waited_for(
    pair: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, _, peer = pair
    said: list[str] = []
    monkeypatch.setattr(neighbors, "GRACE_S", 0.0)
    segment = write(own.paths[0], 4, b"x")
    if why == "memory":

        def none_left(*_: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(Segment, "make_room", none_left)
    else:
        peer = Peer(peer.host, 1, peer.token)
    with sending(own, peer, said):
        wait_for(segment.is_copied)
        monkeypatch.undo()
        segment.make_room(2**20)  # which forgets what was said of copies
        segment.clear(0).release()
        segment.commit(0, 5, 8)
        wait_for(segment.is_copied)
        wait_for(lambda: bool(said))
    assert len(said) == 1 and ("Cannot allocate memory" if why == "memory" else "refused") in said[0]


def test_a_stranger_gets_nothing(pair: Any) -> None:
    own, kept, peer = pair
    write(kept.paths[0], 4, b"secret")
    with contextlib.closing(Segment(own.paths[0])) as segment:
        with pytest.raises((EOFError, OSError)):
            fetch(Peer(peer.host, peer.port, "guessed"), "kept", 0, segment)
        assert segment.committed() == {}
        assert fetch(peer, "kept", 0, segment) == [4]
