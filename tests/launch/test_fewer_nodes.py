"""What is left of a run on several nodes after one is lost: the command that goes on, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from manyhands.cli import run_file, train_options
from manyhands.core.errors import FAULT, UserError
from manyhands.facts.types import HostFacts
from manyhands.launch.diagnose.failure import FoundCause
from manyhands.launch.nodes.address import Address
from manyhands.launch.nodes.info import NodeGroup, explain_missing, explain_unreachable
from manyhands.launch.nodes.launcher_group import LaunchEnd, LauncherGroup
from manyhands.launch.restart.restarts import (
    Place,
    command_without_place,
    commands_without_lost,
    config_for,
    nodes_there,
    place_among,
)
from tests.launch.builders import make_config
from tests.launch.test_channel import Meeting, at_once, hello, meeting, until, vanish

__all__ = ["meeting"]  # a fixture
HELLOS = {node: {"host": f"gpu{node}", "address": f"10.0.0.{node}"} for node in range(12)}
ARGV = "/usr/bin/manyhands train run.yaml --nodes 3 --node-rank 2 --rendezvous gpu0:29400 name=x"


def go_on(left: list[int], num_nodes: int = 3, asked: object = "auto", argv: str = ARGV, **changes: bool) -> list[str]:
    place = Place(2, num_nodes, Address("gpu0", 29400), command_without_place(argv.split()), **changes)
    return commands_without_lost(place, {node: HELLOS[node] for node in range(num_nodes)}, left, asked)


def test_each_node_that_is_left_gets_its_number_and_where_node_0_is() -> None:
    command = "manyhands train run.yaml name=x --nodes 2"
    assert go_on([0, 2]) == [
        f"on gpu0: {command} --node-rank 0 --rendezvous gpu0:29400",
        f"on gpu2: {command} --node-rank 1 --rendezvous gpu0:29400",
    ]
    assert go_on([1, 2])[0] == f"on gpu1: {command} --node-rank 0 --rendezvous 10.0.0.1:29400"
    assert go_on([1]) == ["on gpu1: manyhands train run.yaml name=x --nodes 1"]


def test_the_number_of_gpus_is_that_of_the_nodes_left_and_a_fresh_start_stays_away() -> None:
    argv = "/env/manyhands/__main__.py train run.yaml --gpus 24 --nodes=3 --node-rank=1 --rendezvous=h:1 --fresh x=1"
    assert go_on([0], asked=24, argv=argv) == [
        "on gpu0: python -m manyhands train run.yaml x=1 parallel.gpus=8 --nodes 1"
    ]
    argv = "manyhands train run.yaml parallel.nodes=3 parallel.gpus=24 --node-rank 1 --rendezvous h:1 'name=a b'"
    assert go_on([0], asked=24, argv=argv)[0].startswith("on gpu0: manyhands train run.yaml ")
    assert "parallel.nodes" not in go_on([0], asked=24, argv=argv)[0]


def test_in_a_step_of_slurm_one_command_leaves_the_node_out() -> None:
    [line] = go_on([0, 2], argv="manyhands train run.yaml name=x", by_srun=True)
    assert line == "srun --nodes=2 --ntasks-per-node=1 --exclude=gpu1 manyhands train run.yaml name=x"


def test_of_many_nodes_the_first_are_written_out() -> None:
    *lines, rest = go_on(list(range(1, 12)), num_nodes=12)
    assert len(lines) == 8 and rest == "and so on, in this order: gpu9, gpu10, gpu11"


def test_what_is_said_can_be_given_to_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    fields = {
        "name": "demo",
        "model": {"name": "tiny"},
        "data": {"train": "x.jsonl"},
        "parallel": {"nodes": 3, "gpus": 6},
    }
    path.write_text(yaml.safe_dump(fields))
    argv = f"manyhands train {path} --node-rank 2 --rendezvous gpu0:29400"
    monkeypatch.setattr("sys.argv", argv.split())
    place = train_options.choose_place(run_file.load_run(path, []).config, 2, "gpu0:29400")["place"]
    _, second = commands_without_lost(place, HELLOS, [0, 2], 6)
    assert second == (
        f"on gpu2: manyhands train {path} parallel.gpus=4 --nodes 2 --node-rank 1 --rendezvous gpu0:29400"
    )
    _, also = commands_without_lost(place, HELLOS, [0, 2], 6, 5)
    assert " parallel.gpus=4 launch.min_gpus=4 --nodes 2 " in also, "more than there are would be refused"
    config = run_file.load_run(path, ["parallel.gpus=4"], nodes=2).config
    place = train_options.choose_place(config, 1, "gpu0:29400")["place"]
    assert (place.node, place.num_nodes, config.parallel.gpus) == (1, 2, 4)


def test_those_that_are_left_are_numbered_anew_and_the_last_one_is_alone() -> None:
    place = Place(3, 4, Address("gpu0", 29400))
    assert place_among(place, [0, 3], HELLOS) == Place(1, 2, Address("gpu0", 29400))
    assert place_among(place, [2, 3], HELLOS) == Place(1, 2, Address("10.0.0.2", 29400)), "node 2 is in node 0's place"
    assert place_among(place, [2, 3], HELLOS | {2: {"host": "gpu2", "address": None}}).rendezvous.host == "gpu2"
    assert place_among(Place(0, 4, Address("gpu0", 29400)), [0], HELLOS) is None
    config = make_config(**{"parallel.nodes": 4, "parallel.gpus": 32, "seed": 3})
    fewer = config_for(config, 4, 2)
    assert (fewer.parallel.nodes, fewer.parallel.gpus, fewer.seed) == (2, 16, 3)
    assert config_for(make_config(), 4, 2) == make_config()
    assert config_for(make_config(), 4, 1).parallel.nodes == 1


def test_who_is_there_is_read_from_the_error_that_names_who_is_not() -> None:
    missing = UserError.from_json(explain_missing([1, 3], 4, "there: 0, 2", 15).to_json())
    place = Place(2, 4, Address("gpu0", 29400))
    assert nodes_there(missing, place) == [0, 2]
    assert nodes_there(missing, replace(place, node=3)) == [], "it came too late: the others go on without it"
    assert nodes_there(UserError("another"), place) == []
    silent = UserError.from_json(explain_unreachable("node 2 (c)", "gpu0:29400", 15, OSError("timed out")).to_json())
    assert nodes_there(silent, place) == [1, 2, 3], "node 0 does not answer: the others may come together"


def launcher_groups(meeting: Meeting, num: int) -> list[LauncherGroup]:
    channels = meeting.all_come(*(hello(node, num) for node in range(num)))
    hosts = tuple(
        HostFacts(name=f"gpu{n}", gpus=(), num_cores=1, memory_bytes=1, free_memory_bytes=1) for n in range(num)
    )
    group = NodeGroup(hosts, (2,) * num)
    return [LauncherGroup(channel, group, Place(channel.node, num, meeting.address), {}) for channel in channels]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("least", "enough"), [(4, True), (5, False), (None, False)])
def test_the_nodes_left_agree_to_go_on_if_they_have_enough_gpus(
    meeting: Meeting, lost: int, least: int | None, enough: bool
) -> None:
    found, left = launcher_groups(meeting, 3), [node for node in range(3) if node != lost]
    vanish(found[lost].channel)
    until(lambda: all(lost in found[node].channel.lost for node in left))
    agreed = at_once(*(lambda node=node: found[node].agree_on_left(least) for node in left))
    assert agreed == [left if enough else []] * 2


def test_what_drivers_report_on_any_node_is_known_to_all(meeting: Meeting) -> None:
    found = launcher_groups(meeting, 2)
    cause = FoundCause(0, 1.0, UserError("rank 0 failed", kind=FAULT), 0)
    mine = [LaunchEnd(cause=cause), LaunchEnd(reports=("the driver reports of GPU 1 (H100) on gpu1: Xid 79",))]
    ends = at_once(*(lambda node=node: found[node].settle(mine[node]) for node in (0, 1)))
    assert [end.reports for end in ends] == [mine[1].reports] * 2


def test_the_error_of_a_lost_node_has_the_commands(meeting: Meeting) -> None:
    found = launcher_groups(meeting, 2)
    vanish(found[1].channel)
    until(lambda: 1 in found[0].channel.lost)
    cause = found[0].settle(LaunchEnd()).cause
    assert cause is not None and cause.error.what == "node 1 (gpu1) is lost"
    assert cause.error.fix.endswith(
        "to go on without what is lost, run:\n    on gpu0: manyhands train RUN.yaml --nodes 1"
    )
