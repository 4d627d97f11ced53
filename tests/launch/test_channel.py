"""The channel between launchers: who comes, who does not, who is lost. Without torch, on the loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.nodes import address
from manyhands.launch.nodes import channel as channel_module
from manyhands.launch.nodes.address import (
    SECRET_FILE,
    SHARED_FILE,
    Address,
    is_loopback,
    knock,
    open_listener,
    prove,
    read_secret,
)
from manyhands.launch.nodes.channel import SILENT, Channel
from manyhands.launch.nodes.info import LATER, check_node
from manyhands.launch.nodes.launcher_group import open_channel
from manyhands.launch.nodes.start import failing_together
from manyhands.launch.restart.restarts import Place
from tests.launch.builders import make_config
from tests.launch.channels import LONG_S, at_once

QUICK_S = 0.3  # for what is to run out
SECRET = b"known to the nodes"


def hello(node: int, nodes: int, **changes: Any) -> dict[str, Any]:
    config = make_config(**changes.pop("keys", {}))
    fields = {"node": node, "nodes": nodes, "host": f"gpu{node}", "run": config.model_dump(mode="json")}
    return fields | {"digest": config.digest, "versions": {"torch": "2.13"}} | changes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Meeting:
    """Launchers in threads of this process."""

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", free_port())
        self.channels: list[Channel] = []

    def come(self, mine: dict[str, Any], timeout_s: float = LONG_S, silence_s: float = LONG_S) -> Channel:
        channel = Channel(mine["node"], mine["nodes"], mine, silence_s=silence_s, secret=SECRET)
        channel.admit = check_node
        self.channels.append(channel)
        if mine["node"] == 0:
            channel.listen(self.address)
        else:
            channel.connect(self.address, timeout_s)
        channel.wait_for_all(timeout_s)
        return channel

    def all_come(self, *infos: dict[str, Any], **limits: float) -> list[Channel | str]:
        """Each launcher's channel, or its error as text."""
        return at_once(*(lambda mine=mine: self.come(mine, **limits) for mine in infos))


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    for channel in made.channels:
        channel.close()


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gather(channels: list[Channel], **options: Any) -> list[Any]:
    """What each channel's ``gather`` returns of their nodes' numbers, or its error as text."""
    return at_once(*(lambda channel=channel: channel.gather("x", channel.node, **options) for channel in channels))


def vanish(channel: Channel) -> None:
    """As if the launcher was killed: its connections end, and it says nothing."""
    channel.is_closed = True  # first: it must not tell one node that another, whose connection ends before, is lost
    for link in list(channel._links):
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_RDWR)


def test_all_come_and_gather(meeting: Meeting):
    channels = meeting.all_come(*(hello(node, 3) for node in (0, 1, 2)))
    assert [channel.names for channel in channels] == [["gpu0", "gpu1", "gpu2"]] * 3
    assert gather(channels) == [[0, 1, 2]] * 3


def test_a_host_name_writes_no_line_and_no_escape_sequence(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2, host="gpu1\x1b]0;title\x07\nerror: none\x9b31m"))
    assert [channel.names[1] for channel in channels] == ["gpu1\\u001b]0;title\\u0007 error: none\\u009b31m"] * 2
    (text,) = meeting.all_come(hello(1, 2, host="gpu9\x1b[2J\n\nerror: another"))
    assert "came twice" in text and "\x1b" not in text and "\nerror: another" not in text


def test_messages_reach_the_node_they_are_for_or_all_others(meeting: Meeting):
    channels = meeting.all_come(*(hello(node, 3) for node in (0, 1, 2)))
    heard: list[tuple[int, str, int]] = []
    for channel in channels:
        for kind in ("kill", "failed"):
            channel.handlers[kind] = lambda m, node=channel.node: heard.append((node, m["kind"], m["node"]))
    channels[1].post("kill", to=2)
    channels[2].post("failed")
    until(lambda: len(heard) == 3)
    assert sorted(heard) == [(0, "failed", 2), (1, "failed", 2), (2, "kill", 1)]


def test_a_node_that_never_comes_is_named_everywhere(meeting: Meeting):
    texts = meeting.all_come(hello(0, 3), hello(2, 3), timeout_s=QUICK_S)
    assert texts[0] == texts[1]
    assert "error: 1 of 3 nodes did not come: node 1" in texts[0] and "there: node 0 (gpu0), node 2 (gpu2)" in texts[0]


