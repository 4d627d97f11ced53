"""Plans for packs that several ranks divide: what they cost, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from manyhands.config.checks import check
from manyhands.core.errors import UserError
from manyhands.planner.context import exchanges_heads, sent_bytes, with_degree
from manyhands.planner.layout import Mesh, mesh_of
from manyhands.planner.search import plan, plan_longest
from manyhands.planner.text import explain
from manyhands.planner.time.clock import pack_tile
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
        plan(run_config(**keys, parallel__context_degree=1), given)
    made = {degree: plan(run_config(**keys, parallel__context_degree=degree), given) for degree in (4, 8)}
    assert [one.layout.data_parallel_degree for one in made.values()] == [2, 1]
    assert made[4].layout.num_copies == made[8].layout.num_copies == 8
    four, eight = (one.memory.terms for one in made.values())
    assert eight["activations"] < four["activations"] and eight["weights"] == four["weights"]
    one, other = (plan_.time.terms for plan_ in made.values() if plan_.time is not None)
    assert 0 < one["communication"] != other["communication"] > 0


def degree_of(config: Any, given: Any) -> tuple[int, str]:
    """The degree of the plan, and what it says of it."""
    made = plan(config, given)
    return made.layout.mesh.context, "".join(explain(each) for each in made.why if each.code == "context")


SHORT = data_facts(num_samples=5000, mean=400, longest=512)
FEW = data_facts(num_samples=500, mean=19_990, longest=20_000)
TIGHT = data_facts(num_samples=500, mean=343_000, longest=344_000)  # needs 98 % of a GPU's memory
TOO_LONG = data_facts(num_samples=500, mean=399_000, longest=400_000)
KEPT = {"parallel__offload_activations": False, "data__max_length": 400_000, "batch__samples": 2}
FULL = {"parallel__activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("keys", "data", "gpus", "degree", "why"),
    [
        ({}, SHORT, 8, 1, ""),
        ({}, SHORT, 1, 1, ""),
        ({"batch__samples": 8}, FEW, 8, 1, ""),  # a sample for each
        ({"batch__samples": 1}, FEW, 8, 8, "with 1 a step is"),
        ({"batch__samples": 1, "parallel__context_degree": 1}, FEW, 8, 1, ""),
        ({"batch__samples": 1, "parallel__context_degree": 2}, FEW, 8, 2, "as configured"),
        ({"batch__samples": 1, "parallel__strategy": "zero2"}, FEW, 8, 1, ""),
        (FULL | KEPT, TOO_LONG, 4, 2, "undivided the run does not fit: its smallest layout needs"),
        (
            FULL | KEPT | {"batch__samples": 6},
            TOO_LONG,
            6,
            2,
            "undivided the run does not fit: its smallest layout needs",
        ),
        (FULL | KEPT, TIGHT, 2, 2, "with fewer too little memory would be left"),
        (FULL | KEPT | {"parallel__context_degree": 1}, TIGHT, 2, 1, ""),
        (KEPT | {"batch__samples": 6}, TOO_LONG, 6, 3, "; with 2 a step is 24% slower"),  # which recompute attention
    ],
)
def test_the_degree_that_auto_takes(keys: Any, data: Any, gpus: int, degree: int, why: str) -> None:
    """1 where samples fit; the fewest ranks that fit where they do not, or more where a step is a tenth shorter."""
    found = degree_of(run_config(**keys), facts(llama_8b(), gpus=gpus, data=data))
    assert found[0] == degree and why in found[1] and bool(why) == bool(found[1])


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        ({"data__packing": False}, llama_8b()),
        ({}, llama_8b().model_copy(update={"num_mixer_layers": 1, "mixer_state": 64})),
        ({}, llama_8b().model_copy(update={"packs": False, "packing_reason": "it reads backwards"})),
    ],
)
def test_auto_leaves_whole_what_cannot_be_divided(keys: Any, model: Any) -> None:
    """The refusal is that of the memory, and does not speak of a key that nobody set."""
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(run_config(**KEPT | {"batch__samples": 8} | keys), facts(model, gpus=8, data=TOO_LONG))
    assert "context" not in str(caught.value)


def test_short_convolutions_are_divided() -> None:
    """They carry no state beyond a few tokens."""
    made = plan(run_config(parallel__context_degree=2), facts(model_facts(num_mixer_layers=1), gpus=2))
    assert made.layout.mesh.context == 2


@pytest.mark.parametrize(
    ("kv_heads", "degree", "num_local", "exchanges", "kib"),
    [
        (8, 2, 8, True, (20, 12)),
        (8, 4, 8, True, (30, 36)),
        (8, 8, 8, True, (35, 84)),
        (8, 16, 16, False, (37.5, 180)),  # two ranks to a head
        (8, 2, 1, False, (20, 12)),  # between machines, where it sends more
        (8, 4, 1, True, (30, 36)),
        (32, 2, 1, True, (32, 48)),
        (32, 16, 8, True, (60, 720)),
        (1, 1, 8, False, (0, 0)),
    ],
)
def test_what_ranks_exchange(kv_heads: int, degree: int, num_local: int, exchanges: bool, kib: Any) -> None:
    """32 heads of 128 dimensions in bfloat16; keys' gradients are summed in float32."""
    model = llama_8b().model_copy(update={"num_kv_heads": kv_heads})
    assert exchanges_heads(model, degree, 2, num_local) is exchanges
    assert tuple(sent_bytes(model, degree, 2, heads=heads) / 1024 for heads in (True, False)) == kib


