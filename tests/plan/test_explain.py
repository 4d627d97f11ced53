"""What a user reads of a plan."""

from __future__ import annotations

from rich.console import Console

from manyhands.plan.explain import explain_plan
from manyhands.plan.search import plan
from tests.plan.examples import data_facts, facts, llama_8b, run_config


def shown(made) -> str:
    console = Console(width=180)
    with console.capture() as capture:
        console.print(explain_plan(made))
    return capture.get()


def test_the_batch_is_shown_with_its_formula():
    config = run_config(data__packing=False, batch__samples=32, batch__micro_samples=4)
    text = shown(plan(config, facts(llama_8b(), gpus=2, data=data_facts(longest=2048))))
    assert "32 rows = 4 micro × 2 GPUs × 4 accumulation" in text


def test_memory_and_losers_are_shown():
    text = shown(
        plan(run_config(method__name="full"), facts(llama_8b(), gpus=8, data=data_facts(mean=2000, longest=2048)))
    )
    for word in ("optimizer", "activations", "total", "limit", "fsdp", "needs", "chosen", "8 GPUs"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 180
    assert len(text.splitlines()) < 60