def test_node_0_that_never_comes_is_named(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("manyhands.launch.nodes.channel.ANSWER_S", 0.1)
    (text,) = meeting.all_come(hello(1, 2), timeout_s=QUICK_S)
    assert f"node 1 (gpu1) found no node 0 at {meeting.address} within 0.3 s" in text


def test_who_ends_the_connection_before_node_0_listens_is_not_taken_for_it(meeting: Meeting):
    """Another program that had the port, or a proxy that takes connections for a machine that is still starting."""
    ended = threading.Event()

    def come_late() -> Any:
        with open_listener(meeting.address, 1) as stranger:
            for _ in range(2):
                stranger.accept()[0].close()
        ended.set()
        return meeting.come(hello(0, 2))

    late, early = at_once(come_late, lambda: meeting.come(hello(1, 2)))
    assert ended.is_set() and isinstance(late, Channel) and isinstance(early, Channel), (late, early)
    assert gather([late, early]) == [[0, 1]] * 2


def test_a_program_that_never_answers_is_named(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("manyhands.launch.nodes.channel.ANSWER_S", 0.1)
    with open_listener(meeting.address, 1):
        (text,) = meeting.all_come(hello(1, 2), timeout_s=QUICK_S)
    assert "found no node 0" in text and "a program listens there that does not answer as node 0 does" in text


def test_a_connection_to_itself_is_none(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    """As it happens on node 0's machine, where the system chooses the very port that nobody listens at yet."""

    def meet_oneself(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.bind(address)
        connection.connect(address)
        return connection

    monkeypatch.setattr("manyhands.launch.nodes.channel.ANSWER_S", 0.1)
    monkeypatch.setattr("manyhands.launch.nodes.address.socket.create_connection", meet_oneself)
    (text,) = meeting.all_come(hello(1, 2), timeout_s=QUICK_S)
    assert "found no node 0" in text and "nobody listens there" in text


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"node": 1, "host": "gpu7"}, ["node 1 came twice: from", "gpu1", "gpu7"]),
        ({"node": 2, "nodes": 2}, ["node 0 (gpu0) was started for 3 nodes, node 2 (gpu2) for 2"]),
        ({"keys": {"seed": 7}}, ["came with another run than node 0 (gpu0)", "seed: 0 -> 7"]),
        ({"keys": {"name": "other"}}, ["runs 'demo' and 'other'", "name: 'demo' -> 'other'"]),
        ({"versions": {"torch": "2.11"}}, ["has other versions than node 0 (gpu0)", "torch: '2.13' -> '2.11'"]),
    ],
)
def test_a_node_that_does_not_belong_is_named_everywhere(meeting: Meeting, second: dict[str, Any], words: list[str]):
    intruder = hello(**({"node": 2, "nodes": 3} | second))
    texts = meeting.all_come(hello(0, 3), hello(1, 3), intruder)
    assert len(set(texts)) == 1
    for word in words:
        assert word in texts[0]


