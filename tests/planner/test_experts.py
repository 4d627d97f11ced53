"""What is asked of experts and cannot be, or would have no effect, is refused by the plan."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.types import LinearShape, ModelFacts
from manyhands.planner.experts import list_expert_degrees
from manyhands.planner.search import plan
from tests.planner.examples import data_facts, facts, mixture, model_facts, on_nodes, run_config
from tests.support.plans import explain_why


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        (
            {"method__target_modules": ["q_proj", "gate_proj", "down_proj"]},
            "gate_proj of method",
            "name experts.gate_up",
        ),
        ({"method__target_modules": ["experts.w1"]}, "experts.w1 of", "name experts.gate_up_proj in its place"),
        ({"method__target_modules": ["q_proj", "mlp.experts"]}, "mlp.experts of", "name linear layers"),
        ({"method__target_modules": ["q_proj", "experts.7.down_proj"]}, "experts.7.down_proj of", "name linear layers"),
        ({"method__rank": 7}, "rank 7 on the experts would be larger", "set method.rank to 6 or less"),
        ({"method__rank": 7, "method__target_modules": ["experts.*"]}, "rank 7 on the experts", "to 6 or less"),
        ({"method__dora": True}, "DoRA cannot adapt experts", "set method.dora=false"),
    ],
)
def test_adapters_that_do_not_fit_experts_are_refused(keys: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(run_config(**keys), facts(mixture()))
    assert (
        what in caught.value.what
        and fix in caught.value.fix
        and caught.value.where in ("method.target_modules", "method.rank", "method.dora")
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"method__rank": 6},
        {"method__rank": 100, "method__target_modules": ["q_proj"], "method__dora": True},
        {"method__target_modules": ["q_proj", "experts.*"], "method__rank": 6, "moe__balance": 0.1},
        {"method__name": "full", "moe__balance": 0.1},
    ],
)
def test_what_fits_is_planned(keys: dict[str, Any]) -> None:
    assert plan(run_config(**keys), facts(mixture())).num_trained > 0


@pytest.mark.parametrize(
    ("targets", "planned"),
    [
        (["q_proj", "gate_proj", "up_proj", "down_proj"], ("q_proj", "down_proj", "experts.gate_up_proj")),
        (["gate_proj", "up_proj", "down_proj", "gate_up_proj"], ("down_proj", "gate_up_proj")),
        (["w1", "w3", "w2"], ("experts.down_proj", "experts.gate_up_proj")),
        (["q_proj", "experts.*"], ("q_proj", "experts.*")),
    ],
)
def test_projections_of_single_experts_are_their_stacks(targets: list[str], planned: tuple[str, ...]) -> None:
    """As PEFT and Unsloth read them."""
    made = plan(run_config(method__rank=4, method__target_modules=targets), facts(mixture()))
    assert made.target_modules == planned
    told = [line for line in explain_why(made) if "gate and up of each expert are one matrix" in line]
    assert len(told) == (planned != tuple(targets))


def mixture_of(hidden: int, inner: int, experts: int, active: int, **dense: Any) -> ModelFacts:
    """Blocks of attention, and of ``experts`` in two stacks, of which a token goes to ``active``."""
    base = model_facts(hidden=hidden, inner=inner * active, **dense)
    attention = {name: shape for name, shape in base.block_linear_shapes.items() if "mlp" not in name}
    stacks = {"mlp.experts.gate_up_proj": LinearShape(experts * 2 * inner, hidden, experts, active)}
    stacks |= {"mlp.experts.down_proj": LinearShape(experts * hidden, inner, experts, active)}
    added = sum(stack.size for stack in stacks.values()) - 3 * hidden * inner * active
    return base.model_copy(
        update={
            "model_type": "qwen3_moe",
            "block_linear_shapes": attention | stacks,
            "num_block_parameters": base.num_block_parameters + added,
            "num_parameters": base.num_parameters + base.num_layers * added,
        }
    )


def large_mixture() -> ModelFacts:
    """Four blocks, each of eight experts of 98,304 values in two stacks, of which a token goes to two."""
    return mixture_of(128, 256, 8, 2, layers=4, heads=4, vocab=512)


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"parallel__expert_degree": 4}, "4 does not divide the 6 ranks of the run", "to 1 or 2, or"),
        ({"parallel__expert_degree": 3}, "3 does not divide the 8 experts of a block", "to 1 or 2, or"),
        ({"parallel__expert_degree": 2, "parallel__strategy": "zero3"}, "with parallel.strategy: zero3", "remove par"),
        ({"parallel__expert_degree": 2, "parallel__offload": "all"}, "with parallel.offload: all", "remove par"),
        ({"parallel__expert_degree": 2, "optimizer__name": "muon"}, "with optimizer.name: muon", "remove par"),
        (
            {
                "parallel__expert_degree": 2,
                "parallel__compile": True,
                "parallel__activation_checkpointing": "selective",
            },
            "with parallel.compile: true, with selective checkpointing",
            "change parallel.compile",
        ),
        (
            {"parallel__expert_degree": 2, "parallel__context_degree": 2, "parallel__strategy": "fsdp"},
            "with parallel.context_degree: 2",
            "remove par",
        ),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(keys: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(run_config(**{"method__name": "full", **keys}), facts(large_mixture(), gpus=6))
    assert what in caught.value.what and fix in caught.value.fix and caught.value.where == "parallel.expert_degree"


def test_experts_cannot_be_saved_in_full_beside_adapters() -> None:
    for saved in ("experts", "mlp"):
        with pytest.raises(UserError, match="modules_to_save includes experts"):
            plan(run_config(method__modules_to_save=[saved]), facts(large_mixture(), gpus=1))


def test_one_rank_cannot_divide_experts() -> None:
    with pytest.raises(UserError, match="2 does not divide the 1 rank of the run") as caught:
        plan(run_config(parallel__expert_degree=2), facts(large_mixture(), gpus=1))
    assert caught.value.fix == "set parallel.expert_degree to 1, or start another number of processes"


def test_a_dense_model_has_no_experts_to_divide() -> None:
    with pytest.raises(UserError, match="llama has no experts to divide"):
        plan(run_config(parallel__expert_degree=2), facts(gpus=2))


@pytest.mark.parametrize(
    ("method", "optimizer", "moments"),
    [("full", "adamw", 8), ("lora", "adamw", 8), ("full", "adamw_8bit", 2 + 8 / 256), ("full", "paged_adamw_8bit", 0)],
)
@pytest.mark.parametrize(("strategy", "groups"), [("ddp", 1), ("fsdp", 1), ("fsdp", 2)])
def test_a_rank_holds_its_part_of_the_experts(
    method: str, optimizer: str, moments: float, strategy: str, groups: int
) -> None:
    """The plan counts it, shows it and prices the exchange; experts are neither gathered nor on every rank."""
    keys: dict[str, Any] = {"method__name": method, "method__rank": 4, "parallel__strategy": strategy}
    keys |= {
        "optimizer__name": optimizer,
        "parallel__activation_checkpointing": "none",
        "parallel__reshard_after_forward": "auto",
    }
    model = large_mixture()
    one, divided = (
        plan(run_config(**keys, parallel__expert_degree=degree), facts(model, gpus=2 * groups)) for degree in (1, 2)
    )
    experts = 4 * 8 * 98_304  # values
    sides = 4 * 8 * (512 + 128 + 128 + 256)
    held, trained = (4 * experts, experts) if method == "full" else (2 * experts + 4 * 4 * sides, 4 * sides)
    shards = 2 * groups if strategy == "fsdp" else 1
    assert divided.memory.terms["weights"] - one.memory.terms["weights"] == int(held / 2 - held / shards)
    fewer = int(moments * trained * (1 / 2 - 1 / shards))
    assert abs(divided.memory.terms["optimizer"] - one.memory.terms["optimizer"] - fewer) <= 1  # of a rounded byte
    assert divided.candidates[0].step_s is not None
    if strategy == "fsdp":
        assert divided.memory.terms["gathered"] < one.memory.terms["gathered"]
    assert [f"divided over 2 ranks, to which tokens are sent, in {groups} group{'s' * (groups > 1)}" in line
        for line in explain_why(divided, "expert_degree")] == [True]  # fmt: skip
    assert divided.layout.compile and not explain_why(one, "expert_degree") and one.layout.expert_degree == 1


@pytest.mark.parametrize(
    ("mode", "compiled"), [("none", True), ("full", True), ("selective", False), ("except_attention", False)]
)
def test_blocks_are_compiled_where_no_checkpoint_is_traced_across_the_exchange(mode: str, compiled: bool) -> None:
    keys = {"method__name": "full", "parallel__expert_degree": 2, "parallel__activation_checkpointing": mode}
    made = plan(run_config(**keys), facts(large_mixture(), gpus=2))
    assert made.layout.compile == compiled
    (why,) = explain_why(made, "compile")
    assert compiled or why == f"compile: no, as ranks exchange tokens inside of what {mode} checkpointing traces"


def test_blocks_that_are_asked_to_be_compiled_are() -> None:
    keys = {"method__name": "full", "parallel__expert_degree": 2, "parallel__compile": True}
    made = plan(run_config(**keys), facts(large_mixture(), gpus=2))
    modes = {candidate.layout.activation_checkpointing for candidate in made.candidates}
    assert made.layout.compile and modes == {"none", "full"}


QWEN_30B = mixture_of(2048, 768, 128, 8, layers=48, heads=32, kv_heads=4, head_dim=128, vocab=151936, tied=False)
FEW_WIDE_BLOCKS = mixture_of(4096, 8192, 64, 4, layers=2, heads=32, kv_heads=8, vocab=32000)
FULL = {"method__name": "full"}


@pytest.mark.parametrize(
    ("model", "keys", "gpus", "degree", "why"),
    [
        (QWEN_30B, {}, 4, 1, ""),  # a copy on each: there is nothing to win
        (QWEN_30B, FULL, 8, 1, ""),
        (QWEN_30B, FULL, 4, 4, "; on 1 rank a step is "),  # gathers that nothing hides, of micro-batches of one sample
        (QWEN_30B, FULL | {"parallel__expert_degree": 1}, 4, 1, ""),
        (QWEN_30B, {"parallel__expert_degree": 2}, 4, 2, ", as configured; estimated for a rank"),
        (FEW_WIDE_BLOCKS, FULL, 4, 4, "; undivided the run does not fit: its smallest layout needs"),
        (FEW_WIDE_BLOCKS, {}, 4, 1, ""),
        (FEW_WIDE_BLOCKS, {}, 1, 1, ""),
    ],
)
def test_the_degree_that_auto_takes(model: ModelFacts, keys: Any, gpus: int, degree: int, why: str) -> None:
    """1 where experts fit undivided, but where a step is a tenth shorter with rows twice the mean for one rank."""
    made = plan(run_config(**keys), facts(model, gpus=gpus, data=data_facts(4000, mean=4096, longest=4096)))
    assert made.layout.expert_degree == degree
    (line,) = explain_why(made, "expert_degree") or [""]
    assert why in line and bool(why) == bool(line) == (degree > 1)


@pytest.mark.parametrize(
    ("keys", "degrees"),
    [
        ({}, (1, 2, 4, 8)),
        (FULL, (1, 4, 8)),  # masters and moments of half the experts need 174 GB
        ({"parallel__gpus": 6}, (1, 2)),
        ({"parallel__device": "cpu"}, (1,)),
        ({"parallel__expert_degree": 4}, (4,)),
        ({"method__name": "qlora"}, (1, 2, 4, 8)),
        *(({name: value}, (1,)) for name, value in {
            "parallel__strategy": "zero3", "parallel__offload": "optimizer", "parallel__context_degree": 2,
            "kernels__linear": "fp8", "optimizer__name": "muon",
        }.items()),
    ],
)  # fmt: skip
def test_auto_tries_only_what_divided_experts_were_tested_with(keys: Any, degrees: tuple[int, ...]) -> None:
    assert list_expert_degrees(run_config(**keys), facts(QWEN_30B, gpus=8)) == degrees


def test_auto_divides_experts_within_a_machine() -> None:
    for hosts, degrees in (((4, 4), (1, 2, 4)), ((8, 4), (1, 2, 4)), ((1, 1), (1,))):
        assert list_expert_degrees(run_config(), on_nodes(facts(QWEN_30B, gpus=8), *hosts)) == degrees
    assert list_expert_degrees(run_config(), facts(gpus=8)) == (1,)  # a dense model


def test_a_refusal_does_not_speak_of_a_key_that_nobody_set() -> None:
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(run_config(**FULL), facts(QWEN_30B, gpus=2))
    assert "expert_degree" not in str(caught.value)


def test_a_step_is_as_long_as_that_of_the_rank_with_the_most_rows() -> None:
    """Of 8,192 tokens, 8 experts each, in bfloat16: rows twice the mean, three quarters of which leave a rank."""
    keys = {"batch__samples": 8, "batch__micro_tokens": 8192, "parallel__activation_checkpointing": "none"}
    given = facts(QWEN_30B, gpus=4, data=data_facts(4000, mean=4096, longest=4096))
    one, four = (plan(run_config(**keys, parallel__expert_degree=degree), given).time for degree in (1, 4))
    assert one is not None and four is not None
    sent = 2 * 8192 * 8 * 2048 * 2 * 3 / 4 * 4 * 48  # there and back, forward and backward, in 48 blocks
    link = 0.4049 * 450e9
    assert four.terms["communication"] == pytest.approx(sent / link, rel=0.05)
    assert four.terms["attention"] == one.terms["attention"] and four.terms["matmuls"] > 1.3 * one.terms["matmuls"]


def test_memory_that_runs_out_of_divided_experts_is_followed_by_a_smaller_plan() -> None:
    given = facts(QWEN_30B, gpus=4, data=data_facts(4000, mean=4096, longest=4096))
    first = plan(run_config(**FULL), given)
    second = plan(run_config(**FULL), given, number=2, cause="out_of_memory", before=first)
    assert second.memory.total < first.memory.total and second.batch_samples == first.batch_samples
