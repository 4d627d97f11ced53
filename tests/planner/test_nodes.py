"""Plans for several nodes: what they have in common, and where they differ."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.types import Facts, Figure, HostFacts
from manyhands.planner.search import plan
from manyhands.planner.text import explain
from tests.planner.examples import GIB, data_facts, facts, llama_8b, on_nodes, run_config

LONG = data_facts(num_samples=5000, mean=3000, longest=4096)


def h200(gpus: int = 8) -> Facts:
    return facts(llama_8b(), gpus=gpus, data=LONG)


def with_memory(host: HostFacts, gib: int, name: str) -> HostFacts:
    update = {"memory_bytes": gib * GIB, "free_bytes": gib * GIB, "name": name}
    return host.model_copy(update={"gpus": tuple(gpu.model_copy(update=update) for gpu in host.gpus)})


def said(given: Facts, **keys: object) -> str:
    return " | ".join(explain(reason) for reason in plan(run_config(**keys), given).why)


def test_the_smallest_gpu_of_all_nodes_is_planned_for():
    big = h200()
    mixed = on_nodes(big, big.host, with_memory(big.host, 80, "H100"))
    made = plan(run_config(), mixed)
    assert made.memory.limit == int(0.97 * 80 * GIB) == plan(run_config(), on_nodes(mixed, 8, 8)).memory.limit
    assert "2: gpu01 (8 × NVIDIA H200), gpu02 (8 × H100); planned for the smallest GPU, 80.0 GiB" in said(mixed)
    assert "planned for the smallest" not in said(on_nodes(big, 8, 8))


def test_the_least_cores_and_memory_of_all_nodes_are_planned_for():
    whole = facts().host
    small = whole.model_copy(update={"num_cores": 2, "free_memory_bytes": 8 * GIB})
    made = plan(run_config(), on_nodes(facts(), whole, small))
    assert (made.environment["OMP_NUM_THREADS"], made.memory.limit) == ("2", int(0.9 * 8 * GIB))


def test_a_node_that_cannot_compute_in_bfloat16_decides_for_all():
    big = h200()
    old = big.host.model_copy(
        update={"gpus": tuple(gpu.model_copy(update={"compute_capability": (7, 0)}) for gpu in big.host.gpus)}
    )
    assert plan(run_config(), on_nodes(big, big.host, old)).layout.compute_dtype == "float32"


@pytest.mark.parametrize(("ranks", "shard"), [((8, 8), 8), ((4, 2), 2), ((8, 4, 4), 4)])
def test_a_copy_never_spans_two_nodes_under_hsdp(ranks: tuple[int, ...], shard: int):
    made = plan(run_config(parallel__strategy="hsdp"), on_nodes(h200(), *ranks))
    assert (made.layout.world_size, made.layout.mesh.shard) == (sum(ranks), shard)


def test_the_run_files_number_of_nodes_must_be_there():
    assert plan(run_config(parallel__nodes=2), on_nodes(h200(), 8, 8)).layout.world_size == 16
    with pytest.raises(UserError, match=r"parallel\.nodes is 3, but there are 2"):
        plan(run_config(parallel__nodes=3), on_nodes(h200(), 8, 8))
    with pytest.raises(UserError, match=r"parallel\.nodes is 2, but there is 1"):
        plan(run_config(parallel__nodes=2), h200())


def with_link(given: Facts, gb_s: float) -> Facts:
    return given.model_copy(update={"node_link": Figure(value=gb_s, source="the drivers of network adapters")})


def test_a_copy_a_node_is_chosen_across_a_slow_link_and_the_arithmetic_is_shown():
    """Full training of 8B: a copy a GPU does not fit where there are 80 GiB, a copy a node does."""
    small = facts(llama_8b(), gpus=8, gpu_bytes=80 * GIB, data=LONG)
    made = plan(run_config(method__name="full"), with_link(on_nodes(small, 8, 8), 1.0))
    assert (made.layout.strategy, made.layout.mesh.shard) == ("hsdp", 8)
    (links,) = (reason for reason in made.why if reason.code == "node_links")
    ways = links.values["ways"]
    gradients = 4 * llama_8b().num_parameters  # their sums are float32; of two copies each node sends them once
    assert ways["hsdp"]["bytes"] == pytest.approx(gradients, rel=1e-3)
    assert ways["hsdp"]["seconds"] == pytest.approx(gradients / 1e9, rel=1e-3)
    assert ways["fsdp"]["bytes"] > 1.4 * ways["hsdp"]["bytes"]
    assert "1 GB/s (the drivers of network adapters); a step sends" in explain(links)


def test_links_are_not_mentioned_on_one_node():
    assert "node_links" not in [reason.code for reason in plan(run_config(), h200()).why]
