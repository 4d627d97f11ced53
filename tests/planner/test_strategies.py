"""Hybrid copies, selective recomputation, reductions and offloading in the plan: what is listed, counted, chosen and
refused.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest

from manyhands.config.checks import check
from manyhands.core.errors import UserError
from manyhands.planner.candidates import Limits
from manyhands.planner.layout import change
from manyhands.planner.memory import host as host_memory
from manyhands.planner.memory import terms as memory
from manyhands.planner.memory.activations import kept_activations, linear_bytes_per_token, moved_bytes
from manyhands.planner.search import base_input, plan
from manyhands.planner.text import explain
from manyhands.planner.types import Plan
from tests.planner.examples import GIB, data_facts, facts, llama_8b, model_facts, run_config
from tests.planner.test_memory import BLOCK, FULL, GRADIENTS, LORA, ROOT
from tests.support.plans import change_input, explain_why

LONG = data_facts(num_samples=5000, mean=3000, longest=4096)
WIDE = model_facts(
    hidden=5120, inner=25600, layers=64, heads=64, kv_heads=8, vocab=151936, head_dim=128, tied=False
)  # 32B


def sentence(made, name: str) -> str:
    return next(text for text in explain_why(made) if text.startswith(f"{name}: "))


def test_hybrid_divides_states_by_the_ranks_of_a_copy():
    eight = change_input(FULL, strategy="hsdp", world_size=8, shard_degree=2, reshard_after_forward=True)
    assert memory.weights(eight) == 4 * 1448 // 2
    assert memory.gathered(eight) == 2 * (ROOT + 2 * BLOCK)


def test_one_copy_over_all_ranks_is_said_as_one():
    made = plan(run_config(parallel__strategy="hsdp", parallel__shard_degree=2), facts(gpus=2))
    assert "one copy, sharded over 2 GPUs, which is what fsdp does" in sentence(made, "strategy")
    made = plan(run_config(parallel__strategy="hsdp", parallel__shard_degree=1), facts(gpus=2))
    assert "a copy on each of 2 GPUs, nothing sharded, which is what ddp does" in sentence(made, "strategy")


def test_auto_takes_hybrid_across_machines_where_a_copy_fits_in_one():
    two_machines = facts(llama_8b(), gpus=8, data=LONG, world_size=16)
    made = plan(run_config(method__name="full"), two_machines)
    assert (made.layout.strategy, made.layout.mesh.shard) == ("hsdp", 8)
    assert "2 copies, each sharded over 8 of 16 GPUs" in sentence(made, "strategy")
    assert {c.layout.strategy for c in made.candidates} == {"ddp", "hsdp", "fsdp"}
    assert any(
        "a full copy per machine fits" in explain(c.reason) for c in made.candidates if c.layout.strategy == "fsdp"
    )
    one_machine = plan(run_config(method__name="full"), facts(llama_8b(), gpus=8, data=LONG))
    assert "hsdp" not in {c.layout.strategy for c in one_machine.candidates}
    small = plan(
        run_config(method__name="full"), facts(llama_8b(), gpus=2, gpu_bytes=60 * GIB, data=LONG, world_size=16)
    )
    assert small.layout.strategy == "fsdp"


def test_shard_ranks_must_divide_the_processes():
    made = plan(run_config(parallel__strategy="hsdp", parallel__shard_degree=2), facts(gpus=4, data=LONG))
    assert (made.layout.strategy, made.layout.mesh.shard, made.layout.world_size) == ("hsdp", 2, 4)
    with pytest.raises(UserError, match="does not divide 6 processes") as caught:
        plan(run_config(parallel__strategy="hsdp", parallel__shard_degree=4), facts(gpus=6, data=LONG))
    assert "set parallel.shard_degree to 3 or 6" in caught.value.fix


def test_selective_keeps_inputs_linear_results_and_attention():
    # q 8, k and v 4, o 8, gate and up 16, attention 8, the input 8; compiled without the last layer's result
    kept = 2 * (8 + 8 + 4 + 4 + 8 + 16 + 16 + 8) + 4 * 2
    assert linear_bytes_per_token(FULL) == kept == 152
    backward = memory.in_the_backward_pass(change_input(FULL, activation_checkpointing="selective"))
    assert backward["activations"] == 10 * (2 * 152 + 216 - 152) + GRADIENTS
    assert linear_bytes_per_token(change_input(FULL, compile=False)) == kept + 2 * 8
    assert linear_bytes_per_token(LORA) == kept + 2 * 4 * 7


def test_recomputation_is_tried_from_the_cheapest_on():
    def recompute(gib: float) -> str:
        config = run_config(batch__micro_tokens=8192, parallel__offload_activations=False)
        machine = facts(llama_8b(), gpus=1, gpu_bytes=int(gib * GIB), data=LONG)
        return plan(config, machine).layout.activation_checkpointing

    found = [recompute(gib) for gib in (64, 50, 30, 23)]
    assert found == ["none", "selective", "except_attention", "full"]
    made = plan(run_config(batch__micro_tokens=8192), facts(llama_8b(), gpus=1, gpu_bytes=50 * GIB, data=LONG))
    assert sentence(made, "activation checkpointing").endswith(
        "are kept; of the last 15 of 32 blocks nothing, because more does not fit"
    )
    reasons = {c.layout.activation_checkpointing: c.reason and explain(c.reason) for c in made.candidates}
    assert "about a third more compute" in reasons["except_attention"] and reasons["none"].startswith("needs ")


def test_what_memory_is_left_is_spent_on_blocks_that_are_recomputed_less():
    """24 GiB: whole blocks must be recomputed, but not all of them."""

    def made(gib: float = 24, **keys: Any) -> Plan:
        return plan(
            run_config(**keys), facts(llama_8b(), gpus=1, gpu_bytes=int(gib * GIB), host_bytes=500 * GIB, data=LONG)
        )

    mixed, uniform = made(), made(parallel__activation_checkpointing="full", parallel__offload_activations=False)
    assert (
        mixed.layout.activation_checkpointing == "except_attention"
        and 4 <= mixed.layout.lighter_layers < 32
        and uniform.layout.lighter_layers == 0
    )
    assert mixed.layout.micro_tokens < uniform.layout.micro_tokens, (
        "smaller packs leave room, and nothing travels with each"
    )
    assert not mixed.layout.offload_activations and mixed.memory.is_safe
    assert f"of the last {mixed.layout.lighter_layers} of 32 blocks only norms" in sentence(
        mixed, "activation checkpointing"
    )
    (chosen,) = (c for c in mixed.candidates if c.chosen)
    assert chosen.layout.lighter_layers == mixed.layout.lighter_layers
    assert "computes_more_again" in {c.reason.code for c in mixed.candidates if c.reason}
    assert made(parallel__offload_activations=True).layout.lighter_layers == 0
    assert made(25).layout.lighter_layers > mixed.layout.lighter_layers, "more memory, fewer recomputed blocks"


@pytest.mark.parametrize("activation_checkpointing", ["selective", "full"])
def test_lighter_layers_lie_between_two_uniform_ways(activation_checkpointing):
    setup = change_input(FULL, activation_checkpointing=activation_checkpointing, model=WIDE)
    lighter = change_input(
        setup, activation_checkpointing={"full": "selective", "selective": "none"}[activation_checkpointing]
    )
    num_layers = setup.model.num_layers
    activations = [
        memory.at_the_loss(change_input(setup, lighter_layers=count))["activations"] for count in range(num_layers)
    ]
    steps = {b - a for a, b in pairwise(activations)}
    assert len(steps) == 1 and activations[0] + num_layers * steps.pop() == memory.at_the_loss(lighter)["activations"]
    one_light = change_input(setup, lighter_layers=1)
    assert memory.in_the_backward_pass(one_light)["activations"] < memory.in_the_backward_pass(lighter)["activations"]


def test_gradients_wait_for_the_last_micro_batch_where_whole_ones_fit():
    roomy = plan(
        run_config(method__name="full", parallel__strategy="fsdp", batch__micro_tokens=4096),
        facts(llama_8b(), gpus=8, data=LONG),
    )
    assert not roomy.layout.reduce_every and roomy.memory.terms["unreduced"] == 4 * llama_8b().num_parameters
    assert "once per step, as unsharded ones fit until then (29.9 GiB)" in sentence(roomy, "reduction")
    tight = plan(
        run_config(method__name="full", parallel__strategy="fsdp"),
        facts(llama_8b(), gpus=8, gpu_bytes=60 * GIB, data=LONG),
    )
    assert tight.layout.reduce_every and tight.memory.terms["unreduced"] == 0
    assert "after every micro-batch" in sentence(tight, "reduction")
    assert not any(text.startswith("reduction") for text in explain_why(plan(run_config(), facts(gpus=2, data=LONG))))


def test_offloaded_states_leave_the_gpu_for_host_memory():
    keys = {"method__name": "full", "batch__micro_tokens": 4096}
    the_facts = facts(llama_8b(), gpus=1, gpu_bytes=100 * GIB, host_bytes=500 * GIB, data=LONG)
    with pytest.raises(UserError, match="does not fit"):
        plan(run_config(**keys), the_facts)
    states = plan(run_config(parallel__offload="optimizer", **keys), the_facts)
    assert states.layout.strategy == "single" and states.memory.terms["optimizer"] < 10 * GIB
    assert states.memory.host_terms.keys() == {"optimizer", "staging"} and states.memory.host_limit == int(
        0.9 * 500 * GIB
    )
    assert "optimizer states in host memory" in sentence(states, "offload")
    everything = plan(run_config(parallel__offload="all", **keys), the_facts).memory
    assert [everything.terms[name] for name in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert everything.host_terms["gradients"] == 4 * llama_8b().num_parameters
    assert everything.total < states.memory.total


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 128256 * 4096 * 4), (4, 128256 * 4096), (16, 2**28)])
def test_of_states_in_host_memory_two_chunks_are_on_the_gpu(ranks, chunk):
    """A chunk holds the largest weight's shard, 256 MiB at least, in float32; AdamW has two states of that size."""
    model = llama_8b()
    one = change_input(FULL, model=model, offload="optimizer")
    setup = one if ranks == 1 else change_input(one, strategy="fsdp", world_size=ranks)
    terms = {"weights": 1, "gradients": 2, "optimizer": 8 * model.num_parameters // ranks}
    assert host_memory.keep_on_device(setup, terms) == {"weights": 1, "gradients": 2, "optimizer": 2 * 2 * chunk}
    on_gpu = dataclasses.replace(setup, layout=dataclasses.replace(setup.layout, device="cuda"))
    mapped = host_memory.keep_on_device(on_gpu, terms | {"overhead": 0})["overhead"]
    pinned = host_memory.estimate_host_terms(on_gpu, terms)["optimizer"]
    assert mapped == math.ceil(pinned / 512), "8 bytes of page tables for each 4 KiB of pinned memory"
    few = terms | {"optimizer": 100}  # never more than there are
    assert host_memory.keep_on_device(change_input(setup, model=model_facts()), few)["optimizer"] == 100


def test_what_does_not_fit_into_host_memory_is_refused():
    config = run_config(method__name="full", parallel__offload="all", batch__micro_tokens=4096)
    with pytest.raises(UserError, match="what is kept in host memory does not fit") as caught:
        plan(config, facts(llama_8b(), gpus=2, host_bytes=100 * GIB, data=LONG))
    assert any(line.startswith("optimizer: 29.9 GiB") for line in caught.value.details)


def test_activations_move_but_for_what_passes():
    keys = {"parallel__activation_checkpointing": "full", "batch__micro_tokens": 16384, "method__name": "qlora"}
    the_facts = facts(WIDE, gpus=1, host_bytes=500 * GIB, data=LONG)
    kept, moved = (plan(run_config(parallel__offload_activations=on, **keys), the_facts).memory for on in (False, True))
    inputs = 64 * 16384 * 2 * 5120
    assert kept.terms["activations"] - moved.terms["activations"] == inputs - (4 + 1) * inputs // 64
    assert moved.host_terms["activations"] == inputs  # 160 MiB each: two pieces of 64 MiB and one of 32


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_fewest_blocks_move_where_the_host_has_no_room_for_all(gpus: int) -> None:
    """8B LoRA, 524,288 tokens: 4 GiB of each block's input, on GPUs of 140 GiB and a host that its ranks share."""
    one = data_facts(num_samples=8, mean=2**19, longest=2**19, num_validation_samples=0, num_validation_tokens=0)
    keys = {"method__name": "lora", "data__packing": True, "batch__samples": gpus, "data__max_length": 2**19}

    def made(host_gib: int, **more: Any) -> Any:
        given = facts(llama_8b(), gpus=gpus, host_bytes=gpus * host_gib * GIB, data=one)
        return plan(run_config(**keys, parallel__context_degree=1, **more), given)

    some, everything = made(112), made(160)
    staying, moved = some.layout.layers_on_device, some.memory.host_terms["activations"]
    assert some.memory.is_safe and some.layout.offload_activations and 0 < staying < 32
    assert moved == (32 - staying) * 4 * GIB <= some.memory.host_limit == int(0.9 * 112 * GIB)
    assert made(2 * moved // GIB // 3).layout.repeated_inputs > some.layout.repeated_inputs == 0
    assert f"but for those of the last {staying} blocks" in sentence(some, "offload")
    assert everything.layout.layers_on_device == 0 and everything.step_s > some.step_s
    limits = Limits(some.memory.limit, some.memory.host_limit, 0, gpus)
    one_more = change(some.layout, layers_on_device=staying + 1)
    base = base_input(run_config(**keys), facts(llama_8b(), gpus=gpus, data=one))
    assert not limits.evaluate_memory(base, one_more).memory.is_safe
    with pytest.raises(UserError, match="what is kept in host memory does not fit"):
        made(112, parallel__offload_activations=True)


def test_the_fewest_inputs_are_computed_again_where_host_and_gpu_cannot_hold_all() -> None:
    """8B LoRA, 786,432 tokens on one GPU: 6 GiB of each of 32 inputs, of which 15 fit the host and few the GPU."""
    length = 3 * 2**18
    one = data_facts(num_samples=8, mean=length, longest=length, num_validation_samples=0, num_validation_tokens=0)
    keys = {"method__name": "lora", "data__packing": True, "batch__samples": 1, "data__max_length": length}

    def made(host_gib: int, **more: Any) -> Any:
        return plan(run_config(**keys, **more), facts(llama_8b(), gpus=1, host_bytes=host_gib * GIB, data=one))

    little, some, whole = made(100), made(150), made(260)
    repeated = [each.layout.repeated_inputs for each in (little, some, whole)]
    assert 16 >= repeated[0] > repeated[1] > repeated[2] == 0
    for each in (little, some):
        again, staying = each.layout.repeated_inputs, each.layout.layers_on_device
        kept_here = staying - max(0, again - (32 - staying) // 2)
        assert each.memory.host_terms["activations"] == (32 - again - kept_here) * 6 * GIB
        assert each.memory.is_safe and f"and {again} blocks a second time" in sentence(each, "activation checkpointing")
    per_block = (little.step_s - some.step_s) / (repeated[0] - repeated[1])
    terms = some.time.terms
    assert per_block == pytest.approx(terms["recomputation"] / (32 + repeated[1]), rel=0.02)
    with pytest.raises(UserError, match=r"would take 66\.0 GiB per rank, and there are 57\.6 GiB"):
        made(64)


def test_a_million_tokens_fit_one_gpu_whose_host_holds_their_inputs() -> None:
    """8B LoRA, 8 GiB of each of 32 inputs; 28 GiB less than attention's backward pass takes for all heads at once."""
    one = data_facts(num_samples=8, mean=2**20, longest=2**20, num_validation_samples=0, num_validation_tokens=0)
    keys = {"method__name": "lora", "data__packing": True, "batch__samples": 1, "data__max_length": 2**20}
    made = plan(run_config(**keys), facts(llama_8b(), gpus=1, host_bytes=260 * GIB, data=one))
    layout = made.layout
    assert made.memory.is_safe and layout.activation_checkpointing == "full" and layout.mlp_tile_tokens
    assert made.memory.host_terms["activations"] == (32 - layout.layers_on_device) * 8 * GIB


def test_lighter_layers_stay_on_the_gpu_where_those_of_all_do_not_fit() -> None:
    """8B LoRA, 131,072 tokens: what 24 of 32 blocks keep moves, and the last 8 keep results of their linear layers."""
    one = data_facts(num_samples=8, mean=2**17, longest=2**17, num_validation_samples=0, num_validation_tokens=0)
    keys = {"method__name": "lora", "data__packing": True, "batch__samples": 1, "data__max_length": 2**17}
    given = facts(llama_8b(), gpus=1, host_bytes=128 * GIB, data=one)
    mixed, uniform = (
        plan(run_config(**keys, parallel__activation_checkpointing=mode), given)
        for mode in ("auto", "except_attention")
    )
    layout, memory_of = mixed.layout, mixed.memory
    assert 4 <= layout.lighter_layers == layout.layers_on_device < 32 and layout.offload_activations
    moved, everything = memory_of.host_terms["activations"], uniform.memory.host_terms["activations"]
    assert moved == everything * (32 - layout.lighter_layers) // 32
    assert uniform.memory.total < memory_of.total and memory_of.is_safe and mixed.step_s < 0.99 * uniform.step_s
    assert uniform.layout.layers_on_device == 0


@pytest.mark.parametrize(
    ("repeated", "staying", "moved", "kept"),
    [(0, 0, 4, 0), (0, 1, 3, 1), (1, 0, 3, 0), (2, 0, 2, 1), (1, 1, 2, 1), (2, 1, 2, 1), (2, 2, 1, 2), (1, 3, 1, 2)],
)
def test_inputs_that_are_kept_are_counted(repeated: int, staying: int, moved: int, kept: int) -> None:
    """Of four blocks. ``kept``: on the device when the last block begins, its own input too where it was made again."""
    one = change_input(LORA, model=model_facts(layers=4), activation_checkpointing="full", device="cuda")
    setup = change_input(
        one, full_micro_tokens=2**31, offload_activations=True, layers_on_device=staying, repeated_inputs=repeated
    )
    size = 2**31 * 2 * 8
    assert moved_bytes(setup) == moved * size
    later = (min(moved, 2) + (repeated > 0)) * size  # its own, one that comes, and one that is made of its own
    assert kept_activations(setup, 2**28) == max(kept * size, later)


def test_auto_moves_activations_of_recomputed_blocks_where_the_host_has_room():
    def made(host_gib: int = 500, gpus: int = 1, **keys: Any):
        return plan(run_config(**keys), facts(llama_8b(), gpus=gpus, host_bytes=host_gib * GIB, data=LONG))

    block = {"parallel__activation_checkpointing": "full"}
    moved = made(**block)
    assert moved.layout.offload_activations and moved.memory.host_terms["activations"] > 0
    assert "activations in host memory, copied while blocks are recomputed" in sentence(moved, "offload")
    for kept in (
        made(),
        made(host_gib=2, **block),
        made(gpus=0, **block),
        made(parallel__offload_activations=False, **block),
    ):
        assert not kept.layout.offload_activations and "activations" not in kept.memory.host_terms
        assert not any(text.startswith("offload: ") for text in explain_why(kept))
    assert made(parallel__offload_activations=True).layout.offload_activations


def test_on_a_cpu_nothing_moves():
    plain, offloaded = (plan(run_config(**keys), facts()) for keys in ({}, {"parallel__offload": "optimizer"}))
    assert offloaded.memory == plain.memory
    assert sentence(offloaded, "offload").endswith("as always on a CPU")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel__shard_degree": 2}, "`parallel.shard_degree` has no effect with `parallel.strategy: auto`"),
        (
            {"parallel__strategy": "hsdp", "parallel__shard_degree": 4, "parallel__gpus": 6},
            "does not divide `parallel.gpus: 6`",
        ),
        ({"parallel__strategy": "ddp", "parallel__offload": "all"}, "`parallel.strategy: ddp` has none"),
        ({"parallel__offload": "optimizer", "optimizer__name": "adamw_8bit"}, "paged_adamw_8bit"),
    ],
)
def test_contradictions_name_both_keys(keys, words):
    findings = check(run_config(**keys))
    assert len(findings) == 1 and words in findings[0]
