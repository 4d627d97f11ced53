"""Links between nodes: measured on the loopback, one of them slowed; adapters as the driver lists them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from pathlib import Path

import pytest

from manyhands.facts.types import Figure
from manyhands.launch import links
from tests.launch.fake_nodes import on_all

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "MORE_BYTES", 4 << 20)


def measure(num_nodes: int, root: Path) -> tuple[list[Figure | str | None], list[str]]:
    said: list[str] = []
    addresses = [LOOPBACK] * num_nodes
    return on_all(num_nodes, lambda node: links.measure_links(node, addresses, said.append, root)), said


@pytest.mark.parametrize("num_nodes", [2, 3, 7])
def test_all_nodes_learn_the_same_speed(num_nodes: int, tmp_path: Path):
    found, _ = measure(num_nodes, tmp_path)
    assert len(set(map(str, found))) == 1 and found[0] is not None
    assert found[0].value > 0 and found[0].source.startswith("measured over TCP, gpu")


def test_the_slow_pair_is_named_with_its_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measured(pair, address, port, key):
        there, back = measure_with(pair, address, port, key)
        return [(*there[:2], 1e6 if pair == (1, 2) else 1e9), (*back[:2], 1e9)]

    measure_with = links._measure_with
    monkeypatch.setattr(links, "_measure_with", measured)
    found, said = measure(3, tmp_path)
    assert found == [Figure(value=0.001, source="measured over TCP, gpu1 to gpu2")] * 3
    assert len(said) == 1 and "note: gpu1 sends to gpu2 at 1.0 MB/s, the others at 1.00 GB/s" in said[0]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"", b"half a key"])
def test_strangers_that_find_the_port_are_neither_measured_nor_waited_for(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def knock_before(pair, address, port, key):
        with contextlib.ExitStack() as visitors:
            for _ in range(20):  # longer than LIMIT_S, if each were given a second
                visitors.enter_context(socket.create_connection((address, port))).sendall(said)
            return measure_with(pair, address, port, key)

    measure_with = links._measure_with
    monkeypatch.setattr(links, "_measure_with", knock_before)
    found, _ = measure(2, tmp_path)
    assert isinstance(found[0], Figure)


def test_a_link_on_which_little_arrives_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def trickle(pair, address, port, key):
        with socket.create_connection((address, port)) as connection:
            connection.sendall(key + (1 << 60).to_bytes(8, "big"))
            while True:  # never silent for long
                connection.sendall(b"1")
                time.sleep(0.05)

    monkeypatch.setattr(links, "_measure_with", trickle)
    monkeypatch.setattr(links, "LIMIT_S", 0.5)
    found, _ = measure(2, tmp_path)
    assert "error: gpu0 cannot exchange data with gpu1" in found[0]


def test_a_port_that_is_closed_is_named_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(pair, address, port, key):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(links, "_measure_with", refuse)
    monkeypatch.setattr(links, "LIMIT_S", 1.0)
    found, _ = measure(2, tmp_path)
    assert len(set(found)) == 1
    assert "error: gpu0 cannot exchange data with gpu1" in found[0] and "Connection refused" in found[0]


@pytest.mark.parametrize("num_nodes", range(2, links.ALL_PAIRS + 1))
def test_rounds_hold_each_pair_once_and_no_node_twice(num_nodes: int):
    rounds = links.rounds_of(num_nodes)
    pairs = [pair for found in rounds for pair in found]
    assert sorted(pairs) == list(itertools.combinations(range(num_nodes), 2))
    assert all(len({node for pair in found for node in pair}) == 2 * len(found) for found in rounds)


def test_of_many_nodes_each_is_measured_with_its_neighbors():
    even, odd = links.rounds_of(100)
    assert sorted(even + odd) == [(node, node + 1) for node in range(99)]


def test_adapters_are_read_and_nothing_is_sent(tmp_path: Path):
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "400 Gb/sec"),
        ("mlx5_2", "1: DOWN", "400 Gb/sec"),
    ):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    found, _ = measure(2, tmp_path)
    assert found[0] == Figure(value=100.0, source="driver: InfiniBand or RoCE adapters")


def test_a_slow_link_gets_a_small_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def slow(connection, size: int, until: float) -> float:
        sizes.append(size)
        return send(connection, size, until) + 1.0

    send = links._send
    monkeypatch.setattr(links, "_send", slow)
    assert measure(2, tmp_path)[0][0] is not None and sizes == [links.FIRST_BYTES]


def test_a_node_without_an_address_is_not_measured(tmp_path: Path):
    assert on_all(2, lambda node: links.measure_links(node, [None, None], print, tmp_path)) == [None, None]