def test_divided_packs_of_one_length_have_whole_tiles_on_each_rank() -> None:
    """An odd multiple of 16 tokens, which one rank takes without padding."""
    validation = {"num_validation_samples": 2, "num_validation_tokens": 2 * 20_016}
    data = data_facts(num_samples=500, mean=20_016, longest=20_016, num_documents=1, **validation)
    keys = {"data__max_length": 20_016, "batch__samples": 4, "parallel__strategy": "ddp"}
    packs = {}
    for degree in (1, 2):
        made = plan(run_config(**keys, parallel__context_degree=degree), facts(llama_8b(), gpus=2, data=data))
        packs[degree] = (made.layout.pack_tokens, pack_tile(made.layout))
    (alone, _), (divided, tile) = packs[1], packs[2]
    assert alone is not None and divided is not None
    assert alone % 20_016 == 0 and alone % 128
    assert divided % tile == 0 and divided - tile < divided // 20_016 * 20_016


def test_exchanged_heads_need_less_memory_than_gathered_keys() -> None:
    keys = {"batch__samples": 2, "parallel__context_degree": 4, "data__max_length": 400_000}
    made = plan(run_config(**keys, **FULL), facts(llama_8b(), gpus=4, data=TOO_LONG))
    given = facts(llama_8b().model_copy(update={"num_kv_heads": 2, "num_heads": 32}), gpus=4, data=TOO_LONG)
    gathered = plan(run_config(**keys, **FULL), given)
    assert made.layout.exchanges_heads and not gathered.layout.exchanges_heads
    assert made.memory.terms["activations"] < gathered.memory.terms["activations"]


def test_memory_that_runs_out_is_followed_by_a_larger_degree() -> None:
    config = run_config(**FULL, **KEPT)
    given = facts(llama_8b(), gpus=4, data=TOO_LONG)
    first = plan(config, given)
    made = [first]
    while made[-1].layout.mesh.context == 2:
        made.append(plan(config, given, number=len(made) + 1, cause="out_of_memory", before=made[-1]))
    assert made[-1].layout.mesh.context == 4 and made[-1].batch_samples == first.batch_samples
    assert all(one.memory.total > other.memory.total for one, other in pairwise(made))


def test_more_gpus_are_proposed_where_only_a_divided_sample_fits() -> None:
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(run_config(**KEPT), facts(llama_8b(), gpus=1, data=TOO_LONG))
    assert "use more GPUs: 2" in str(caught.value.fix)


def test_the_longest_sample_grows_with_the_gpus_that_divide_it() -> None:
    config = run_config(method__name="lora", data__packing=True, parallel__offload_activations=False)
    lengths = [plan_longest(config, facts(llama_8b(), gpus=gpus)).length for gpus in (1, 2, 4)]
    whole = plan_longest(with_degree(config, 1), facts(llama_8b(), gpus=4))
    assert lengths[1] > 1.5 * lengths[0] and lengths[2] > 1.5 * lengths[1] and whole.length < 1.2 * lengths[0]


@pytest.mark.parametrize(
    ("keys", "given", "named"),
    [
        ({}, facts(llama_8b(), gpus=3), "the ranks of the run, 3"),
        (
            {"parallel__strategy": "hsdp", "parallel__shard_degree": 1},
            facts(llama_8b(), gpus=2),
            "the ranks that hold a copy, 1",
        ),
        ({}, facts(model_facts(num_mixer_layers=1, mixer_state=64), gpus=2), "carry a state"),
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
