"""Where a preference loss takes the log-probabilities of the model before training from. Pure.

With the adapters switched off they cost a forward pass in each step. Stored, they cost one over the samples before the
first step, whatever is trained: less where the run passes over its samples more than once.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from manyhands.config.checks import keys_beside_adapters
from manyhands.config.schema import RunConfig
from manyhands.config.tasks import TASKS
from manyhands.facts.types import Facts
from manyhands.planner.steps import Steps
from manyhands.planner.types import Plan, Reason, method_of, reason

Reference = Literal["none", "adapters", "stored"]
VALUE_BYTES = 8  # float64


def choose_reference(config: RunConfig, facts: Facts, steps: Steps) -> tuple[Reference, tuple[Reason, ...]]:
    """The source, with its reason; "none" where the loss needs no reference."""
    task, settings = TASKS[config.task], config.preference
    if task.section != "preference" or not settings.needs_reference:
        return "none", ()
    if config.task == "kto":  # its KL is of other answers in each step
        return "adapters", ()
    epochs = steps.total / steps.per_epoch
    beside = keys_beside_adapters(config)[:1] or ["method.adapter"] * (facts.adapter is not None)
    chosen: Reference = settings.reference if settings.reference != "auto" else "adapters"
    if settings.reference == "auto" and (beside or epochs > 1):
        chosen = "stored"
    why = reason(
        "reference",
        stored=chosen == "stored",
        asked=settings.reference != "auto",
        key=beside[0] if beside else "",
        epochs=round(epochs, 2),
        bytes=VALUE_BYTES * task.num_documents * (facts.data.num_samples + facts.data.num_validation_samples),
    )
    return chosen, (why,)


def identify_reference(config: RunConfig, plan: Plan) -> str:
    """SHA-256 of all that stored log-probabilities depend on: data, weights before training, and dtypes."""
    method, model = method_of(plan, config), config.model.model_dump(mode="json")
    quantized = method.name == "qlora"
    drawn = model["init"] == "random" or bool(config.model.new_tokens) or method.init == "loftq"
    described = {
        "data": plan.data_content,
        "files": plan.model_files,
        "model": {name: value for name, value in model.items() if name not in ("name", "revision", "master_dtype")},
        "new_tokens": plan.new_tokens.model_dump(mode="json") if plan.new_tokens is not None else None,
        "adapter": plan.adapter.model_dump(mode="json") if plan.adapter is not None else None,
        "nf4": [method.double_quant, method.init] if quantized else None,
        "rank": [method.rank, method.alpha] if method.init == "loftq" else None,
        "seed": config.seed if drawn else None,
        "dtypes": [plan.layout.compute_dtype, plan.layout.frozen_dtype],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
