"""What is asked of experts and cannot be, or would have no effect, is refused by the plan."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.planner.search import plan
from tests.planner.examples import facts, mixture, run_config
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


def test_a_dense_model_has_nothing_to_balance() -> None:
    with pytest.raises(UserError, match="llama has no experts to balance"):
        plan(run_config(moe__balance=0.1), facts())


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
