"""What the plan makes of `data.packing` and of a model that cannot be packed; which attention soft-caps get."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from tests.planner.examples import facts, model_facts
from tests.support.plans import explain_why

LEAKS = {"packs": False, "packing_reason": "packed documents see each other"}


def make_plan(packing: Any = "auto", batch: dict[str, Any] | None = None, gpus: int = 0, **model: Any) -> Plan:
    config = config_from_mapping(
        {
            "name": "p",
            "model": {"name": "m"},
            "data": {"train": "rows.jsonl", "packing": packing},
            "batch": batch or {"samples": 8},
        }
    )
    made = plan(config, facts(model_facts(**model), gpus=gpus))
    assert made.config_digest == config.digest  # what was decided never gets into what was asked
    return made


def why(made: Plan, name: str) -> str:
    return next(sentence for sentence in explain_why(made) if sentence.startswith(f"{name}: "))


def test_auto_packs_where_the_model_allows_it_and_says_how_that_is_known() -> None:
    made = make_plan(packing_reason="packing is verified for llama")
    assert made.packing and made.layout.micro_tokens and made.layout.micro_samples is None
    assert why(made, "packing") == "packing: several samples per batch row: packing is verified for llama"


def test_auto_takes_the_plain_path_and_says_so() -> None:
    made = make_plan(**LEAKS)
    assert (
        not made.packing and made.layout.micro_samples and made.layout.micro_tokens is None and made.attention == "sdpa"
    )
    assert why(made, "packing") == "packing: no, one sample per batch row: packed documents see each other"


def test_an_explicit_wish_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"data.packing requires packed samples, but llama cannot") as caught:
        make_plan(True, **LEAKS)
    assert "see each other" in caught.value.why and "data.packing=false" in caught.value.fix
    assert not make_plan(False, **LEAKS).packing


@pytest.mark.parametrize("batch", [{"loss_tokens": 4096}, {"micro_tokens": 4096}])
def test_keys_that_need_packs_are_refused_too(batch: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"batch.{next(iter(batch))} requires packed samples"):
        make_plan(batch=batch, **LEAKS)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("packing", [True, False])
def test_soft_capped_scores_are_computed_blockwise_everywhere(gpus: int, packing: bool) -> None:
    made = make_plan(packing, gpus=gpus, attention_softcap=50.0)
    assert made.attention == "blockwise" and "soft-capped at 50" in why(made, "attention")


@pytest.mark.parametrize(("gpus", "kind", "why_so"), [(0, "blockwise", "sinks, as there is no GPU"), (1, "varlen", "")])
@pytest.mark.parametrize("packing", [True, False])
def test_sinks_are_never_left_to_sdpa(gpus: int, kind: str, why_so: str, packing: bool) -> None:
    made = make_plan(packing, gpus=gpus, attention_sinks=True, head_dim=64)
    assert made.attention == kind and why_so in why(made, "attention")
