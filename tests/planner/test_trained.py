"""What patterns train, as the plan counts it, and the bytes of each optimizer's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.config.schema import MethodSection, OptimizerSection
from manyhands.convert.trainable import train_by_pattern
from manyhands.core.errors import UserError
from manyhands.facts.model import read_model_facts
from manyhands.optim.registry import OPTIMIZERS, TrainedCounts
from manyhands.planner.memory.input import TrainedWeights, count_trained
from manyhands.planner.memory.terms import estimate_terms, optimizer, reduction, root_reduction, state_bytes
from manyhands.planner.search import plan
from tests.planner.examples import facts, llama_8b, run_config
from tests.support.plans import change_input, make_input
from tests.support.tiny import tiny_model, write_tiny_model

SETUP = make_input(llama_8b(), adapter_rank=16, full_micro_tokens=1)


@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize(
    "keys",
    [
        {"train": ["model.layers.1", "*.mlp.up_proj"]},
        {"train": ["lm_head"]},
        {"freeze": ["embed_tokens", "re:.*layers.[12]"]},
        {"train": ["norm", "model.layers.0.*_proj"]},
        {"train": ["layers[-2:].mlp"], "freeze": ["layers[:1]"]},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_plan_counts_what_the_model_trains(family: str, init: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    method, model = MethodSection(name="patterns", **keys), tiny_model(family)
    trained = train_by_pattern(model, method)
    counted = count_trained(
        method, read_model_facts(write_tiny_model(tmp_path, family, with_tokenizer=False), family, init)
    )
    assert counted is not None
    shapes = {name: parameter.numel() for name, parameter in model.named_parameters() if name in trained}
    in_blocks = [
        sum(size for name, size in shapes.items() if name.startswith(f"model.layers.{index}.")) for index in range(3)
    ]
    assert counted == TrainedWeights(sum(in_blocks), max(in_blocks), sum(shapes.values()) - sum(in_blocks))


def test_everything_trained_counts_as_full(tmp_path: Path) -> None:
    model = read_model_facts(write_tiny_model(tmp_path, with_tokenizer=False), "llama", "pretrained")
    for keys in ({}, {"train": ["*"]}, {"train": ["model.layers", "norm", "lm_head"]}):
        assert count_trained(MethodSection(name="patterns", **keys), model) is None
    assert count_trained(MethodSection(name="full"), model) is None


def test_weights_are_masters_or_frozen() -> None:
    """The last two of 32 blocks in float32, the other 30 and the root in bfloat16; gradients and states for the two
    alone.
    """
    block, total = llama_8b().num_block_parameters, llama_8b().num_parameters
    last_two = TrainedWeights(2 * block, block, 0)
    terms = estimate_terms(change_input(SETUP, partially_trained=last_two))
    assert terms["weights"] == 2 * (total - 2 * block) + 4 * 2 * block
    assert terms["gradients"] == 4 * 2 * block and terms["optimizer"] == 8 * 2 * block
    assert terms["gathered"] == 2 * 2 * block  # the bfloat16 copies that autograd keeps
    assert (
        estimate_terms(change_input(SETUP, partially_trained=last_two, activation_checkpointing="full"))["gathered"]
        == 2 * block
    )
    shared = estimate_terms(
        change_input(SETUP, partially_trained=last_two, world_size=4, strategy="fsdp", reshard_after_forward=True)
    )
    assert shared["weights"] == terms["weights"] // 4
    root = total - 32 * block
    # both trained blocks as masters, and their copies
    assert shared["gathered"] == 2 * (root + 3 * block) + 2 * (2 * block) + 2 * (2 * block)


def test_gradients_of_a_trained_root_are_widened_only_to_be_reduced() -> None:
    """The head and the last block by pattern: bfloat16 gradients on one GPU, and their float32 sums beside them over
    shards.
    """
    head = 4096 * 128256
    setup = change_input(
        SETUP, partially_trained=TrainedWeights(llama_8b().num_block_parameters, llama_8b().num_block_parameters, head)
    )
    four = change_input(setup, world_size=4, strategy="fsdp", reshard_after_forward=True)
    assert root_reduction(setup) == 2 * head
    assert root_reduction(four) == (2 + 4) * head
    block = llama_8b().num_block_parameters
    assert reduction(setup) == 2 * head + 2 * block  # the head's waits, the last block's comes
    assert reduction(four) == 2 * head + 2 * block * (2 + 4)  # two blocks in flight, for the reduction in float32 too


@pytest.mark.parametrize(("in_root", "in_head"), [(4096, 4096), (2 * 4096 * 128256, 4096 * 128256)])
def test_of_the_root_the_head_alone_gets_a_gradient_from_the_loss(in_root: int, in_head: int) -> None:
    block = llama_8b().num_block_parameters
    assert change_input(SETUP, partially_trained=TrainedWeights(block, block, in_root)).num_trained_in_head == in_head


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("adamw", 2 * 1000 * 4),
        ("adamw_8bit", 2.03125 * 700 + 8 * 300),
        ("adafactor", 50 * 4),
        ("muon", 1400 * 4),
    ],
)
def test_bytes_of_states(name: str, num_bytes: float) -> None:
    counts = TrainedCounts(num_trained=1000, num_root=400, num_embedding=300, num_sides=50)
    assert OPTIMIZERS[name].state_bytes(counts, 4) == num_bytes


def test_paged_states_take_no_memory_of_the_device_and_all_of_a_checkpoint() -> None:
    paged = change_input(SETUP, optimizer_name="paged_adamw_8bit")
    assert optimizer(paged) == 0 < state_bytes(paged) == optimizer(change_input(SETUP, optimizer_name="adamw_8bit"))


def test_the_plan_counts_the_states_of_the_optimizer_asked() -> None:
    def optimizer_bytes(name: str) -> int:
        config = run_config(method={"name": "full"}, optimizer={"name": name})
        return plan(config, facts(llama_8b(), gpus=1)).memory.terms["optimizer"]

    sizes = [optimizer_bytes(name) for name in ("adamw", "muon", "adamw_8bit", "adafactor")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 8 * llama_8b().num_parameters and sizes[-1] < 20e6


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_bitsandbytes_is_refused_without_a_gpu(name: str) -> None:
    assert OptimizerSection(name=name).name == name
    with pytest.raises(UserError, match="does not run on the CPU"):
        plan(run_config(optimizer={"name": name}), facts())
