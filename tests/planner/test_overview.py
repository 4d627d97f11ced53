"""The five lines with which a run starts."""

from __future__ import annotations

import pytest

from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.types import LinearShape
from manyhands.planner.search import plan
from manyhands.planner.text import describe_briefly
from manyhands.planner.types import PlannedData, method_of
from tests.planner.examples import data_facts, facts, llama_8b, run_config
from tests.planner.test_experts import large_mixture


def describe(config, found, price=None, **update) -> list[str]:
    made = plan(config, found).model_copy(update=update)
    return describe_briefly(config, method_of(made, config), made, price)


def lines(config, found, price=None, **update) -> dict[str, str]:
    shown = describe(config, found, price, **update)
    assert all(len(line) <= 80 and line == line.rstrip() for line in shown[:5]), shown
    return dict(line.split(maxsplit=1) for line in shown[:5])


def test_model_data_layout_memory_and_time():
    config = run_config(method__rank=16, batch__samples=64)
    shown = lines(config, facts(llama_8b(), gpus=8, data=data_facts(longest=2048)))
    assert shown["model"].endswith("LoRA rank 16, 41.9 M of 8.07 B trained (0.52%)")
    assert shown["data"].startswith("1,000 samples, ") and shown["data"].endswith("held out")
    assert shown["layout"].startswith("ddp, 8 x H200, bfloat16; 64 samples/step, packs of ")
    assert " GiB per GPU (" in shown["memory"]
    assert shown["time"].startswith("16 steps, 1 epoch: ") and shown["time"].endswith(" tokens/s")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"held_out": 50}, "300 samples, 14,472 tokens, none cut; 50 held out"),
        ({"truncated": 119}, "119 cut at 2,048; none held out"),
        ({"truncated": 2, "dropped": 1}, "2 cut at 2,048, 1 left out"),
        ({"images": 20}, "20 images"),
    ],
)
def test_what_became_of_samples_is_counted(data, text):
    found = facts(llama_8b(), data=data_facts(longest=2048))
    assert text in lines(run_config(), found, data=PlannedData(samples=300, tokens=14472, **data))["data"]


def test_full_training_and_its_cost():
    config, host = run_config(method__name="full"), describe_host(parse_gpus("8xH100"))
    found = facts(llama_8b(), data=data_facts(longest=2048)).model_copy(update={"host": host})
    shown = lines(config, found, price=2.5)
    made = plan(config, found)
    assert "full fine-tuning, all 8.03 B parameters trained" in shown["model"]
    assert shown["time"].endswith(f", costs {made.time.gpu_hours * 2.5:,.2f}")


def test_of_stacks_it_says_what_a_token_uses():
    model = llama_8b()
    gate = model.block_linear_shapes["mlp.gate_proj"]
    stack = LinearShape(*gate[:2], groups=8, active=2)
    mixture = model.model_copy(update={"block_linear_shapes": model.block_linear_shapes | {"mlp.gate_proj": stack}})
    assert mixture.num_active_parameters == model.num_parameters - 32 * gate.size * 6 // 8
    assert "of 8.09 B (6.62 B active) trained" in lines(run_config(), facts(mixture, gpus=1))["model"]


def test_degrees_by_which_ranks_divide_packs_or_experts_are_named():
    packs = lines(run_config(parallel__context_degree=2), facts(llama_8b(), gpus=4))
    assert packs["layout"].startswith("ddp, 4 x H200, CP 2, bfloat16; ")
    experts = lines(run_config(parallel__expert_degree=4), facts(large_mixture(), gpus=4))
    assert experts["layout"].startswith("ddp, 4 x H200, EP 4, bfloat16; ")


def test_on_a_cpu_the_time_is_not_guessed():
    found = facts(llama_8b(), host_bytes=900 << 30, data=data_facts(longest=2048))
    shown = lines(run_config(parallel__gpus=2), found, num_steps=1_234_567)
    assert "2 CPU processes, float32" in shown["layout"] and "per process" in shown["memory"]
    assert shown["time"].endswith("time to the end after the first steps")


def test_what_asks_for_a_decision_follows():
    config = run_config(optimizer__learning_rate=2.0)
    shown = describe(config, facts(llama_8b(), data=data_facts(longest=2048)))
    assert any(line.startswith("warning: ") and "2 changes" in line for line in shown[5:])
