"""What masters in bfloat16 take, and what they do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.core.limits import GIB, UPDATE_HELD_BYTES
from manyhands.planner.candidates import memory_limits
from manyhands.planner.choices import decide
from manyhands.planner.layout import change
from manyhands.planner.memory import host as host_memory
from manyhands.planner.memory import terms as memory
from manyhands.planner.search import base_input, plan
from tests.planner.examples import data_facts, facts, llama_1b, llama_8b, run_config
from tests.planner.test_memory import BLOCK, FULL, ROOT, sharded
from tests.support.plans import change_input, explain_why

NARROW = change_input(FULL, master_dtype="bfloat16", accumulates=False)
KEYS: dict[str, Any] = {"model__master_dtype": "bfloat16", "model__dtype": "bfloat16", "method__name": "full"}


def test_they_keep_8_bytes_a_parameter_and_no_copy():
    assert memory.weights(NARROW) + memory.gradients(NARROW) + memory.optimizer(NARROW) == 8 * 1448
    assert memory.gathered(NARROW) == 0
    assert memory.reduction(NARROW) == 2 * 32 * 8  # the head's gradient, until the embedding's is added


def test_sums_of_gradients_are_counted_in_float32():
    several = change_input(NARROW, accumulates=True)
    assert memory.gradients(several) == 4 * 1448
    two = sharded(several, 2, reshard_after_forward=False)
    assert memory.gradients(two) == 2 * 1448 and memory.unreduced(change_input(two, reduce_every=False)) == 4 * 1448
    assert memory.root_reduction(two) == 6 * ROOT and memory.reduction(two) == 2 * 6 * BLOCK + 2 * 32 * 8


def test_copies_on_several_ranks_are_made_by_fully_shard():
    ddp = change_input(NARROW, strategy="ddp", world_size=2)
    assert memory.gathered(ddp) == 2 * 1448 and memory.root_reduction(ddp) == 6 * ROOT


def test_the_plan_says_so_and_counts_it():
    config = run_config(**KEYS)
    wide, narrow = (
        plan(config_, facts(model=llama_1b(), gpus=1))
        for config_ in (run_config(**KEYS | {"model__master_dtype": "float32"}), config)
    )
    assert (wide.layout.master_dtype, narrow.layout.master_dtype, narrow.output_dtype) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert narrow.fuse_optimizer and any("rounded stochastically" in sentence for sentence in explain_why(narrow))
    assert not any("float32 masters" in sentence for sentence in explain_why(narrow))
    states = ("weights", "optimizer", "gathered")
    assert sum(narrow.memory.terms[name] for name in states) == 6 * llama_1b().num_parameters
    assert sum(wide.memory.terms[name] for name in states) == 14 * llama_1b().num_parameters


def test_what_is_offloaded_is_counted_on_the_host_and_gradients_stay_as_narrow():
    """8B in full takes 64 GB of host memory so, half of what float32 masters do, and 24 GiB of a GPU are enough."""
    model = llama_8b()
    data = data_facts(num_samples=5000, mean=3000, longest=4096)
    the_facts = facts(model, gpus=1, gpu_bytes=24 * GIB, host_bytes=128 * GIB, data=data)
    keys = KEYS | {"parallel__offload": "all", "batch__micro_tokens": 4096, "batch__samples": 1}
    made = plan(run_config(**keys), the_facts)
    assert (made.layout.wrapper, made.layout.compute_copy) == ("fully_shard", "none")
    # pinned memory comes in powers of 2: 117 million values of an MLP's weight take 256 MiB in place of 224
    rows = [(32, shape.size) for shape in model.block_linear_shapes.values()]
    rows.append((2, model.vocab_size * model.hidden_size))
    rounded = sum(count * 2 ** (2 * size - 1).bit_length() for count, size in rows)
    expected = {"weights": rounded, "gradients": rounded, "optimizer": 2 * rounded}
    found = {name: made.memory.host_terms[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-3)
    assert [made.memory.terms[name] for name in expected] == [0, 0, 0]
    root = 2 * model.vocab_size * model.hidden_size * 2
    assert made.memory.terms["gathered"] > root, "embeddings and head are whole on the GPU while a step runs"
    with pytest.raises(UserError, match="host"):
        plan(run_config(**keys | {"model__master_dtype": "float32"}), the_facts)


def test_the_largest_moment_is_that_of_what_stays_on_the_gpu():
    """Gradients in host memory weigh nothing there: not the end of the backward pass but its start is the worst."""
    moved = change_input(FULL, full_micro_tokens=64, accumulates=False, offload="all", device="cuda")
    terms = memory.estimate_terms(moved)
    kept = host_memory.keep_on_device(moved, terms)
    rest = sum(value for name, value in memory.in_the_backward_pass(moved).items() if name != "gradients")
    passing = ("gathered", "dequantized", "activations", "logits", "reduction", "unreduced")
    assert sum(kept[name] for name in passing) >= rest
    assert host_memory.estimate_host_terms(moved, terms)["gradients"] == memory.gradients(moved) > 0


def test_a_step_from_host_memory_is_one_micro_batch_where_16_gib_hold_it():
    """Each micro-batch moves all weights there and all gradients back, and no gradient stays on the GPU."""
    samples = data_facts(num_samples=300, mean=8192, longest=8192, num_validation_samples=0, num_validation_tokens=0)
    the_facts = facts(llama_8b(), gpus=1, gpu_bytes=16 * GIB, host_bytes=128 * GIB, data=samples)
    keys = KEYS | {"parallel__offload": "all", "batch__samples": 3}
    made = plan(run_config(**keys), the_facts)
    assert made.layout.full_micro_tokens >= 3 * 8192 and not made.layout.accumulates
    root = 2 * 128256 * 4096 * 2
    assert made.memory.terms["pools"] < root, "of the reductions' pool no more than the largest unit's result"
    asked = plan(run_config(**keys, batch__micro_tokens=3 * 8192), the_facts)
    assert asked.layout.activation_checkpointing == made.layout.activation_checkpointing
    smaller = plan(run_config(**keys, batch__micro_tokens=8192), the_facts)
    assert made.step_s < 0.9 * smaller.step_s


def test_weights_updated_in_the_backward_pass_leave_one_blocks_gradients_and_those_whose_updates_run():
    """Nothing is reduced or goes to the host, and three slices of weights and states are there. One H100 held 13.62 and
    11.08 GiB (``h100-close``).
    """
    samples = data_facts(num_samples=300, mean=8192, longest=8192, num_validation_samples=0, num_validation_tokens=0)
    the_facts = facts(llama_8b(), gpus=1, gpu_bytes=16 * GIB, host_bytes=1500 * GIB, data=samples)
    keys = KEYS | {"parallel__offload": "all", "batch__samples": 3, "batch__micro_tokens": 3 * 8192}
    keys |= {"parallel__activation_checkpointing": "except_attention"}
    found = []
    for norm in (1.0, 0.0):
        config = run_config(**keys, optimizer__max_grad_norm=norm)
        layout = change(plan(config, the_facts).layout, embeddings_apart=False)  # as they were measured
        limits = memory_limits(config, the_facts, decide(config, the_facts))
        found.append(limits.evaluate(base_input(config, the_facts), layout).memory)
    clipped, free = found
    block, head = llama_8b().num_block_parameters, 128256 * 4096
    assert [(memory_.terms["reduction"], memory_.terms["optimizer"]) for memory_ in found] == [
        (2 * 4 * block + 2 * head, 0),
        (2 * block + 2 * head, 3 * 3 * 2**24 * 2),
    ]
    assert free.host_terms["gradients"] == 0 < clipped.host_terms["gradients"]
    assert [memory_.total / GIB for memory_ in found] == pytest.approx([13.62, 11.08], rel=0.04)
    setup = change_input(NARROW, model=llama_8b(), offload="all", device="cuda", needs_all_gradients=False)
    assert memory.reduction(setup) == 2 * block + 2 * head
    small = change_input(setup, model=llama_1b().model_copy(update={"vocab_size": 1000}))
    assert memory.reduction(small) == 2 * llama_1b().num_block_parameters + UPDATE_HELD_BYTES


def test_one_gpu_has_two_blocks_of_what_is_in_host_memory_at_a_time():
    """One computes while the engine fetches the next, its weights one by one; FSDP2 on one rank fetches none ahead."""
    one = change_input(FULL, model=llama_8b(), offload="all", device="cuda", reshard_after_forward=True)
    two = change_input(one, strategy="fsdp", world_size=2)
    root, block = one.num_root_parameters * one.compute_bytes, one.model.num_block_parameters * one.compute_bytes
    assert (memory.gathered(one), memory.gathered(two)) == (root + 2 * block, root + 3 * block)
    assert memory.gathered(change_input(one, device="cpu")) == root + block
    assert memory.fetched(one) == 14336 * 4096 * (one.master_bytes + 2 * one.compute_bytes)
    narrow = change_input(one, master_dtype="bfloat16")
    assert memory.fetched(narrow) == 14336 * 4096 * 2 * narrow.master_bytes


def test_in_host_memory_hsdps_gradients_are_on_the_gpu_too():
    """FSDP2 holds what it has summed over copies until the backward pass ends."""
    on_gpu = []
    for keys in ({"strategy": "fsdp", "world_size": 4}, {"strategy": "hsdp", "world_size": 4, "shard_degree": 2}):
        setup = change_input(FULL, model=llama_8b(), offload="all", device="cuda", **keys)
        on_gpu.append(host_memory.keep_on_device(setup, memory.estimate_terms(setup))["gradients"])
    assert on_gpu == [0, 4 * llama_8b().num_parameters // 2]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"method__name": "lora"}, "method.name is lora"),
        ({"method__name": "patterns", "method__train": ["*mlp*"]}, "method.name is patterns"),
        ({"model__dtype": "float32"}, "computes in float32"),
        ({"optimizer__name": "adafactor"}, "adafactor"),
    ],
)
def test_what_they_do_not_go_with_is_refused(keys: dict[str, Any], why: str):
    with pytest.raises(UserError, match=why):
        plan(run_config(**KEYS | keys), facts(model=llama_1b(), gpus=1))
