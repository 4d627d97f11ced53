"""What the plan says of products in fp8: where there are none, and what codes take, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.types import GpuFacts, HostFacts
from manyhands.plan import memory
from manyhands.plan.memory import GIB, Setup
from manyhands.plan.search import plan
from tests.plan.examples import facts, llama_1b, llama_8b, run_config

LORA = Setup(
    model=llama_8b(), num_adapter_parameters=1000, adapter_rank=16, adapter_dropout=False, device="cuda", world_size=1, strategy="single",
    reshard_after_forward=False, activation_checkpointing="none", compile=True, compute_bytes=2, master_bytes=4, frozen_bytes=2, micro_tokens=10, builds_mask=False,
)  # fmt: skip
LINEARS = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336


def test_frozen_whole_weights_have_two_bytes_of_codes_beside_them() -> None:
    assert memory.weights(replace(LORA, fp8_blocks=True)) - memory.weights(LORA) == 2 * 32 * LINEARS
    assert memory.dequantised(replace(LORA, fp8_blocks=True)) == 0


@pytest.mark.parametrize(
    "change", [{"num_adapter_parameters": 0}, {"strategy": "fsdp", "world_size": 4}, {"offload": "all"}]
)
def test_weights_that_are_trained_or_in_shards_are_coded_where_they_are_used(change: dict[str, object]) -> None:
    setup = replace(LORA, **change)  # type: ignore[arg-type]
    assert memory.weights(replace(setup, fp8_blocks=True)) == memory.weights(setup)
    assert memory.dequantised(replace(setup, fp8_blocks=True)) == 2 * 4096 * 14336  # gate and up, a byte each


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
    assert any(line.startswith("linear: products of the blocks in fp8 while training; plain") for line in on_gpu.why)
    on_cpu = plan(run_config(kernels__linear="fp8", parallel__device="cpu"), facts())
    assert any("emulated in float32" in line for line in on_cpu.why)
