"""Plans for GPUs that are not here, for AMD's, and for a machine whose GPUs cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.facts.gpu_kinds import describe_host, load_kinds, parse_gpus
from manyhands.facts.types import Facts, GpuFacts, HostFacts, UnusableGpus
from manyhands.planner import candidates
from manyhands.planner.hardware import AMD_ENVIRONMENT
from manyhands.planner.search import plan
from manyhands.planner.text import explain, explain_plan
from manyhands.planner.types import Plan, reason
from tests.planner.examples import data_facts, facts, llama_8b, model_facts, run_config

KINDS = [kind.name for kind in load_kinds()]


def facts_for(gpus: str, **more: Any) -> Facts:
    return facts(more.pop("model", None) or llama_8b(), **more).model_copy(
        update={"host": describe_host(parse_gpus(gpus))}
    )


def reasons(made: Plan) -> dict[str, str]:
    return {reason.code: explain(reason) for reason in made.why}


def real(host: HostFacts) -> HostFacts:
    """The same figures as a driver would report them on a machine that is there."""
    assert host.kind is not None
    name = host.kind.driver_names[0]
    gpus = tuple(GpuFacts(**gpu.model_dump(exclude={"name"}), name=name) for gpu in host.gpus)
    return host.model_copy(update={"gpus": gpus, "is_here": True, "kind": None})


@pytest.mark.parametrize("gpus", ["8xH200", "H100-4x", "MI300X", "2xRTX4090", "V100-32GB-8x", "8xMI325X"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_plan_is_that_of_the_same_gpus_here(gpus, method):
    absent = facts_for(gpus)
    here = absent.model_copy(update={"host": real(absent.host)})
    config = run_config(method__name=method)
    one, other = plan(config, absent), plan(config, here)
    assert one.memory == other.memory
    assert one.layout == other.layout
    assert one.candidates == other.candidates


def test_it_says_what_is_known_and_what_is_assumed():
    said = reasons(plan(run_config(), facts_for("2x4xH100-80GB")))
    assert "2 machines with 4 × H100-80GB (not on this machine): 79.6 GiB each (driver: nvidia-smi)" in said["hardware"]
    assert "79.1 GiB (driver: torch" in said["hardware"]
    assert "989 TFLOP/s in bfloat16" in said["figures"] and "(datasheet: NVIDIA H100" in said["figures"]
    assert "12 cores and 128.0 GiB of host memory per GPU" in said["assumed"]
    assert "links between machines" in said["assumed"] and "disk unknown" in said["assumed"]
    assert said["device"] == "device: 8 GPUs"
    assert "measured: docs/results.md" in reasons(plan(run_config(), facts_for("H200")))["figures"]


def test_gpus_that_are_here_take_their_figures_from_the_same_table():
    host = describe_host(parse_gpus("2xH200")).model_copy(update={"is_here": True})
    said = reasons(plan(run_config(), facts(llama_8b()).model_copy(update={"host": host})))
    assert "measured: docs/results.md" in said["figures"]
    assert not {"hardware", "assumed"} & said.keys()


def test_two_machines_are_one_world_with_a_copy_a_machine():
    made = plan(run_config(parallel__strategy="hsdp"), facts_for("2x4xH100"))
    assert (made.layout.mesh.replicate, made.layout.mesh.shard) == (2, 4)
    auto = plan(run_config(method__name="full"), facts_for("2x4xH100"))
    assert auto.layout.world_size == 8
    assert "hsdp" in {candidate.layout.strategy for candidate in auto.candidates}
    one = plan(run_config(method__name="full"), facts_for("8xH100"))
    assert "hsdp" not in {candidate.layout.strategy for candidate in one.candidates}


def test_more_processes_than_gpus_on_all_machines_are_refused():
    with pytest.raises(UserError, match=r"parallel\.gpus is 9, but 8 GPUs are visible"):
        plan(run_config(parallel__gpus=9), facts_for("2x4xH100"))
    with pytest.raises(UserError, match=r"the plan is for GPUs, but parallel\.device is cpu"):
        plan(run_config(parallel__device="cpu"), facts_for("2x4xH100"))


@pytest.mark.ci
@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    few=st.integers(1, 8),
    factor=st.integers(2, 4),
    method=st.sampled_from(["lora", "qlora", "full"]),
)
def test_more_gpus_of_a_kind_never_forbid_a_run(kind, few, factor, method):
    config = run_config(method__name=method, batch__samples=64)
    data = data_facts(num_samples=2000)
    try:
        plan(config, facts_for(f"{few}x{kind}", data=data))
    except UserError as error:
        assert "does not fit" in str(error)
        return
    made = plan(config, facts_for(f"{few * factor}x{kind}", data=data))
    assert made.memory.fits


def test_a_plan_for_gpus_elsewhere_costs_no_more_than_one_for_here(monkeypatch):
    evaluated = []
    evaluate = candidates.Limits.evaluate
    monkeypatch.setattr(candidates.Limits, "evaluate", lambda *given: evaluated.append(1) or evaluate(*given))
    absent = facts_for("64x8xH200")
    plan(run_config(method__name="full"), absent)
    elsewhere = len(evaluated)
    plan(run_config(method__name="full"), absent.model_copy(update={"host": real(absent.host)}))
    assert 0 < elsewhere == len(evaluated) - elsewhere
    assert elsewhere < 1_000  # some 50 microseconds each


def test_figures_are_read_from_the_table_once():
    load_kinds.cache_clear()
    for gpus in ("8xH200", "8xH100", "8xMI300X"):
        describe_host(parse_gpus(gpus))
    assert load_kinds.cache_info().misses == 1


# -- AMD


def test_amds_gpus_take_the_paths_of_torch_and_say_that_nothing_was_run():
    made = plan(run_config(), facts_for("8xMI300X"))
    said = reasons(made)
    assert made.attention == "sdpa" and "varlen is untested on MI300X" in said["attention"]
    assert "attention_kernels" not in made.converters
    assert made.layout.compute_dtype == "bfloat16"
    assert "untested on AMD GPUs" in said["untried"]
    assert plan(run_config(), facts_for("8xH200")).attention == "varlen"
    assert "untried" not in reasons(plan(run_config(), facts_for("8xH200")))


@pytest.mark.parametrize("gpus", ["MI300X", "8xMI355X", "MI210"])
def test_fp8_is_refused_on_amd_by_name(gpus):
    with pytest.raises(UserError) as caught:
        plan(run_config(kernels__linear="fp8"), facts_for(gpus))
    assert "kernels.linear" in str(caught.value) and "e4m3fnuz" in str(caught.value)
    assert parse_gpus(gpus).kind.name in str(caught.value)


def test_amds_variables_are_for_amd_alone_and_are_shown():
    amd, nvidia = plan(run_config(), facts_for("2xMI300X")), plan(run_config(), facts_for("2xH200"))
    assert amd.environment.items() >= AMD_ENVIRONMENT.items()
    assert AMD_ENVIRONMENT == {
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "HSA_ENABLE_SDMA": "1",
        "HSA_FORCE_FINE_GRAIN_PCIE": "1",
    }
    assert not [name for name in nvidia.environment if name.startswith("HSA_")]
    assert amd.environment["PYTHONHASHSEED"] == nvidia.environment["PYTHONHASHSEED"] == "42"
    assert "HSA_NO_SCRATCH_RECLAIM=1" in reasons(amd)["environment"]
    assert "unless already set" in reasons(amd)["environment"]


def test_on_a_cpu_neither_is_set():
    made = plan(run_config(), facts(model_facts()))
    assert not [name for name in made.environment if name.startswith(("HSA_", "PYTORCH_CUDA"))]


def test_gpus_without_bfloat16_compute_in_float32():
    made = plan(run_config(), facts_for("8xV100-32GB", model=model_facts()))
    assert made.layout.compute_dtype == "float32" and made.attention == "sdpa"


# -- GPUs that cannot be used

BROKEN = UnusableGpus(
    found="2 AMD GPUs (/dev/dri/renderD128 to /dev/dri/renderD129)", why="no driver", fix="install it"
)


def broken(**keys: Any) -> Plan:
    host = facts().host.model_copy(update={"unusable_gpus": BROKEN})
    return plan(run_config(**keys), facts(model_facts()).model_copy(update={"host": host}))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_cannot_be_used_are_an_error_never_a_cpu_run(device):
    with pytest.raises(UserError) as caught:
        broken(parallel__device=device)
    for part in ("2 AMD GPUs", "none can be used", "no driver", "install it", "parallel.device=cpu"):
        assert part in str(caught.value)


def test_the_cpu_is_taken_where_it_is_asked_for():
    assert broken(parallel__device="cpu").layout.device == "cpu"
    assert explain_plan(broken(parallel__device="cpu"))


@pytest.mark.parametrize(
    ("num_gpus", "said"),
    [(0, "CPU, as no GPU is visible"), (1, "GPU, as 1 GPU is visible"), (8, "GPU, as 8 GPUs are visible")],
)
def test_the_device_is_said_in_the_right_number(num_gpus, said):
    values = {"device": "cuda" if num_gpus else "cpu", "num_gpus": num_gpus, "asked": False}
    assert explain(reason("device", **values)).endswith(said)
    elsewhere = explain(reason("device", device="cuda", num_gpus=num_gpus or 1, asked=False, is_here=False))
    assert elsewhere.endswith("8 GPUs" if num_gpus == 8 else "1 GPU")
