"""Where a preference loss takes the log-probabilities of the model before training from. Pure.

With the adapters switched off they cost a forward pass in each step. Stored, they cost one over the samples before the
first step, whatever is trained: less where the run passes over its samples more than once.
"""

from __future__ import annotations

from typing import Literal

from manyhands.config.checks import keys_beside_adapters
from manyhands.config.schema import RunConfig
from manyhands.config.tasks import TASKS
from manyhands.facts.types import Facts
from manyhands.planner.steps import Steps
from manyhands.planner.types import Reason, reason

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
