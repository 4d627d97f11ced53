"""What the plan says of products in fp8: where there are none, and what codes take, against arithmetic by hand."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.core.limits import GIB
from manyhands.core.machine import GpuArchitecture
from manyhands.facts.types import GpuFacts, HostFacts
from manyhands.planner.memory import terms as memory
from manyhands.planner.memory.activations import block_bytes_per_token
from manyhands.planner.search import plan
from tests.planner.examples import facts, llama_1b, llama_8b, run_config
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
