"""Checkpoints: whether they are written while training continues and the memory that they pass through; the interval
between them, from what one costs and the assumed time between faults, and what a fault costs.

The cost of a checkpoint and the work that a fault loses balance at Young's interval, ``sqrt(2 C M)`` for a checkpoint
that costs ``C`` seconds and a mean of ``M`` seconds between faults (J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974); Daly's has its terms of higher order (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.steps import Steps
from manyhands.planner.text import WAITING, fill
from manyhands.planner.time.clock import COMPILE_S, DISK_BYTES_S
from manyhands.planner.types import DiskEstimate, MemoryEstimate, Reason, TimeEstimate, reason

STAGING = "staging"  # the term of the estimate

# A checkpoint in the background stalls training for a moment: 0.28 s in all for 24 GB of each of four H100s, 14 ms for
# 15 GB of one (docs/results.md).
STAGED_BYTES_S = 24e9 / 0.28  # a rank
MIN_STALL_S = 0.05

# A restart on the machine that wrote the checkpoint reads from memory what the disk need not: 48 GB of 8B in full, once
# to check it and once to load it, in 16 s on two H200s (docs/results.md). Assumed where checkpoints are written in the
# background, which takes a host with memory to spare.
CACHED_BYTES_S = 3.2e9


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
        if staged_bytes is not None:
            restart_s = COMPILE_S + (restart_s - COMPILE_S) * DISK_BYTES_S / CACHED_BYTES_S
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


@dataclass(frozen=True)
class Saving:
    """``memory`` is the layout's, with what is staged. ``why`` is empty where there is nothing to decide."""

    is_async: bool
    memory: MemoryEstimate
    why: tuple[Reason, ...]


def choose_saving(
    config: RunConfig,
    asked: EstimateInput,
    memory: MemoryEstimate,
    disk: DiskEstimate,
    steps: Steps,
    usable_host: int | None,
) -> Saving:
    """``asked`` has the chosen layout, ``memory`` is what it needs. ``usable_host``: of the host's memory, a rank's
    share in bytes; None on a CPU, where the device is the host. UserError where ``checkpoint.asynchronous: true``
    cannot be.

    No training runs during the last checkpoint, so a run that saves once has nothing to decide.
    """
    wanted, on_host = config.checkpoint.asynchronous, usable_host is None
    if not _saves_between(config, steps):
        return Saving(False, memory, ())
    size = staging(asked, disk.checkpoint_bytes)
    free = memory.limit - memory.total if usable_host is None else usable_host - memory.host_total
    waits = None
    if asked.layout.zero_stage:
        waits = reason("saving", how="zero")
    elif wanted is False:
        waits = reason("saving", how="asked")
    elif size > free:
        waits = reason("saving", how="memory", bytes=size, free=max(0, free))
    if waits is not None and wanted is True:
        raise UserError(
            "checkpoints cannot be written while training continues",
            where="checkpoint.asynchronous: true",
            why=fill(WAITING[waits.values["how"]], waits.values),
            fix="write checkpoint.asynchronous: auto, which writes them as it can",
        )
    if waits is not None:
        return Saving(False, memory, (waits,))
    term = {STAGING: size}
    update = {"terms": memory.terms | term} if on_host else {"host_terms": memory.host_terms | term}
    if not on_host:
        update |= {"host_limit": usable_host}  # type: ignore[dict-item]
    return Saving(True, memory.model_copy(update=update), (reason("saving", how="beside", bytes=size),))


def staging(s: EstimateInput, checkpoint_bytes: int) -> int:
    """Host memory through which a checkpoint is written beside the training: this rank's share, ``checkpoint_bytes /
    world size``. Where ranks are replicas they share whole tensors out, and the largest one may come on top.
    """
    replicas = s.layout.world_size // s.num_shards
    largest = s.head_elements * s.master_bytes // s.num_shards if s.num_trained_in_head and replicas > 1 else 0
    return min(checkpoint_bytes // s.num_shards, checkpoint_bytes // s.layout.world_size + largest)


def _saves_between(config: RunConfig, steps: Steps) -> bool:
    section = config.checkpoint
    by_steps = steps.checkpoint_per_epoch > 0 or 0 < steps.checkpoint_every < steps.total
    return by_steps or section.keep_best or section.every_minutes is not None
