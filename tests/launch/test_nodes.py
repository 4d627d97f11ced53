"""What several nodes find out before anything is planned; which start may train alone. Without torch and processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from manyhands.cli.train_options import choose_place
from manyhands.core.errors import UserError
from manyhands.core.remote import RemoteFolder
from manyhands.facts.types import GpuFacts, HostFacts
from manyhands.launch.environment import localize, refuse_alone
from manyhands.launch.nodes import preflight
from manyhands.launch.nodes.address import Address, interface_of, own_address
from manyhands.launch.nodes.channel import Channel
from manyhands.launch.nodes.info import count_ranks, digest_of_code, read_versions
from manyhands.launch.restart.restarts import Place
from tests.launch.builders import make_config, make_plan
from tests.launch.channels import on_all

GPU = GpuFacts(index=0, name="H200", memory_bytes=1, free_bytes=1)


def test_nodes_that_share_a_folder_are_found_and_nothing_is_left(tmp_path: Path):
    disks = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    leaders = on_all(4, lambda node: preflight.find_leaders(node, "x", disks[node.node] / "deep" / "er"))
    assert leaders == [[0, 0, 2, 2]] * 4
    assert not list(tmp_path.rglob("*manyhands*"))


def test_an_output_folder_that_is_not_shared_is_refused_on_every_node(tmp_path: Path):
    config = [make_config(**{"output.dir": str(tmp_path / disk)}) for disk in ("a", "a", "b")]
    texts = on_all(3, lambda node: preflight.refuse_own_disks(node, config[node.node]))
    assert all("error: output.dir is not shared: gpu2 does not see what gpu0 writes there" in text for text in texts)
    assert "a checkpoint has a shard of every rank" in texts[0] and f"{tmp_path / 'b'} on gpu2" in texts[2]
    shared = make_config(**{"output.dir": str(tmp_path / "a")})
    assert on_all(3, lambda node: preflight.refuse_own_disks(node, shared)) == [None] * 3


def test_a_folder_that_cannot_be_written_is_named_with_its_node(tmp_path: Path):
    (tmp_path / "b").write_text("a file is in the way")
    config = [make_config(**{"output.dir": str(tmp_path / disk / "runs")}) for disk in "ab"]
    texts = on_all(2, lambda node: preflight.refuse_own_disks(node, config[node.node]))
    assert "error: gpu1 cannot write into a folder of the run" in texts[1] and "Not a directory" in texts[1]


def test_work_is_done_once_for_each_disk_and_the_others_find_it(tmp_path: Path):
    disks = [tmp_path / name for name in ("a", "a", "b", "a")]
    made: list[tuple[int, bool]] = []

    def work(node: Channel) -> None:
        result = disks[node.node] / "result"
        made.append((node.node, result.exists()))
        result.parent.mkdir(exist_ok=True)
        result.touch()

    on_all(4, lambda node: preflight.in_turn(node, "x", disks[node.node], lambda: work(node)))
    assert sorted(made) == [(0, False), (1, True), (2, False), (3, True)]


def test_a_model_that_differs_is_named_with_both_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, text in (("a", "{}"), ("b", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    keys = {"model.init": "random", "data.cache": str(tmp_path / "cache")}
    configs = [make_config(**{"model.name": str(tmp_path / name)}, **keys) for name in ("a", "b")]
    texts = on_all(2, lambda node: preflight.find_model(node, configs[node.node], lambda _: None))
    assert all("error: the model on gpu1 is not the one on gpu0" in text for text in texts)
    assert all("config.json: 44136fa355b3 -> " in text for text in texts)
    assert on_all(2, lambda node: preflight.find_model(node, configs[0], lambda _: None)) == [tmp_path / "a"] * 2


def test_an_adapter_that_differs_is_named_with_both_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "find_model", lambda *_: tmp_path)
    monkeypatch.setattr(preflight, "prepare_data", lambda *_: SimpleNamespace(folder="data"))
    for name in "ab":
        (tmp_path / name).mkdir()
        fields = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 16, "lora_alpha": 32}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(fields))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(save({"lora_A": np.full(2, ord(name))}))
    configs = [make_config(**{"method.adapter": str(tmp_path / name)}) for name in ("a", "b")]
    texts = on_all(2, lambda node: preflight.find_places(node, configs[node.node], lambda _: None))
    assert all("error: the adapter on gpu1 is not the one on gpu0" in text for text in texts)
    assert all("adapter_model.safetensors: " in text and "adapter_config.json" not in text for text in texts)
    same = on_all(2, lambda node: preflight.find_places(node, configs[0], lambda _: None))
    assert [places["adapter_folder"] for _, places in same] == [str(tmp_path / "a")] * 2


def test_the_slowest_link_counts_and_none_where_a_driver_does_not_state_it(tmp_path: Path, monkeypatch):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    addresses = {"eth0": [SimpleNamespace(address="10.0.0.1")], "eth1": [SimpleNamespace(address="10.0.0.2")]}
    speeds = {"eth0": 25_000, "eth1": 10_000}
    monkeypatch.setattr(preflight.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        preflight.psutil, "net_if_stats", lambda: {name: SimpleNamespace(speed=speed) for name, speed in speeds.items()}
    )

    def read(*roots: Path) -> set[float | None]:
        found = on_all(2, lambda node: preflight.read_link(node, ["10.0.0.1", "10.0.0.2"], roots[node.node]))
        return {figure and figure.value for figure in found}

    empty = tmp_path / "empty"
    assert read(tmp_path, tmp_path) == {100.0} and read(empty, empty) == read(tmp_path, empty) == {1.25}
    speeds["eth1"] = 0  # as of virtual cards
    assert read(empty, empty) == {None}


def test_a_fresh_run_takes_a_name_under_which_there_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "read_link", lambda *_: None)
    monkeypatch.setattr(preflight, "find_places", lambda *_: (None, {}))
    (tmp_path / "run.json").write_text("{}")
    store = tmp_path / "store"
    RemoteFolder(f"file://{store}/demo").put(tmp_path / "run.json", "run.json")
    config = make_config(**{"output.dir": str(tmp_path / "runs"), "checkpoint.copy_to": f"file://{store}"})

    def name_of(node: Channel, fresh: bool) -> str:
        return preflight.find_group(node, config, (), (), (), fresh=fresh, report=lambda _: None)[0].name

    assert on_all(2, lambda node: name_of(node, fresh=True)) == ["demo-2"] * 2
    assert on_all(2, lambda node: name_of(node, fresh=False)) == ["demo"] * 2


@pytest.mark.parametrize(
    ("gpus", "asked", "ranks"),
    [((8, 8), "auto", (8, 8)), ((4, 2), "auto", (4, 2)), ((8, 8), 4, (2, 2)), ((0, 0), "auto", (1, 1)),
     ((0, 0), 4, (2, 2))],
)  # fmt: skip
def test_ranks_of_each_node(gpus: tuple[int, ...], asked: Any, ranks: tuple[int, ...]):
    assert count_ranks(make_config(**{"parallel.gpus": asked}), [host(count) for count in gpus]) == ranks


@pytest.mark.parametrize(
    ("hosts", "asked", "words"),
    [
        ([8, 8], 3, "parallel.gpus is 3, which 2 nodes cannot share equally"),
        ([8, 2], 8, "parallel.gpus is 8, 4 for each of 2 nodes, and gpu2 has fewer"),
        ([8, 0], "auto", "gpu0 has no GPU"),
    ],
)
def test_ranks_that_cannot_be_are_refused(hosts: list[int], asked: Any, words: str):
    with pytest.raises(UserError, match=words):
        count_ranks(make_config(**{"parallel.gpus": asked}), [host(count) for count in hosts])


def host(num_gpus: int) -> HostFacts:
    gpus = (GPU,) * num_gpus
    return HostFacts(name=f"gpu{num_gpus}", gpus=gpus, num_cores=1, memory_bytes=1, free_memory_bytes=1)


def test_versions_name_the_libraries_and_the_code():
    versions = read_versions()
    assert {"python", "torch", "transformers", "code of manyhands"} <= versions.keys()
    assert len(digest_of_code()) == 16 and "none" not in (versions["torch"], versions["transformers"])


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({"MASTER_ADDR": "gpu01"}, "MASTER_ADDR=gpu01"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "job-0"}, "PET_NNODES=2"),
        ({"PET_RDZV_ENDPOINT": "gpu01:29400"}, "PET_RDZV_ENDPOINT=gpu01:29400"),
        ({"SKYPILOT_NUM_NODES": "4"}, "SKYPILOT_NUM_NODES=4"),
    ],
)
def test_a_start_that_would_train_alone_is_an_error_where_the_environment_says_so(environ: dict[str, str], where: str):
    with pytest.raises(UserError, match="this machine would train alone") as refused:
        refuse_alone(make_config(), environ)
    assert where in refused.value.where and "--node-rank" in refused.value.fix
    refuse_alone(make_config(**{"parallel.nodes": 1}), environ)


def test_a_start_alone_is_none_where_nothing_says_otherwise():
    for environ in ({}, {"MASTER_ADDR": "127.0.0.1"}, {"PET_NNODES": "1"}, {"SKYPILOT_NUM_NODES": "1"}):
        refuse_alone(make_config(), environ)
    with pytest.raises(UserError, match="would train alone") as refused:
        refuse_alone(make_config(**{"parallel.nodes": 2}), {})
    assert refused.value.where == "parallel.nodes: 2"


def test_the_three_options_belong_together():
    two = make_config(**{"parallel.nodes": 2})
    assert choose_place(make_config(), None, None) == choose_place(two, None, None) == {}
    assert choose_place(two, 1, "gpu01:29400") == {"place": Place(1, 2, Address("gpu01", 29400))}
    assert choose_place(make_config(**{"parallel.nodes": 1}), 0, "gpu01:29400") == {}
    for config, rank, rendezvous, missing in (
        (make_config(), 0, "gpu01:1", "--nodes is missing"),
        (two, None, "gpu01:1", "--node-rank is missing"),
        (make_config(), 1, None, "--nodes and --rendezvous are missing"),
    ):
        with pytest.raises(UserError, match=missing):
            choose_place(config, rank, rendezvous)
    with pytest.raises(UserError, match="there is no node 2 of 2"):
        choose_place(two, 2, "gpu01:1")


def test_accelerates_file_says_which_machine_this_is(tmp_path: Path):
    """So `make train-distributed` on all nodes, each with its own file, is one run."""
    file = tmp_path / "accelerate.yaml"
    file.write_text("{distributed_type: MULTI_GPU, num_machines: 2, machine_rank: 1, main_process_ip: gpu01}")
    two = make_config(**{"parallel.nodes": 2})
    assert choose_place(two, None, None, file) == {"place": Place(1, 2, Address("gpu01", 29500))}
    assert choose_place(two, 0, "gpu02:1", file) == {"place": Place(0, 2, Address("gpu02", 1))}
    assert choose_place(make_config(), None, None, file) == {}


def test_a_plan_names_each_nodes_own_folders():
    plan = make_plan()
    local = localize(plan, '{"model_folder": "/here/model", "data_folder": "/here/data"}')
    assert (local.model_folder, local.data_folder) == ("/here/model", "/here/data")
    assert localize(plan, None) is plan and plan.model_folder == "/model"


def test_the_loopback_is_no_address_for_other_nodes():
    assert own_address("127.0.0.1", 1) is None and own_address("localhost", 1) is None
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") is None
