"""A launcher among others: torch's store before each launch, and what a node does where another has failed."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.diagnose.failure import FoundCause
from manyhands.launch.local.agent import open_store
from manyhands.launch.nodes import launcher_group as group_module
from manyhands.launch.nodes.address import Address
from manyhands.launch.nodes.info import explain_lost
from manyhands.launch.nodes.launcher_group import LaunchEnd, LauncherGroup
from manyhands.launch.restart.restarts import Place

LONG_S = 60.0
FAILED = FoundCause(4, 0.0, UserError("no room for a socket", where="gpu0"))


class Channel:
    """One node's end, alone: what it gathers is what it has given."""

    is_closed = False

    def __init__(self, node: int, given: dict[str, Any]) -> None:
        self.node, self.num_nodes, self.names = node, 2, ["gpu0", "gpu1"]
        self.local_host = self.address = "127.0.0.1"
        self.infos = {number: {"address": None, "host": f"gpu{number}"} for number in range(2)}
        self.given, self.failed = given, []
        self.lost, self.trouble = {}, None
        self.beats: dict[int, Any] = {}
        self.handlers: dict[str, Any] = {}

    def gather(self, key: str, value: Any, **_: Any) -> list[Any]:
        return [self.given.setdefault(key, value), None]

    def post(self, kind: str, **fields: Any) -> None:
        self.posted = kind, fields

    def fail(self, error: UserError) -> None:
        self.failed.append(error)

    def when_in_trouble(self, act: Any) -> Any:
        return group_module.contextlib.nullcontext()


def make_group(channel: Channel) -> LauncherGroup:
    place = Place(channel.node, 2, Address("127.0.0.1", 29400))
    return LauncherGroup(channel, SimpleNamespace(num_ranks=(1, 1)), place, {})  # type: ignore[arg-type]


def test_torchs_store_listens_before_any_other_node_hears_of_its_port() -> None:
    """A port that was only chosen may be another program's by the time the agent listens there."""
    given: dict[str, Any] = {}
    first, second = (make_group(Channel(node, given)) for node in (0, 1))
    for attempt in (1, 2):
        _, port = first.begin(open_store)
        assert given[f"start {attempt}"] == port
        socket.create_connection(("127.0.0.1", port)).close()
        assert second.begin(lambda host: pytest.fail("node 0 alone has the store")) == ("127.0.0.1", port)
    assert given["start 1"] != given["start 2"], "the store of a launch that failed has its addresses"


def test_a_store_that_cannot_be_opened_ends_all_nodes() -> None:
    def refuse(host: str | None) -> Any:
        raise OSError(24, "Too many open files")

    channel = Channel(0, {})
    with pytest.raises(UserError, match="torch's store cannot be opened on node 0") as caught:
        make_group(channel).begin(refuse)
    assert channel.failed == [caught.value] and "Too many open files" in str(caught.value) and not channel.given


def test_a_node_that_is_stuck_after_another_has_failed_ends_with_that_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its agent may wait in torch's store, which nothing interrupts."""
    killed, exits, exited = [], [], threading.Event()
    watch: Any = SimpleNamespace(
        expect_end=lambda: None, kill_ranks=lambda ranks=None: killed.append(ranks), describe_ranks=dict
    )
    monkeypatch.setattr(group_module, "SETTLE_S", 0.05)
    monkeypatch.setattr(group_module.os, "_exit", lambda code: (exits.append(code), exited.set()))
    channel = Channel(1, {})
    with make_group(channel).watching(watch):
        channel.handlers["failed"]({"cause": FAILED.to_json()})
        assert exited.wait(LONG_S)
    assert (
        killed == [None]
        and exits == [FAILED.error.exit_code]
        and "error: no room for a socket" in capsys.readouterr().err
    )


@pytest.mark.parametrize("all_failed", [True, False])
def test_ranks_that_have_all_lost_a_node_are_ended_at_once(monkeypatch: pytest.MonkeyPatch, all_failed: bool) -> None:
    """None of them can save any more; others get ``SAVE_S``."""
    monkeypatch.setattr(group_module, "POLL_S", 0.01)
    monkeypatch.setattr(group_module.os, "kill", lambda pid, number: None)
    is_killed, num_looks = threading.Event(), []
    watch: Any = SimpleNamespace(all_failed=lambda: num_looks.append(1) or all_failed, kill_ranks=is_killed.set)
    ended = threading.Event()
    make_group(Channel(0, {}))._end(watch, explain_lost("node 1", "node 0", "its launcher ended"), ended)
    if all_failed:
        assert is_killed.wait(LONG_S)
    else:
        while len(num_looks) < 3:
            ended.wait(0.01)
        assert not is_killed.is_set()
    ended.set()


def test_a_node_that_ends_in_time_after_another_has_failed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = threading.Event(), []
    watch: Any = SimpleNamespace(expect_end=asked.set, kill_ranks=lambda: done.append("kill"), describe_ranks=dict)
    monkeypatch.setattr(group_module.os, "_exit", done.append)
    channel = Channel(1, {})
    launchers = make_group(channel)
    with launchers.watching(watch):
        channel.handlers["failed"]({"cause": FAILED.to_json()})
        waiting = [thread for thread in threading.enumerate() if thread.name == "failed"]
    assert asked.is_set() and waiting
    for thread in waiting:
        thread.join(LONG_S / 2)
        assert not thread.is_alive() and not done, "of an attempt that is over"
    mine = FoundCause(4, 1.0, UserError("the nodes did not form a group"))
    ended = launchers.settle(LaunchEnd(cause=mine))
    assert ended.cause is not None and ended.cause.error.what == FAILED.error.what, (
        "the other has left, and its cause came first"
    )
