"""What is proposed where nothing fits: every single change was planned, and fits."""

from __future__ import annotations

import re

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.types import Facts
from manyhands.planner.search import plan
from tests.planner.examples import GIB, data_facts, facts, llama_1b, llama_8b, run_config

LONG = data_facts(num_samples=5000, mean=3000, longest=32_768)


def machine(gpus: str, **more) -> Facts:
    return facts(more.pop("model", llama_8b()), data=more.pop("data", LONG)).model_copy(
        update={"host": describe_host(parse_gpus(gpus))}
    )


def refused(config, the_facts) -> str:
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(config, the_facts)
    return caught.value.fix


def test_full_training_on_one_gpu_is_told_of_adapters_of_host_memory_and_of_how_many_gpus():
    fix = refused(run_config(method__name="full"), machine("1xH100-80GB"))
    assert "use method.name=lora (single, " in fix and " s a step)" in fix
    (count,) = map(int, re.findall(r"use more GPUs: (\d+) \(fsdp", fix))
    plan(run_config(method__name="full"), machine(f"{count}xH100-80GB"))
    with pytest.raises(UserError):
        plan(run_config(method__name="full"), machine(f"{count - 1}xH100-80GB"))


def test_samples_are_to_be_shortened_to_a_length_that_fits():
    config = run_config(data__max_length=32_768)
    fix = refused(config, machine("1xRTX4090"))
    (length,) = map(int, re.findall(r"data\.max_length=(\d+)", fix))
    assert 512 <= length < 32_768
    shorter = LONG.model_copy(update={"max_length": length, "mean_length": min(3000.0, length)})
    assert plan(run_config(data__max_length=length), machine("1xRTX4090", data=shorter)).memory.fits


def test_keys_that_fix_the_layout_are_to_be_freed():
    config = run_config(parallel__activation_checkpointing="none", batch__micro_tokens=32_768)
    fix = refused(config, machine("1xH100-80GB"))
    assert "let the plan choose: parallel.activation_checkpointing=auto" in fix


def test_what_does_not_help_is_not_proposed():
    fix = refused(run_config(method__name="full"), machine("1xRTX4090"))
    assert "max_length" not in fix and "one of these fits: " in fix
    tiny = facts(llama_8b(), gpus=1, gpu_bytes=2 * GIB, data=LONG, host_bytes=2 * GIB)
    assert refused(run_config(method__name="qlora"), tiny).startswith("use a smaller model or GPUs with more memory")


@pytest.mark.ci
def test_two_changes_are_proposed_where_no_single_one_fits_on_the_gpus_that_are_there():
    """8B on GPUs of 7 and 5 GiB, each pair planned again as it is said."""
    short = data_facts(mean=1000, longest=2000)

    def small(count: int, gib: int = 7) -> Facts:
        return facts(llama_8b(), gpus=count, gpu_bytes=gib * GIB, data=short, host_bytes=count * 64 * GIB)

    fix = refused(run_config(method__name="full"), small(1))
    pairs = re.findall(r"use method\.name=(\w+) and keep .*?parallel\.offload=(\w+) \(single", fix)
    assert [method for method, _ in pairs] == ["lora", "qlora"]
    for method, offload in pairs:
        assert plan(run_config(method__name=method, parallel__offload=offload), small(1)).memory.fits
    fix = refused(run_config(method__name="qlora", parallel__context_degree=1), small(2, 5))
    (count,) = map(int, re.findall(r"parallel\.offload=all and use more GPUs: (\d+) \(fsdp", fix))
    whole = run_config(method__name="qlora", parallel__offload="all", parallel__context_degree=1)
    assert plan(whole, small(count, 5)).memory.fits


def test_one_gpu_is_proposed_where_several_hold_more_than_it():
    samples = data_facts(mean=1000, longest=2000)
    fix = refused(
        run_config(method__name="lora", parallel__offload="all"),
        facts(llama_8b(), gpus=2, gpu_bytes=21 * GIB // 4, data=samples, host_bytes=128 * GIB),
    )
    assert "use fewer GPUs: parallel.gpus=1 (single, " in fix


def test_where_host_memory_is_short_changes_that_fit_are_proposed():
    """It named fewer activations, of which none were in host memory."""
    full = {"method__name": "full", "parallel__offload": "all"}
    fix = refused(run_config(**full), machine("1xH100-80GB"))
    assert "activation" not in fix and "use method.name=lora (single, " in fix and "use more GPUs: 2 (fsdp, " in fix
    short = facts(llama_8b(), gpus=2, gpu_bytes=140 * GIB, data=LONG, host_bytes=40 * GIB)
    fix = refused(run_config(**full), short)
    (kind,) = re.findall(r"keep more on the GPUs: parallel\.offload=(\w+) \(fsdp", fix)
    assert plan(run_config(method__name="full", parallel__offload=kind), short).memory.fits


def test_each_kind_of_offloading_that_fits_is_proposed():
    """With states alone in host memory small micro-batches may take longer than with weights there too."""
    fix = refused(
        run_config(method__name="full"), machine("2xT4", model=llama_1b(), data=data_facts(mean=1000, longest=2000))
    )
    seconds = dict(re.findall(r"parallel\.offload=(\w+) \(fsdp, ([\d.]+) s a step", fix))
    assert float(seconds["all"]) < float(seconds["optimizer"])
