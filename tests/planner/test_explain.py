"""What a user reads of a plan."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from rich.console import Console

from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.types import AdapterFacts, DataFacts, Facts, NewTokens
from manyhands.planner import types as reasons
from manyhands.planner.search import plan
from manyhands.planner.steps import explain_longer
from manyhands.planner.text import REJECTIONS, SENTENCES, explain, explain_plan
from manyhands.planner.types import Code, Plan, Reason
from tests.planner.examples import (
    GIB,
    data_facts,
    facts,
    llama_1b,
    llama_8b,
    mixture,
    model_facts,
    on_nodes,
    qwen_30b_a3b,
    run_config,
    tower_facts,
)

LONG = data_facts(num_samples=5000, mean=3000, longest=4096)
SMALL = model_facts(hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, vocab=49152)  # the host is the limit
EQUAL = data_facts(num_samples=100, mean=4096, longest=4096, num_validation_tokens=20 * 4096)


def shown(made) -> str:
    console = Console(width=180)
    with console.capture() as capture:
        console.print(explain_plan(made))
    return capture.get()


def test_the_batch_is_shown_with_its_formula():
    config = run_config(data__packing=False, batch__samples=32, batch__micro_samples=4)
    text = shown(plan(config, facts(llama_8b(), gpus=2, data=data_facts(longest=2048))))
    assert "32 samples = 4 micro × 2 GPUs × 4 accumulation" in text


def test_memory_and_losers_are_shown():
    text = shown(
        plan(run_config(method__name="full"), facts(llama_8b(), gpus=8, data=data_facts(mean=2000, longest=2048)))
    )
    for word in ("optimizer", "activations", "total", "limit", "fsdp", "needs", "chosen", "8 GPUs"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 180
    assert len(text.splitlines()) < 60


def test_a_layout_is_called_too_large_only_where_no_micro_batch_of_it_is_safe():
    """`fsdp, selective` was shown with the one size that came too close to the limit, beside smaller ones with room."""
    made = plan(run_config(), facts(llama_8b(), gpus=2, gpu_bytes=80 * GIB, data=LONG))
    safe = [c.layout for c in made.candidates if c.memory.is_safe]
    rows = [line for line in shown(made).splitlines() if "too close" in line or re.search(r" needs \d", line)]
    for layout in safe:
        name = layout.strategy + ", resharded" * layout.reshard_after_forward
        assert not any(line.startswith(f"{name} ") and f" {layout.activation_checkpointing} " in line for line in rows)


def test_less_is_kept_where_more_would_fit_and_be_no_faster():
    """A small model's step is bound by the host, and half of its activations recomputed cost nothing."""
    data = data_facts(num_samples=240, mean=600, longest=1000)
    keys = {"batch__samples": 32, "batch__micro_tokens": 4096, "parallel__cuda_graphs": False}
    made = plan(run_config(**keys), facts(SMALL, gpus=1, data=data))
    lighter = next(c for c in made.candidates if c.layout.activation_checkpointing == "none")
    assert made.layout.activation_checkpointing == "selective" and lighter.memory.is_safe
    (why,) = (explain(reason) for reason in made.why if reason.code == "activation_checkpointing")
    assert why.endswith("results of linear layers and attention are kept, because keeping more is no faster")


def reasons_of(made: Plan) -> list[Reason]:
    return [*made.why, *(candidate.reason for candidate in made.candidates if candidate.reason is not None)]


