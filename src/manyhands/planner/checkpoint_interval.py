"""The interval between checkpoints, from what one costs and the assumed time between faults, and what a fault costs.

The cost of a checkpoint and the work that a fault loses balance at Young's interval, ``sqrt(2 C M)`` for a checkpoint
that costs ``C`` seconds and a mean of ``M`` seconds between faults (J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974); Daly's has its terms of higher order (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006). Pure.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.planner.steps import Steps
from manyhands.planner.types import TimeEstimate, reason

# A checkpoint in the background stalls training for a moment: 0.28 s in all for 24 GB of each of four H100s, 14 ms for
# 15 GB of one (docs/results.md).
STAGED_BYTES_S = 24e9 / 0.28  # a rank
MIN_STALL_S = 0.05


def best_interval(cost_s: float, between_faults_s: float) -> float:
    """Seconds of training between two checkpoints that cost ``cost_s`` each, by Daly's equation 37: within 0.1 % of the
    least time in all as long as a checkpoint costs less than half of the time between faults.
    """
    if cost_s >= 2 * between_faults_s:
        return between_faults_s
    x = cost_s / (2 * between_faults_s)
    return math.sqrt(2 * cost_s * between_faults_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def goodput(interval_s: float, cost_s: float, between_faults_s: float, restart_s: float) -> float:
    """Share of a long run's time that goes into steps which no fault undoes, by Daly's complete model: faults come at
    random, also while a checkpoint is written or the run restarts. ``restart_s``: from a fault to the next step; for a
    checkpoint in the background also the seconds until it exists, because an earlier fault resumes from the one before.
    """
    per_interval = math.expm1((interval_s + cost_s) / between_faults_s) * math.exp(restart_s / between_faults_s)
    return interval_s / (between_faults_s * per_interval)


def space_checkpoints(
    config: RunConfig, steps: Steps, time: TimeEstimate | None, staged_bytes: int | None, num_nodes: int
) -> Steps:
    """``steps`` with the interval that ``checkpoint.every_steps: auto`` means and what it costs; ``auto`` stays ten
    checkpoints a run where the seconds of a step are not known (``time`` is None). ``staged_bytes``: of a rank, where
    checkpoints are written in the background, else None.
    """
    is_auto = config.checkpoint.every_steps == "auto" and not steps.checkpoint_per_epoch
    values: dict[str, Any] = {"every": steps.checkpoint_every, "per_epoch": steps.checkpoint_per_epoch, "auto": is_auto}
    if time is not None:
        hours = config.checkpoint.hours_between_faults
        between_faults_s = 3600 * hours / num_nodes
        cost_s, exists_after_s = time.checkpoint_s, 0.0
        if staged_bytes is not None:
            cost_s, exists_after_s = max(MIN_STALL_S, staged_bytes / STAGED_BYTES_S), time.checkpoint_s
        every = steps.checkpoint_every
        if is_auto:
            interval_s = max(best_interval(cost_s, between_faults_s), exists_after_s)  # one is written at a time
            every = max(1, round(interval_s / time.step_s))
            if "rollback" in (config.guards.nonfinite, config.guards.spike):  # which needs one to go back to
                every = min(every, steps.checkpoint_every)
            every = every if every < steps.total else 0
        in_epoch = steps.per_epoch / steps.checkpoint_per_epoch if steps.checkpoint_per_epoch else 0
        seconds = min(in_epoch or every or steps.total, steps.total) * time.step_s
        restart_s = time.start_s + time.checkpoint_s
        values |= {
            "every": every,
            "seconds": float(f"{seconds:.4g}"),
            "cost_s": float(f"{cost_s:.4g}"),
            "lost_s": float(f"{(seconds + cost_s) / 2 + exists_after_s:.4g}"),
            "restart_s": float(f"{restart_s:.4g}"),
            "hours": hours / num_nodes,
            "goodput": float(f"{goodput(seconds, cost_s, between_faults_s, exists_after_s + restart_s):.6g}"),
        }
        steps = replace(steps, checkpoint_every=every)
    why = reason("checkpoints", **values)
    return replace(steps, why=tuple(why if each.code == "checkpoints" else each for each in steps.why))
