"""The layout: degrees of the mesh, who holds what, and that estimate, plan and engine read the same one."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.planner.choices import ENOUGH_TOKENS_PER_S, MAX_AUTO_WORKERS, choose_data_workers
from manyhands.planner.layout import HOLDING, Mesh, change, choose_holding, mesh_of
from manyhands.planner.search import plan
from manyhands.planner.text import explain
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, llama_1b, llama_8b, run_config
from tests.support.plans import make_layout

LONG = data_facts(num_samples=5000, mean=3000, longest=4096)
BFLOAT16 = {"compute_dtype": "bfloat16", "reshard_after_forward": False}


def test_a_mesh_numbers_ranks_with_the_last_axis_fastest() -> None:
    mesh = Mesh(replicate=2, shard=3, context=2)
    assert (mesh.world_size, mesh.data_parallel_degree, mesh.num_shards) == (12, 6, 6)
    assert mesh.coordinates(9) == {"replicate": 1, "shard": 1, "context": 1, "tensor": 0}
    assert [mesh.data_rank(rank) for rank in range(12)] == [rank // 2 for rank in range(12)]
    with pytest.raises(ValueError, match="shard: 0 is below 1"):
        Mesh(shard=0)


@pytest.mark.parametrize(
    ("strategy", "degrees"), [("single", (1, 1)), ("ddp", (8, 1)), ("fsdp", (1, 8)), ("hsdp", (4, 2))]
)
def test_a_strategy_is_a_mesh(strategy: Any, degrees: tuple[int, int]) -> None:
    mesh = mesh_of(strategy, 1 if strategy == "single" else 8, 2)
    assert (mesh.replicate, mesh.shard) == degrees
    assert mesh.world_size == mesh.data_parallel_degree == degrees[0] * degrees[1]


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, ("none", "none")),
        (BFLOAT16, ("none", "kept")),
        (BFLOAT16 | {"reshard_after_forward": True}, ("fully_shard", "gathered")),
        (BFLOAT16 | {"offload": "all"}, ("fully_shard", "gathered")),
        (BFLOAT16 | {"offload": "optimizer"}, ("none", "kept")),
        (BFLOAT16 | {"master_dtype": "bfloat16"}, ("none", "none")),
        (BFLOAT16 | {"trains_everything": False}, ("none", "none")),
        ({"offload": "all"}, ("fully_shard", "none")),
        ({"strategy": "ddp", "world_size": 2}, ("ddp", "none")),
        ({"strategy": "ddp", "world_size": 1}, ("none", "none")),
        (BFLOAT16 | {"strategy": "ddp", "world_size": 2}, ("fully_shard", "gathered")),
        (BFLOAT16 | {"strategy": "ddp", "world_size": 2, "trains_everything": False}, ("ddp", "none")),
        (BFLOAT16 | {"strategy": "ddp", "world_size": 2, "master_dtype": "bfloat16"}, ("fully_shard", "gathered")),
        ({"strategy": "fsdp", "world_size": 2}, ("fully_shard", "none")),
        (BFLOAT16 | {"strategy": "hsdp", "world_size": 4, "shard_degree": 2}, ("fully_shard", "gathered")),
    ],
)
def test_who_wraps_and_who_casts(changes: dict[str, Any], held: tuple[str, str]) -> None:
    layout = make_layout(**changes)
    assert (layout.wrapper, layout.compute_copy) == held
    assert change(change(layout, offload="all", trains_everything=True), **vars_of(layout, "offload")) == layout


def vars_of(layout: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in (*names, "trains_everything")}


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("keys", [{}, {"method__name": "full"}, {"method__name": "full", "parallel__offload": "all"}])
def test_every_candidate_holds_what_follows_from_it(keys: dict[str, Any], gpus: int) -> None:
    made = plan(run_config(**keys), facts(llama_1b(), gpus=gpus, host_bytes=2**41, data=LONG))
    (chosen,) = (candidate for candidate in made.candidates if candidate.chosen)
    assert chosen.layout == made.layout and made.layout.world_size == gpus
    for layout in (candidate.layout for candidate in made.candidates):
        values = {name: getattr(layout, name) for name in HOLDING}
        assert (layout.wrapper, layout.compute_copy) == choose_holding(**values)
        assert layout.world_size == gpus
    assert Plan.model_validate_json(made.model_dump_json()).layout == made.layout


def test_activation_checkpointing_by_layer() -> None:
    layout = make_layout(activation_checkpointing="full", lighter_layers=2)
    assert layout.checkpointing_by_layer(5) == ("full", "full", "full", "selective", "selective")
    assert make_layout(activation_checkpointing="selective").checkpointing_by_layer(2) == ("selective", "selective")
    assert change(layout, activation_checkpointing="selective").last_checkpointing == "none"


@pytest.mark.parametrize(
    ("keys", "gpus", "largest"),
    [
        ({"data__workers": 1_000_000}, 1, ("data.workers", "32")),
        ({"data__workers": 9}, 4, ("data.workers", "8")),
        ({"data__workers": 8}, 4, None),
        ({"parallel__device": "cpu", "parallel__gpus": 1_000_000}, 0, ("parallel.gpus", "32")),
        ({"parallel__device": "cpu", "parallel__gpus": 4, "data__workers": 9}, 0, ("data.workers", "8")),
        ({"parallel__device": "cpu", "parallel__gpus": 4, "data__workers": 8}, 0, None),
    ],
)
def test_processes_are_bounded_by_cores(keys: dict[str, Any], gpus: int, largest: tuple[str, str] | None) -> None:
    """8 cores take 32."""
    given = facts(llama_1b(), gpus=gpus)
    if largest is None:
        plan(run_config(**keys), given)
        return
    with pytest.raises(UserError, match="8 cores") as caught:
        plan(run_config(**keys), given)
    assert (caught.value.where, caught.value.fix) == (
        largest[0],
        f"set {largest[0]} to at most {largest[1]}, or to auto",
    )


@pytest.mark.parametrize(
    ("asked", "gpus", "mean", "num_workers"),
    [("auto", 0, 5, 0), ("auto", 1, 300, 0), ("auto", 1, 20, 4), ("auto", 4, 20, 0), ("auto", 1, 1, 6), (3, 0, 300, 3)],
)
def test_data_workers_follow_from_facts(asked: Any, gpus: int, mean: float, num_workers: int) -> None:
    """8 cores: a GPU's share less two; a sample takes 15 us, so one of 20 tokens 1.3 of the 4 million tokens/s."""
    given = facts(llama_8b(), gpus=gpus, data=data_facts(mean=mean, longest=64))
    found, why = choose_data_workers(run_config(data__workers=asked), given, "cuda" if gpus else "cpu")
    assert found == num_workers == why.values["workers"] <= MAX_AUTO_WORKERS and ENOUGH_TOKENS_PER_S == 4_000_000
    scarce = asked == "auto" and (gpus, mean) in ((4, 20), (1, 1))
    assert ("cores are free" in explain(why)) == scarce
    made = plan(run_config(data__workers=asked), given)
    assert made.layout.data_workers == num_workers