@cache
def plans() -> tuple[Plan, ...]:
    """Plans that differ in whatever a reason can be about."""
    one, eight = facts(llama_8b(), gpus=1, data=LONG), facts(llama_8b(), gpus=8, data=LONG)
    small = facts(llama_8b(), gpus=1, gpu_bytes=24 * GIB, host_bytes=500 * GIB, data=LONG)
    room = facts(llama_8b(), gpus=1, gpu_bytes=26 * GIB, data=LONG)
    full = {"method__name": "full"}
    first = plan(run_config(), small)
    left_out = {"data.too_long": {"a.jsonl": 3}}
    unread = data_facts(unread={"a.jsonl": ("id",)}, left_out=left_out, num_samples=20, num_repeated=1)
    tokens = NewTokens(ids=(128256, 5), fresh_ids=(128256,), vocab_size=128257)
    method = run_config(method__dora=True).method
    adapter = AdapterFacts(folder="a", method=method)
    images = {"num_images": 10, "max_image_units": 2, "mean_image_units": 0.1}
    towers = {"is_multimodal": True, "num_tower_parameters": 5}
    narrow = model_facts(hidden=64, inner=64).model_copy(update={"max_positions": 16})
    longer = explain_longer(run_config().schedule, first, first, 1, ["stop.max_steps"])
    return (
        first.model_copy(update={"why": (*first.why, longer)}),
        plan(run_config(), small, number=2, cause="out_of_memory", before=first),
        plan(run_config(method__name="qlora", parallel__offload="optimizer", kernels__linear="fp8"), one),
        plan(run_config(), facts(model_facts(stored_mxfp4=("mlp.down_proj",)))),
        plan(run_config(**full, parallel__offload="all"), replace_host(eight, 1000)),
        plan(run_config(parallel__offload_activations=True), replace_host(one, 30)),
        plan(run_config(parallel__offload_activations=False, batch__micro_tokens=8192), room),
        plan(run_config(parallel__offload_activations=True), replace_host(eight, 4000)),
        plan(run_config(**full), facts(llama_1b(), gpus=2, data=LONG)),
        plan(run_config(**full, model__master_dtype="bfloat16"), eight),
        plan(run_config(**full), facts(llama_8b(), gpus=8, data=LONG, world_size=16)),
        plan(run_config(**full), facts(llama_8b(), gpus=2, gpu_bytes=60 * GIB, data=LONG, world_size=16)),
        plan(run_config(parallel__strategy="fsdp", parallel__context_degree=2, data__workers=2), eight),
        plan(run_config(data__packing=False, stop__max_time_s=60, batch__samples=32), facts(llama_8b(), data=unread)),
        plan(run_config(optimizer__learning_rate=1.5, method__rank=64), facts(narrow, new_tokens=tokens)),
        plan(run_config(), facts(model_facts(**towers, attention_softcap=5.0), adapter=adapter)),
        plan(run_config(), facts(model_facts(**towers, tower=tower_facts()), data=data_facts(**images))),
        plan(run_config(), facts(llama_8b(), gpus=1, data=data_facts(num_samples=5000, mean=400, longest=512))),
        plan(
            run_config(method__target_modules="peft-default", batch__samples=1), facts(llama_8b(), gpus=1, data=EQUAL)
        ),
        plan(run_config(method__rank=4, method__target_modules=["w1", "w2", "w3"]), facts(mixture())),
        plan(run_config(method__rank=4, parallel__expert_degree=2), facts(mixture(), gpus=2)),
        plan(run_config(batch__samples=16), facts(SMALL, gpus=1)),
        plan(run_config(kernels__linear="fp8", model__frozen_dtype="fp8"), facts(qwen_30b_a3b(), gpus=1)),
        plan(run_config(), one.model_copy(update={"host": describe_host(parse_gpus("2x4xMI300X"))})),
        plan(run_config(), on_nodes(facts(gpus=8), 4, 4)),
        plan(run_config(schedule__warmup_steps=100_000, task="preference"), one),
        plan(run_config(batch__samples=3), facts(gpus=8, data=with_lengths([7, 90, 4, 60] * 8))),
    )


def replace_host(given: Facts, gib: int) -> Facts:
    return given.model_copy(update={"host": given.host.model_copy(update={"free_memory_bytes": gib * GIB})})


def with_lengths(lengths: list[int]) -> DataFacts:
    mean = sum(lengths) / len(lengths)
    return data_facts(num_samples=len(lengths), mean=mean, longest=max(lengths), first_lengths=tuple(lengths))


def test_every_code_has_a_sentence_that_some_plan_reaches():
    assert SENTENCES.keys() | REJECTIONS.keys() == set(get_args(Code))
    found = {reason.code: explain(reason) for made in plans() for reason in reasons_of(made)}
    assert set(get_args(Code)) - found.keys() == set()


def test_every_reason_of_a_plan_is_a_code_and_json():
    for made in plans():
        again = Plan.model_validate_json(made.model_dump_json())
        assert again.model_dump_json() == made.model_dump_json()
        assert [explain(r) for r in reasons_of(again)] == [explain(r) for r in reasons_of(made)]
        assert all(candidate.chosen == (candidate.reason is None) for candidate in made.candidates)


@pytest.mark.parametrize("path", sorted(Path(reasons.__file__).parent.rglob("*.py")), ids=lambda path: path.name)
def test_prose_stands_in_one_file(path: Path) -> None:
    """Elsewhere in the room a string of four words or more is a docstring, or stands in a function that makes errors,
    outside of its reasons.
    """
    if path.name == "text.py":
        return
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    of_errors = {id(part) for one in functions if calls(one, "UserError", "NothingSmaller") for part in ast.walk(one)}
    of_errors |= {id(part) for call in calls(tree, "ValueError") for part in ast.walk(call)}
    of_reasons = {id(part) for call in calls(tree, "reason", "Reason") for part in ast.walk(call)}
    prose = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 4
        if id(node) not in docstrings and (id(node) not in of_errors or id(node) in of_reasons)
    ]
    assert prose == []


def calls(tree: ast.AST, *names: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names]


def test_values_are_no_prose() -> None:
    """But for what facts say of packing."""
    values = [v for made in plans() for r in reasons_of(made) for name, v in r.values.items() if name != "known"]
    assert not [value for value in values if isinstance(value, str) and len(value.split()) >= 4]


def test_the_text_is_a_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich would display it and return nothing."""
    made = plan(run_config(), facts(llama_8b()))
    plain = made.explain()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert made.explain() == plain and "strategy" in plain
    shown: list[str] = []
    made._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [plain]
