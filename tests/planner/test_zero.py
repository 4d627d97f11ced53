"""DeepSpeed's stages in the plan: who holds weights, gradients and states; taken where they are asked for alone."""

from __future__ import annotations

import pytest

from manyhands.config.checks import check
from manyhands.planner.memory import host as host_memory
from manyhands.planner.memory import terms as memory
from manyhands.planner.search import plan
from tests.config.builders import config
from tests.planner.examples import GIB, data_facts, facts, llama_8b, model_facts, run_config
from tests.planner.test_memory import BLOCK, FULL, LORA, ROOT
from tests.support.plans import change_input, explain_why

P = 1448  # parameters of the example
LONG = data_facts(num_samples=5000, mean=3000, longest=4096)
LLAMA_70B = model_facts(
    hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, vocab=128256, head_dim=128, tied=False
)


def of_stage(stage: int, setup=FULL, **changes):
    return change_input(setup, strategy=f"zero{stage}", world_size=4, reshard_after_forward=stage == 3, **changes)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"),
    [
        (1, 2 * P, (4 + 2) * P),  # sums of all, and what the backward pass gives
        (2, 2 * P, 4 * P // 4),
        (3, 2 * P // 4, 4 * P // 4),
    ],
)
def test_a_stage_shards_states_then_gradients_then_weights(stage, weights, gradients):
    setup = of_stage(stage)
    assert memory.weights(setup) == weights
    assert memory.gradients(setup) == memory.earlier_gradients(setup)["gradients"] == gradients
    assert memory.optimizer(setup) == (4 + 8) * P // 4  # masters beside the two moments
    assert memory.gathered(setup) == (2 * P if stage == 3 else 0)
    assert memory.unreduced(setup) == 0


def test_gradients_pass_through_buckets_and_stage_3_holds_what_it_has_released():
    """The example's weights all fit into a bucket; its head, whose gradient waits for the embeddings', has 256."""
    assert memory.reduction(of_stage(2)) == (2 * 2 + 4) * P + 2 * 256, "two that fill, one that travels"
    assert memory.reduction(of_stage(3)) == (4 + 4) * P + 2 * 256, "one in float32, and what is packed of it"
    for stage, released in ((2, 0), (3, 2 * P)):
        setup = of_stage(stage, device="cuda")
        assert memory.pools(setup, {"reduction": memory.reduction(setup)}) == released
    assert memory.overhead(of_stage(2, device="cuda")) > memory.overhead(of_stage(3, device="cuda"))


def test_frozen_weights_are_whole_but_at_stage_3():
    assert memory.weights(of_stage(2, LORA)) == 2 * P + 4 * 1000
    assert memory.weights(of_stage(3, LORA)) == (2 * P + 4 * 1000) // 4
    assert memory.optimizer(of_stage(2, LORA)) == 12 * 1000 // 4
    assert P == 2 * BLOCK + ROOT


def test_what_is_offloaded_is_in_host_memory_and_checkpoints_pass_through_it():
    for stage, kept in ((2, P), (3, 0)):
        setup = of_stage(stage, offload="optimizer")
        terms = memory.estimate_terms(setup)
        host, device = host_memory.estimate_host_terms(setup, terms), host_memory.keep_on_device(setup, terms)
        assert host["optimizer"] == int(host_memory.PINNED * 3 * P) and host["checkpoint"] == 3 * P
        assert host["gradients"] == int(host_memory.PINNED * P) and device["optimizer"] == 0
        assert device["gradients"] == kept, "stage 2 sums them on the GPU"
        assert device["weights"] == terms["weights"]
    setup = of_stage(3, offload="all")
    assert host_memory.keep_on_device(setup, memory.estimate_terms(setup))["weights"] == 0


def test_a_stage_is_taken_where_it_is_asked_for_alone():
    for strategy in ("zero1", "zero2", "zero3"):
        made = plan(
            run_config(method__name="full", parallel__strategy=strategy),
            facts(llama_8b(), gpus=4, data=LONG, host_bytes=500 * GIB),
        )
        assert {candidate.layout.strategy for candidate in made.candidates} == {strategy}
        assert made.environment["DS_ACCELERATOR"] == "cuda"
        assert made.layout.mesh.shard == 4 and made.layout.wrapper == "deepspeed"
        assert any("DeepSpeed's ZeRO" in text and "as configured" in text for text in explain_why(made))
    made = plan(run_config(method__name="full"), facts(llama_8b(), gpus=4, data=LONG, host_bytes=500 * GIB))
    assert not any(candidate.layout.zero_stage for candidate in made.candidates)


def test_stage_3_recomputes_whole_blocks_or_nothing_and_compiles_nothing():
    keys = {"method__name": "full", "parallel__strategy": "zero3"}
    made = plan(run_config(**keys), facts(llama_8b(), gpus=4, gpu_bytes=80 * GIB, data=LONG, host_bytes=500 * GIB))
    assert {c.layout.activation_checkpointing for c in made.candidates} == {"none", "full"}
    assert not made.layout.compile and made.layout.lighter_layers == 0 and "fused_loss" not in made.converters
    stage_2 = plan(
        run_config(**keys | {"parallel__strategy": "zero2"}), facts(llama_8b(), gpus=4, data=LONG, host_bytes=500 * GIB)
    )
    assert stage_2.layout.compile and "fused_loss" in stage_2.converters and not stage_2.fuse_optimizer


def test_70b_in_4_bits_fits_on_two_gpus():
    keys = {"method__name": "qlora", "parallel__strategy": "zero2"}
    made = plan(run_config(**keys), facts(LLAMA_70B, gpus=2, gpu_bytes=80 * GIB, data=LONG, host_bytes=500 * GIB))
    assert made.memory.fits and 30 * GIB < made.memory.terms["weights"] < 45 * GIB


@pytest.mark.parametrize(
    ("strategy", "keys", "words"),
    [
        ("zero1", {"optimizer__name": "muon"}, "optimizer.name: muon"),
        ("zero2", {"optimizer__name": "adamw_8bit"}, "use adamw"),
        ("zero2", {"model__dtype": "float64"}, "model.dtype"),
        ("zero2", {"method__name": "full", "model__master_dtype": "bfloat16"}, "model.master_dtype"),
        ("zero1", {"kernels__linear": "fp8", "method__name": "lora"}, "kernels.linear: fp8"),
        ("zero2", {"parallel__offload": "all"}, "parallel.offload: all"),
        ("zero2", {"parallel__reshard_after_forward": True}, "parallel.reshard_after_forward"),
        ("zero3", {"method__name": "qlora"}, "packed 4-bit values"),
        ("zero3", {"method__dora": True}, "method.dora"),
        ("zero3", {"method__name": "lora", "model__frozen_dtype": "fp8"}, "model.frozen_dtype"),
        ("zero3", {"model__new_tokens": ["<a>"]}, "model.new_tokens"),
        ("zero3", {"kernels__lora": "fused"}, "kernels.lora"),
        ("zero3", {"kernels__loss": "fused"}, "kernels.loss"),
        ("zero3", {"parallel__compile": True}, "parallel.compile"),
        ("zero3", {"parallel__activation_checkpointing": "selective"}, "parallel.activation_checkpointing: selective"),
    ],
)
def test_what_a_stage_cannot_carry_out_is_refused_with_both_keys(strategy, keys, words):
    asked = config(parallel__strategy=strategy, **keys)
    assert any(words in finding and strategy in finding for finding in check(asked)), list(check(asked))
    others = {key: value for key, value in keys.items() if key == "method__name" and value == "full"}
    assert not list(check(config(parallel__strategy=strategy, **others)))
