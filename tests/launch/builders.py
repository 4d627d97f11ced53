"""A config and a plan as small as the schema allows."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.planner.types import MemoryEstimate, Plan
from tests.support import plans


def make_config(**changes: object) -> RunConfig:
    """``make_config(**{"stop.epochs": 2.0})``."""
    fields: dict = {"name": "demo", "model": {"name": "tiny"}, "data": {"train": "rows.jsonl"}}
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = fields
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return RunConfig.model_validate(fields)


def make_plan(world_size: int = 2, **changes: object) -> Plan:
    fields: dict = {
        "config_digest": make_config().digest,
        "data_digest": "d",
        "data_content": "c",
        "data_folder": "/data",
        "model_folder": "/model",
        "world_size": world_size,
        "strategy": "ddp",
        "reshard_after_forward": False,
        "batch_samples": 8,
        "micro_tokens": 2048,
        "steps_per_epoch": 10,
        "num_steps": 10,
        "warmup_steps": 1,
        "learning_rate": 1e-4,
        "evaluate_every": 5,
        "checkpoint_every": 5,
        "memory": MemoryEstimate(terms={"weights": 1}, limit=2),
    }
    return plans.make_plan(**(fields | changes))