def test_a_second_start_does_not_disturb_a_run_that_has_begun(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    (text,) = meeting.all_come(hello(1, 2, host="gpu9"))
    assert "node 1 came twice: from gpu1 and from gpu9" in text
    assert gather(channels) == [[0, 1]] * 2


def stranger(meeting: Meeting) -> socket.socket:
    return socket.create_connection(("127.0.0.1", meeting.address.port), timeout=LONG_S)


def proven(meeting: Meeting, secret: bytes, said: dict[str, Any]) -> socket.socket:
    """A connection of who knows the secret, and what it says then."""
    connection = stranger(meeting)
    nonces = knock(connection, secret, time.monotonic() + LONG_S)
    connection.sendall(json.dumps(said | {"proof": prove(secret, "hello", *nonces)}).encode() + b"\n")
    return connection


def other_run(node: int = 1) -> dict[str, Any]:
    return {"kind": "hello", "node": node, "hello": hello(node, 2, keys={"seed": 7})}


KNOCK = {"kind": "knock", "nonce": "0" * 64, "proof": "0" * 64}
STRANGE = {
    "a hello of another run": json.dumps(other_run()).encode() + b"\n",
    "another node 0": json.dumps(other_run(0)).encode() + b"\n",
    "no hello": b'{"kind": "hello"}\n',
    "a wrong proof": json.dumps(KNOCK).encode() + b"\n",
    "a proof that is no text": json.dumps(KNOCK | {"proof": 1}).encode() + b"\n",
    "a nonce that is no text": json.dumps(KNOCK | {"nonce": []}).encode() + b"\n",
    "trouble": json.dumps({"kind": "trouble", "node": 1, "error": UserError("x").to_json()}).encode() + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": b"\xff\x00\n",
    "a list": b"[1]\n",
    "a deep list": b"[" * 1000 + b"\n",
    "a huge number": b"1" * 1000 + b"\n",
    "a line without end": b"[" * 100_000,
    "empty lines": b"\n" * 1000,
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE.keys())
def test_who_does_not_know_the_secret_gets_no_answer_and_changes_nothing(said: bytes, meeting: Meeting):
    """Before the nodes have come together, and in the run."""

    def knock_in_vain() -> None:
        with stranger(meeting) as visitor:
            with contextlib.suppress(OSError):
                visitor.sendall(said)
            answer = b"none"
            with contextlib.suppress(ConnectionError):
                answer = visitor.recv(1)
            assert answer in (b"", b"none")

    found: list[Any] = []
    first = threading.Thread(target=lambda: found.extend(meeting.all_come(hello(0, 2))))
    first.start()
    until(lambda: meeting.channels and meeting.channels[0]._listener)
    knock_in_vain()
    (second,) = meeting.all_come(hello(1, 2))
    first.join(LONG_S)
    knock_in_vain()
    assert gather([found[0], second]) == [[0, 1]] * 2
    assert meeting.channels[0].trouble is None and meeting.channels[0].names == ["gpu0", "gpu1"]


def test_silent_slow_and_many_strangers_keep_no_node_waiting(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "MAX_STRANGERS", 4)
    first = threading.Thread(target=meeting.all_come, args=(hello(0, 2),))
    first.start()
    until(lambda: meeting.channels and meeting.channels[0]._listener)
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * channel_module.MAX_STRANGERS):
            strangers.enter_context(stranger(meeting)).sendall(b"[")
        (second,) = meeting.all_come(hello(1, 2))
        first.join(LONG_S)
        assert isinstance(second, Channel) and meeting.channels[0].trouble is None
        assert len(meeting.channels[0]._links) <= channel_module.MAX_STRANGERS + 1


