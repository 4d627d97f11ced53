"""What is left of a run on several nodes after one is lost: the command that goes on, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from manyhands.cli import run_file, train_options
from manyhands.launch.address import Address
from manyhands.launch.fewer_nodes import Place, command_without_place, commands_to_go_on

HELLOS = {node: {"host": f"gpu{node}", "address": f"10.0.0.{node}"} for node in range(12)}
ARGV = "/usr/bin/manyhands train run.yaml --nodes 3 --node-rank 2 --rendezvous gpu0:29400 name=x"


def go_on(left: list[int], num_nodes: int = 3, asked: object = "auto", argv: str = ARGV, **changes: bool) -> list[str]:
    place = Place(2, num_nodes, Address("gpu0", 29400), command_without_place(argv.split()), **changes)
    return commands_to_go_on(place, {node: HELLOS[node] for node in range(num_nodes)}, left, asked)


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
    _, second = commands_to_go_on(place, HELLOS, [0, 2], 6)
    assert second == (
        f"on gpu2: manyhands train {path} parallel.gpus=4 --nodes 2 --node-rank 1 --rendezvous gpu0:29400"
    )
    config = run_file.load_run(path, ["parallel.gpus=4"], nodes=2).config
    place = train_options.choose_place(config, 1, "gpu0:29400")["place"]
    assert (place.node, place.num_nodes, config.parallel.gpus) == (1, 2, 4)
