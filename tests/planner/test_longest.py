"""``plan --longest``: the answer fits, the next length does not, and other keys act as in any plan."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.core.limits import MLP_TILE_TOKENS
from manyhands.facts.types import ModelFacts
from manyhands.planner import candidates
from manyhands.planner.longest import LENGTH_STEP, LONGEST
from manyhands.planner.search import plan, plan_longest
from manyhands.planner.text import describe_longest
from tests.planner.examples import GIB, data_facts, facts, llama_1b, llama_8b, model_facts, run_config


def planned(config: Any, given: Any, length: int) -> Any:
    data = data_facts(num_samples=8, mean=length - 1, longest=length)
    data = data.model_copy(update={"num_validation_tokens": 0, "num_validation_samples": 0})
    longer = config.model_copy(update={"data": config.data.model_copy(update={"max_length": length})})
    return plan(longer, given.model_copy(update={"data": data}))


@pytest.mark.parametrize(
    ("model", "gpus", "keys"),
    [
        (llama_1b(), 1, {"method__name": "lora"}),
        (llama_8b(), 1, {"method__name": "qlora", "parallel__activation_checkpointing": "full"}),
        (llama_8b(), 4, {"method__name": "full", "parallel__context_degree": "auto"}),
    ],
)
def test_the_answer_fits_and_the_next_step_does_not(model: ModelFacts, gpus: int, keys: dict[str, Any]) -> None:
    config = run_config(**keys, data__packing=True, batch__samples=1)
    given = facts(model, gpus=gpus, gpu_bytes=60 * GIB, host_bytes=1024 * GIB)
    found = plan_longest(config, given)
    assert found.length % LENGTH_STEP == 0 and found.next_length == found.length + LENGTH_STEP
    layout = found.plan.layout
    assert found.plan.memory.fits and layout.full_micro_tokens * layout.mesh.context >= found.length
    assert layout.mesh.context == gpus, "the longest sample is one that all GPUs divide"
    assert planned(config, given, found.length).memory.fits
    with pytest.raises(UserError, match="does not fit"):
        planned(config, given, found.length + LENGTH_STEP)
    more = plan_longest(config, facts(model, gpus=gpus, gpu_bytes=120 * GIB, host_bytes=1024 * GIB))
    assert more.length > 1.5 * found.length
    text = describe_longest(found, given)
    assert f"{found.length:,} tokens on {gpus} GPU" in text and f"{found.next_length:,} tokens do not fit" in text


def test_what_fits_in_any_case_is_the_longest_that_is_tried() -> None:
    given = facts(model_facts(head_dim=16), gpus=1)
    found = plan_longest(run_config(data__packing=True), given)
    assert (found.length, found.next_length, found.refusal) == (LONGEST, None, None)
    assert "nothing longer was tried" in describe_longest(found, given)
    assert "made for 131,072 positions" in describe_longest(found, given)


@pytest.mark.parametrize(
    ("host_gib", "positions", "expected"),
    [
        (1024, 2**20, "its smallest layout needs"),  # the device, with activations in host memory
        (32, 2**20, "activations in host memory would take"),
        (1024, 2**15, "the limit is the model's: it was made for 32,768 positions"),
    ],
)
def test_the_limit_that_binds_is_named(host_gib: int, positions: int, expected: str) -> None:
    config = run_config(method__name="lora", data__packing=True, batch__samples=1)
    model = llama_8b().model_copy(update={"max_positions": positions})
    given = facts(model, gpus=1, gpu_bytes=60 * GIB, host_bytes=host_gib * GIB)
    found = plan_longest(config, given)
    text, terms = describe_longest(found, given), found.plan.memory.terms
    assert expected in text and found.plan.layout.offload_activations
    staying = found.plan.layout.layers_on_device
    assert (f"activations but for the last {staying} layers in host memory" in text) is (host_gib == 32)
    assert ("the model's" in text) is (positions < found.length)
    assert found.refusal is not None and any(line.startswith("activations:") for line in found.refusal.details)
    if host_gib == 32:  # 19 blocks' inputs of 192,768 tokens, 1.47 GiB each; 90 % of 32 GiB are 28.8
        assert "and there are 28.8 GiB of it" in text and terms["activations"] > 0


@pytest.mark.parametrize(("host_gib", "lengths"), [(16, (116_736, 208_896)), (1024, (176_896, 323_328))])
def test_tiles_of_mlps_let_the_longest_sample_grow(
    host_gib: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA of an 8B model on 60 GiB, a block's input kept of each of 32, on the device or not. In KiB a token a block
    needs 196 at work, of which 140 are the MLP's: gate, up, product and two gradients of 14,336 values.
    """
    config = run_config(method__name="lora", data__packing=True, batch__samples=1)
    given = facts(llama_8b(), gpus=1, gpu_bytes=60 * GIB, host_bytes=host_gib * GIB)
    tiled = plan_longest(config, given)
    assert "MLPs by tiles" in describe_longest(tiled, given) and tiled.plan.layout.mlp_tile_tokens == MLP_TILE_TOKENS
    assert not planned(config, given, 65_536).layout.mlp_tile_tokens, "which fits without"
    monkeypatch.setattr(candidates, "can_tile", lambda setup: False)
    assert (plan_longest(config, given).length, tiled.length) == lengths


def test_a_key_that_bounds_the_length_is_the_reason() -> None:
    config = run_config(data__packing=True, batch__micro_tokens=8192)
    found = plan_longest(config, facts(model_facts(head_dim=16), gpus=1))
    assert found.length == 8192 and found.refusal is not None and found.refusal.where == "batch.micro_tokens"


def test_a_model_that_fits_with_no_sample_is_refused() -> None:
    with pytest.raises(UserError, match="does not fit"):
        plan_longest(run_config(method__name="full"), facts(llama_8b(), gpus=1, gpu_bytes=8 * GIB))