def test_who_sends_a_byte_now_and_then_is_dropped_in_time(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    monkeypatch.setattr("manyhands.launch.nodes.channel.ANSWER_S", 0.5)
    with stranger(meeting) as slow:
        until(lambda: len(channels[0]._links) == 2)

        def is_dropped() -> bool:
            with contextlib.suppress(OSError):
                slow.sendall(b" ")
            return len(channels[0]._links) == 1

        until(is_dropped)


def test_a_proof_that_was_overheard_is_none_on_another_connection(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    begin = json.dumps({"kind": "knock", "nonce": "1", "proof": prove(SECRET, "knock", "1")}).encode() + b"\n"
    with stranger(meeting) as one, stranger(meeting) as other:
        one.sendall(begin)
        nonce = json.loads(one.recv(1 << 12))["nonce"]
        other.sendall(begin)
        assert json.loads(other.recv(1 << 12))["nonce"] != nonce
        other.sendall(json.dumps(other_run() | {"proof": prove(SECRET, "hello", "1", nonce)}).encode() + b"\n")
        assert other.recv(1 << 16) == b""
    assert channels[0].trouble is None


def test_a_node_tells_nothing_of_the_run_to_a_node_0_with_another_secret(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("manyhands.launch.nodes.channel.ANSWER_S", 0.1)
    monkeypatch.setattr("manyhands.launch.nodes.address.REFUSED_S", 0.1)
    heard, told = [], []

    def listen(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    heard.append(connection.recv(1 << 16))
                    answer = {"kind": "open", "nonce": "2", "proof": prove(b"another", "open", "1", "2")}
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                    heard.append(connection.recv(1 << 16))

    with open_listener(meeting.address, 1) as listener:
        threading.Thread(target=listen, args=(listener,), daemon=True).start()
        channel = Channel(1, 2, hello(1, 2), silence_s=LONG_S, secret=SECRET)
        with pytest.raises(UserError, match="found no node 0") as caught:
            channel.connect(meeting.address, 1.0, told.append)
        listener.shutdown(socket.SHUT_RDWR)
    assert "another secret (output.dir is not shared, or MANYHANDS_SECRET differs)" in str(caught.value)
    assert len(told) == 1 and "another secret" in told[0]
    assert all(b"knock" in line for line in heard if line) and not any(b"gpu1" in line for line in heard)


def test_who_is_refused_cannot_disturb_the_run_afterwards(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    with proven(meeting, SECRET, {"kind": "hello", "node": 1, "hello": hello(1, 2, host="gpu9")}) as second:
        assert b"came twice" in second.recv(1 << 16)
        second.sendall(b"no JSON\n")
        assert second.recv(1 << 16) == b""
    assert gather(channels) == [[0, 1]] * 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.3"])
def test_a_rendezvous_on_the_loopback_listens_there_alone(host: str):
    with open_listener(Address(host, free_port()), 1) as listener:
        assert is_loopback(listener.getsockname()[0])


def test_the_secret_is_the_users_or_made_once_in_the_shared_folder(tmp_path: Path):
    shared = at_once(*(lambda: read_secret(tmp_path / "runs", {}) for _ in range(8)))
    assert len(set(shared)) == 1 and len(shared[0]) >= 32 and read_secret(tmp_path / "other", {}) != shared[0]
    assert (tmp_path / "runs" / SHARED_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / "token").write_text("from a file\n")
    by_file = {SECRET_FILE: str(tmp_path / "token")}
    assert read_secret(tmp_path, by_file) == b"from a file"
    assert read_secret(tmp_path, by_file | {address.SECRET: "a text"}) == b"a text"
    with pytest.raises(UserError, match="the secret that the nodes share cannot be read"):
        read_secret(tmp_path, {SECRET_FILE: str(tmp_path / "none")})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="the file of the secret that the nodes share is empty"):
        read_secret(tmp_path, {SECRET_FILE: str(tmp_path / "empty")})


def test_a_node_that_comes_back_before_the_others_have_ended_is_told_to_come_again(meeting: Meeting):
    """Node 0 is still in the run that node 1 was lost in, then begins anew."""
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    vanish(channels[1])
    until(lambda: channels[0].lost)
    with pytest.raises(UserError, match="is still ending the run that node 1") as caught:
        meeting.come(hello(1, 2))
    assert caught.value.kind == LATER


def test_it_comes_again_by_itself(meeting: Meeting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = (Place(node, 2, meeting.address) for node in (0, 1))
    config = make_config(**{"output.dir": str(tmp_path)})
    channels = [channel for channel, _ in at_once(*(lambda p=p: open_channel(config, p) for p in (first, second)))]
    vanish(channels[1])
    until(lambda: channels[0].lost)
    told = threading.Event()
    explain = channel_module.explain_ending
    monkeypatch.setattr(channel_module, "explain_ending", lambda *names: (told.set(), explain(*names))[1])

    def end_and_begin_anew() -> Any:
        told.wait(LONG_S)
        channels[0].close()
        return open_channel(config, first)

    again = at_once(end_and_begin_anew, lambda: open_channel(config, second))
    try:
        assert [channel.num_nodes for channel, _ in again] == [2, 2]
        assert gather([channel for channel, _ in again]) == [[0, 1]] * 2
    finally:
        for channel, _ in again:
            channel.close()


def test_an_error_in_the_channels_thread_ends_what_waits_for_it(meeting: Meeting, capsys: pytest.CaptureFixture[str]):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    channels[0].handlers["kill"] = lambda message: {}["no such key"]
    channels[1].post("kill", to=0)
    texts = gather(channels)
    assert "error: unexpected error in the channel of node 0 (gpu0): KeyError" in texts[0]
    assert "error: node 0 (gpu0) is lost" in texts[1]
    assert "Traceback" in capsys.readouterr().err


def test_a_launcher_that_is_killed_is_lost_for_all_others(meeting: Meeting):
    channels = meeting.all_come(*(hello(node, 3) for node in (0, 1, 2)))
    vanish(channels[1])
    until(lambda: channels[0].trouble and channels[2].trouble)
    assert {channels[0].trouble.what, channels[2].trouble.what} == {"node 1 (gpu1) is lost"}
    assert channels[0].trouble.kind == "" and "ended without a message" in channels[0].trouble.why
    left = [channels[0], channels[2]]
    assert all("node 1 (gpu1) is lost" in text for text in gather(left))
    assert gather(left, partial=True) == [[0, None, 2]] * 2


def test_a_node_that_is_silent_is_lost_on_both_sides(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    channels = meeting.all_come(hello(0, 2), hello(1, 2), silence_s=1.5)
    monkeypatch.setattr(Channel, "_beat", lambda self: None)  # as on a link that is cut
    until(lambda: channels[0].trouble and channels[1].trouble)
    here, there = channels[0].trouble, channels[1].trouble
    assert (here.what, there.what) == ("node 1 (gpu1) is lost", "node 0 (gpu0) is lost")
    first = here if here.kind == SILENT else there  # who notices first ends the connection, which here is not cut
    assert first.kind == SILENT and "nothing was heard from it for 1.5 s" in first.why


@pytest.mark.ci
def test_beats_keep_a_channel_alive_and_carry_what_node_0_is_to_know(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2), silence_s=2.5)
    channels[1].beat_fields = lambda: {"2": "beat of rank 2"}
    until(lambda: channels[0].beats.get(1))
    begin = time.monotonic()
    until(lambda: time.monotonic() - begin > 3)
    assert channels[0].beats == {1: {"2": "beat of rank 2"}} and channels[0].trouble is channels[1].trouble is None


def test_a_node_that_is_busy_ends_with_the_error_of_another(meeting: Meeting):
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    begin = time.monotonic()
    failing = threading.Timer(0.2, lambda: channels[1].fail(UserError("no such file", where="rows.jsonl on gpu1")))
    failing.start()
    with pytest.raises(UserError, match="no such file"), failing_together(channels[0]):
        time.sleep(LONG_S)
    assert time.monotonic() - begin < LONG_S


def test_a_node_that_fails_leaves_no_gap_in_what_the_others_gather(meeting: Meeting):
    channels = meeting.all_come(*(hello(node, 3) for node in (0, 1, 2)))

    def fail() -> None:
        channels[1].fail(UserError("no such file", where="rows.jsonl on gpu1"))
        channels[1].close()

    texts = at_once(lambda: channels[0].gather("x", 0), fail, lambda: channels[2].gather("x", 2))
    assert "error: no such file" in texts[0] and "error: no such file" in texts[2]


@pytest.mark.ci
def test_another_node_0_elsewhere_is_found(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "LINGER_S", QUICK_S)
    other = Meeting()
    listen = Channel.listen

    def listen_elsewhere(channel: Channel, address: Address) -> int:
        monkeypatch.setattr("manyhands.launch.nodes.channel.is_own", lambda address: False)
        monkeypatch.setattr(
            "manyhands.launch.nodes.channel.open_listener",
            lambda address, backlog: open_listener(other.address, backlog),
        )
        return listen(channel, address)

    first = threading.Thread(target=lambda: found.extend(meeting.all_come(hello(0, 2))))
    found: list[Any] = []
    first.start()
    until(lambda: meeting.channels and meeting.channels[0]._listener)
    monkeypatch.setattr(Channel, "listen", listen_elsewhere)
    (text,) = meeting.all_come(hello(0, 2, host="gpu9"))
    first.join(LONG_S)
    assert "error: node 0 came twice: from gpu0 and from gpu9" in text and found == [text]


def test_one_nodes_error_is_everyones_and_leaving_is_none(meeting: Meeting):
    channels = meeting.all_come(*(hello(node, 3) for node in (0, 1, 2)))
    channels[2].close()
    until(lambda: 2 in channels[0]._left)
    assert channels[0].trouble is None
    channels[1].fail(UserError("no such file", where="rows.jsonl on gpu1"))
    with pytest.raises(UserError, match="no such file"):
        channels[0].gather("x", 0)


def test_who_gathers_does_not_wait_for_a_node_0_that_has_left(meeting: Meeting):
    """In order, as after an error that it does not share: there is nobody who would hand out what is gathered."""
    channels = meeting.all_come(hello(0, 2), hello(1, 2))
    leaving = threading.Timer(0.1, channels[0].close)
    leaving.start()
    (text,) = at_once(lambda: channels[1].gather("x", 1))
    assert "error: node 0 (gpu0) is lost" in text and "it has left the run" in text
    assert channels[1].gather("end", 1, partial=True) == [None, 1]


@pytest.mark.parametrize("text", ["gpu01", "gpu01:", ":29400", "gpu01:0", "gpu01:70000", "tcp://gpu01:1/x"])
def test_a_rendezvous_is_host_and_port(text: str):
    with pytest.raises(UserError, match="is not HOST:PORT"):
        Address.parse(text, "--rendezvous")


def test_addresses_are_read_and_written_alike():
    for text in ("gpu01:29400", "10.0.0.7:1", "[fe80::1]:29400"):
        assert str(Address.parse(text, "--rendezvous")) == text
