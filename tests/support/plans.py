"""Plans, layouts and estimate inputs made by hand. Imports no torch.

``make_plan(strategy="fsdp", world_size=2)``: fields of the plan and of its layout side by side; ``world_size`` and
``shard_degree`` make the mesh.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from manyhands.facts.types import ModelFacts
from manyhands.planner.layout import Layout, change, lay_out, mesh_of
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.text import explain
from manyhands.planner.types import Code, Plan

LAYOUT: dict[str, Any] = {
    "device": "cpu",
    "strategy": "single",
    "reshard_after_forward": True,
    "activation_checkpointing": "none",
    "compute_dtype": "float32",
    "master_dtype": "float32",
    "frozen_dtype": "float32",
    "trains_everything": True,
    "micro_tokens": 64,
}
PLAN: dict[str, Any] = {
    "config_digest": "",
    "data_digest": "",
    "data_folder": "",
    "model_folder": "",
    "attention": "sdpa",
    "packing": True,
    "batch_samples": 4,
    "batch_loss_tokens": None,
    "steps_per_epoch": 1,
    "num_steps": 1,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "output_dtype": "float32",
    "memory": {"terms": {}, "limit": 2**30},
}
LAYOUT_KEYS = {part.name for part in fields(Layout)} | {"world_size", "shard_degree"}


def explain_why(plan: Plan, *codes: Code) -> list[str]:
    """The sentences of the plan's decisions; those of ``codes`` alone where there are some."""
    return [explain(reason) for reason in plan.why if not codes or reason.code in codes]


def make_layout(**changes: Any) -> Layout:
    """One CPU process in float32 that trains everything, in packs of 64 tokens."""
    return _lay_out(LAYOUT | changes)


def make_plan(**changes: Any) -> Plan:
    """``make_layout`` and one step of four samples."""
    of_layout, rest = _divide(changes)
    return Plan.model_validate(PLAN | {"layout": make_layout(**of_layout)} | rest)


def change_plan(plan: Plan, **changes: Any) -> Plan:
    of_layout, rest = _divide(changes)
    return plan.model_copy(update={"layout": change_layout(plan.layout, **of_layout)} | rest)


def change_layout(layout: Layout, **changes: Any) -> Layout:
    if changes.keys() & {"world_size", "shard_degree", "strategy"}:
        strategy, mesh = changes.get("strategy", layout.strategy), layout.mesh
        size = changes.pop("world_size", mesh.world_size)
        changes["mesh"] = mesh_of(strategy, size, changes.pop("shard_degree", mesh.shard))
    return change(layout, **changes)


def change_input(given: EstimateInput, **changes: Any) -> EstimateInput:
    """Fields of the estimate input and of its layout side by side; what is trained follows."""
    of_layout, rest = _divide(changes)
    made = replace(given, **rest)
    everything = made.num_adapter_parameters == 0 and made.partially_trained is None
    return replace(made, layout=change_layout(made.layout, trains_everything=everything, **of_layout))


def _divide(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    of_layout = {name: value for name, value in changes.items() if name in LAYOUT_KEYS}
    return of_layout, {name: value for name, value in changes.items() if name not in LAYOUT_KEYS}


def _lay_out(values: dict[str, Any]) -> Layout:
    values = dict(values)
    mesh = mesh_of(values["strategy"], values.pop("world_size", 1), values.pop("shard_degree", None) or 1)
    return lay_out(**({"mesh": mesh} | values))


def make_input(model: ModelFacts, **changes: Any) -> EstimateInput:
    """One GPU in bfloat16 with float32 masters, compiled, nothing freed or computed again, packs of 10 tokens."""
    of_layout, rest = _divide(changes)
    usual = {"device": "cuda", "compute_dtype": "bfloat16", "frozen_dtype": "bfloat16", "compile": True}
    usual |= {"reshard_after_forward": False, "full_micro_tokens": 10}
    values = {"num_adapter_parameters": 0, "adapter_rank": 4, "adapter_dropout": False, "builds_mask": False}
    return change_input(EstimateInput(model=model, layout=make_layout(**usual), **values), **(of_layout | rest))
