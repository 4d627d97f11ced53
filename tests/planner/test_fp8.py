"""What the plan says of products in fp8: where there are none, and what codes take, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.core.limits import GIB
from manyhands.core.machine import GpuArchitecture
from manyhands.facts.types import Facts, GpuFacts, HostFacts, ModelFacts
from manyhands.planner.layout import change
from manyhands.planner.memory import terms as memory
from manyhands.planner.memory.activations import block_bytes_per_token
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, llama_1b, llama_8b, mixture, qwen_30b_a3b, run_config
from tests.support.plans import change_input, explain_why, make_input

LORA = make_input(llama_8b(), num_adapter_parameters=1000, adapter_rank=16)
LINEARS = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336


def test_frozen_whole_weights_have_two_bytes_of_codes_beside_them() -> None:
    assert memory.weights(change_input(LORA, fp8_blocks=True)) - memory.weights(LORA) == 2 * 32 * LINEARS
    assert memory.dequantized(change_input(LORA, fp8_blocks=True)) == 0


def test_weights_in_fp8_alone_take_a_byte_a_value_and_four_an_output() -> None:
    alone = change_input(LORA, fp8_blocks=True, fp8_weights=True)
    outputs = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert memory.weights(LORA) - memory.weights(alone) == 32 * (LINEARS - 4 * outputs)
    assert memory.dequantized(alone) == 2 * 4096 * 14336  # gate and up transposed for dX


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_products_of_groups_in_fp8_are_planned_for_hopper(capability: tuple[int, int], expected: bool) -> None:
    assert GpuArchitecture("nvidia", capability).multiplies_fp8_groups == expected


def test_weights_in_fp8_alone_are_copied_and_never_sharded() -> None:
    config = run_config(kernels__linear="fp8", model__frozen_dtype="fp8")
    made = plan(config, facts(model=llama_8b(), gpus=4))
    assert {candidate.layout.strategy for candidate in made.candidates} == {"ddp"}
    assert "fp8_weights" in made.converters
    with pytest.raises(UserError, match=r"model\.frozen_dtype: fp8 and this parallel\.strategy"):
        plan(
            config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": "fsdp"})}),
            facts(gpus=4),
        )


@pytest.mark.parametrize(
    "change", [{"num_adapter_parameters": 0}, {"strategy": "fsdp", "world_size": 4}, {"offload": "all"}]
)
def test_weights_that_are_trained_or_in_shards_are_coded_where_they_are_used(change: dict[str, object]) -> None:
    setup = change_input(LORA, **change)  # type: ignore[arg-type]
    assert memory.weights(change_input(setup, fp8_blocks=True)) == memory.weights(setup)
    assert memory.dequantized(change_input(setup, fp8_blocks=True)) == 2 * 4096 * 14336  # gate and up, a byte each


def test_an_old_gpu_and_no_gpu_are_refused_with_what_to_do() -> None:
    config = run_config(kernels__linear="fp8")
    old = GpuFacts(index=0, name="NVIDIA A100", memory_bytes=80 * GIB, free_bytes=80 * GIB, compute_capability=(8, 0))
    host = HostFacts(gpus=(old,), num_cores=8, memory_bytes=64 * GIB, free_memory_bytes=64 * GIB)
    for known, why in (
        (facts(model=llama_1b()).model_copy(update={"host": host}), "A100 has compute capability 8.0"),
        (facts(), "no GPU"),
    ):
        with pytest.raises(UserError, match=r"kernels\.linear: fp8") as refused:
            plan(config, known)
        assert why in refused.value.why and "kernels.linear: compute_dtype" in refused.value.fix


def test_what_is_done_is_said() -> None:
    on_gpu = plan(run_config(kernels__linear="fp8"), facts(model=llama_1b(), gpus=1))
    assert any(
        line.startswith("linear: matmuls of the blocks in fp8 during training; evaluation")
        for line in explain_why(on_gpu)
    )
    on_cpu = plan(run_config(kernels__linear="fp8", parallel__device="cpu"), facts())
    assert any("emulated in float32" in line for line in explain_why(on_cpu))


def test_what_norms_of_queries_and_keys_read_is_not_counted_twice() -> None:
    """q, k and v are one result in fp8, which v keeps whole: the same tensor that the norms keep."""
    normed = change_input(LORA, model=llama_8b().model_copy(update={"head_norm_elements": 4096 + 1024}))
    plain, without = (
        block_bytes_per_token(change_input(s, fp8_blocks=True, fuses_modules=True)) for s in (LORA, normed)
    )
    assert plain - without == 2 * (4096 + 1024)
    assert block_bytes_per_token(LORA) == block_bytes_per_token(normed)


# ---- frozen experts, kept transposed as well -------------------------------------------------------------------------

VALUES = 48 * 128 * 3 * 2048 * 768


def mixture_facts(gib: int = 140, *, gpus: int = 1, model: ModelFacts | None = None, **gpu: Any) -> Facts:
    given = facts(model or qwen_30b_a3b(), gpus=gpus, gpu_bytes=gib * GIB, data=data_facts(mean=4096.0, longest=4096))
    each = tuple(one.model_copy(update=gpu) for one in given.host.gpus)
    return given.model_copy(update={"host": given.host.model_copy(update={"gpus": each})})


def plan_fp8(given: Facts, rows: int = 2, **keys: Any) -> Plan:
    fp8 = {"kernels__linear": "fp8", "model__frozen_dtype": "fp8", "batch__samples": rows}
    return plan(run_config(**fp8 | keys), given)


def test_experts_are_kept_transposed_where_memory_is_left() -> None:
    """A byte a value more, and no second way through memory; else the plan of a smaller GPU."""
    made, small = plan_fp8(mixture_facts(140)), plan_fp8(mixture_facts(80))
    assert not small.layout.keeps_transposed and made.layout == change(small.layout, keeps_transposed=True)
    assert made.memory.terms["weights"] - small.memory.terms["weights"] == VALUES
    assert made.step_s is not None and small.step_s is not None and made.time is not None and small.time is not None
    assert small.step_s - made.step_s == pytest.approx(small.time.terms["dequantization"], rel=1e-3)
    assert "dequantization" not in made.time.terms and not explain_why(small, "transposed")
    (line,) = explain_why(made, "transposed")
    assert line == (
        "frozen experts: their fp8 values are also kept transposed for the backward pass, in 27.0 GiB that would be "
        f"left free; saves {1e3 * (small.step_s - made.step_s):.1f} ms a step"
    )


def test_a_stack_that_is_kept_transposed_is_not_transposed_for_a_product() -> None:
    setup = make_input(qwen_30b_a3b(), num_adapter_parameters=1000, fp8_blocks=True, fp8_weights=True, fp8_groups=True)
    kept = change_input(setup, keeps_transposed=True)
    assert memory.weights(kept) - memory.weights(setup) == VALUES
    assert memory.dequantized(setup) == 128 * 1536 * 2048 and memory.dequantized(kept) == 2 * 4096 * 2048  # q and o


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("gib", [48, 80, 100, 120, 140])
def test_nothing_else_of_a_plan_changes_for_it(gib: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_fp8(mixture_facts(gib), rows)
    monkeypatch.setattr("manyhands.planner.candidates.keep_transposed", lambda candidate, *_: candidate)
    plain = plan_fp8(mixture_facts(gib), rows)
    assert change(made.layout, keeps_transposed=False) == plain.layout and made.memory.is_safe == plain.memory.is_safe


@pytest.mark.parametrize(
    ("given", "keys", "expected"),
    [
        ({"gpus": 2}, {"rows": 4}, True),
        ({"model": llama_8b()}, {}, False),
        ({}, {"kernels__linear": "compute_dtype", "model__frozen_dtype": "auto"}, False),
        ({}, {"model__frozen_dtype": "auto"}, False),
        ({"compute_capability": (8, 9)}, {}, False),
        ({}, {"parallel__offload_activations": True}, False),
        ({"model": mixture()}, {"parallel__device": "cpu", "model__dtype": "bfloat16", "method__rank": 4}, False),
    ],
)
def test_only_experts_that_multiply_in_fp8_on_a_gpu_are(
    given: dict[str, Any], keys: dict[str, Any], expected: bool
) -> None:
    assert plan_fp8(mixture_facts(**given), **keys).layout.keeps_transposed == expected


def test_transposed_values_go_first_where_memory_runs_out() -> None:
    given = mixture_facts()
    first = plan_fp8(given)
    config = run_config(kernels__linear="fp8", model__frozen_dtype="fp8", batch__samples=2)
    second = plan(config, given, number=2, cause="out_of_memory", before=first)
    assert second.layout == change(first.layout, keeps_transposed=False)
    third = plan(config, given, number=3, cause="out_of_memory", before=second)
    assert 2 * third.layout.full_micro_tokens <= second.layout.full_micro_tokens
