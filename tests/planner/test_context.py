"""Plans for packs that several ranks divide: what they cost, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.config.checks import check
from manyhands.core.errors import UserError
from manyhands.planner.layout import Mesh, mesh_of
from manyhands.planner.search import plan
from tests.planner.examples import data_facts, facts, llama_8b, model_facts, run_config

LONG = data_facts(num_samples=500, mean=150_000, longest=200_000)


def test_axes_of_a_mesh_with_context():
    assert mesh_of("ddp", 8, context=2) == Mesh(replicate=4, context=2)
    assert mesh_of("fsdp", 8, context=4) == Mesh(shard=2, context=4)
    assert mesh_of("hsdp", 8, 4, context=2) == Mesh(replicate=2, shard=2, context=2)


def test_a_sample_too_long_for_one_gpu_fits_on_several():
    given = facts(llama_8b(), gpus=8, data=LONG)
    keys = {"data__max_length": 200_000, "batch__samples": 8, "parallel__strategy": "ddp"}
    keys |= {"parallel__activation_checkpointing": "except_attention", "parallel__offload_activations": False}
    with pytest.raises(UserError, match="does not fit"):
        plan(run_config(**keys), given)
    made = {degree: plan(run_config(**keys, parallel__context_degree=degree), given) for degree in (4, 8)}
    assert [one.layout.data_parallel_degree for one in made.values()] == [2, 1]
    assert made[4].layout.num_copies == made[8].layout.num_copies == 8
    four, eight = (one.memory.terms for one in made.values())
    assert eight["activations"] < four["activations"] and eight["weights"] == four["weights"]
    one, other = (plan_.time.terms for plan_ in made.values() if plan_.time is not None)
    assert 0 < one["communication"] != other["communication"] > 0


@pytest.mark.parametrize(
    ("keys", "given", "named"),
    [
        ({}, facts(llama_8b(), gpus=3), "the ranks of the run, 3"),
        (
            {"parallel__strategy": "hsdp", "parallel__shard_degree": 1},
            facts(llama_8b(), gpus=2),
            "the ranks that hold a copy, 1",
        ),
        ({}, facts(model_facts(num_mixer_layers=1), gpus=2), "carry a state"),
        ({}, facts(model_facts(is_multimodal=True), gpus=2), "reads images"),
        ({}, facts(model_facts(packs=False, packing_reason="it reads backwards"), gpus=2), "it reads backwards"),
    ],
)
def test_what_cannot_be_divided_is_refused(keys: dict[str, Any], given: Any, named: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(run_config(parallel__context_degree=2, **keys), given)
    assert named in caught.value.why and caught.value.where == "parallel.context_degree"


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel__gpus": 3},
        {"parallel__strategy": "zero2"},
        {"parallel__strategy": "single"},
        {"data__packing": False},
        {"task": "preference"},
        {"task": "kto"},
        {"moe__balance": 0.01},
    ],
)
def test_keys_that_contradict_a_degree(keys: dict[str, Any]) -> None:
    (found,) = check(run_config(parallel__context_degree=2, **keys))
    assert found.startswith("`parallel.context_degree: 2`")
