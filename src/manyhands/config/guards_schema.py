"""The keys of a run file about what guards a run against bad numbers (``guards``); see docs/hangs.md.

Part of the schema (``schema.py``), under its rules: no torch, no file, no side effect; every key has a description.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from manyhands.config.data_schema import NonNegativeInt, PositiveFloat, PositiveInt, Section


class GuardsSection(Section):
    """What is done about losses and gradients that are not finite, sudden losses, and replicas that differ."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient that is not finite: stop the run, skip the update of that step, or roll back "
        "to the newest checkpoint and leave the last steps out. The batch's samples are written to logs/.",
    )
    spike: Literal["off", "warn", "skip", "rollback"] = Field(
        "warn",
        description="A training loss above the median of the last `spike_window` by `spike_mads` deviations and 0.5 "
        "nats: warn, or as above.",
    )
    spike_mads: PositiveFloat = Field(
        10.0, description="Median absolute deviations, scaled to a standard deviation, above which a loss is a spike."
    )
    spike_window: PositiveInt = Field(64, description="Losses that are compared with; 16 are needed at least.", ge=16)
    max_in_a_row: PositiveInt = Field(
        5, description="Steps skipped in a row, or rollbacks in all, after which the run fails."
    )
    leave_out: PositiveInt = Field(
        1, description="rollback: steps left out, the last of them the one at which the fault showed."
    )
    replicas_every: NonNegativeInt = Field(
        100,
        description="Steps between comparisons of the trained weights of ranks that hold the same ones; a rank that "
        "differs ends the run. 0: never.",
    )
