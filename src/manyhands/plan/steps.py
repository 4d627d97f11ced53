"""How many steps a run has, and at which it warms up, evaluates and saves. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.config.schema import RunConfig
from manyhands.errors import UserError
from manyhands.facts.types import DataFacts

AUTO_WARMUP_RATIO = 0.03
AUTO_EVALUATIONS = 5  # a run
AUTO_CHECKPOINTS = 10  # a run
ROUNDING = 1e-9  # 0.1 * 30 epochs' worth of steps must not become one step more


@dataclass(frozen=True)
class Steps:
    """All in optimizer steps. ``why`` holds one sentence for each."""

    per_epoch: int
    total: int
    warmup: int
    evaluate_every: int
    checkpoint_every: int
    why: tuple[str, ...]


def count_steps(config: RunConfig, data: DataFacts, batch_rows: int | None) -> Steps:
    """Steps of the run. An epoch's last step may be short; a part of an epoch is rounded up to whole steps.

    ``batch_rows`` is None where the batch is counted in trained tokens: the data then says how many steps an epoch has.
    max_tokens, max_time_s and patience end the loop while it runs and change nothing here.
    """
    if batch_rows is not None:
        per_epoch = math.ceil(data.rows_per_epoch / batch_rows)
        weighted = f", the {data.num_rows:,} there are taken by their sources' weights" if data.rows_per_epoch != data.num_rows else ""
        why_epoch = f"ceil({data.rows_per_epoch:,} rows / {batch_rows}) = {per_epoch:,} an epoch{weighted}"
    elif data.steps_per_epoch_by_tokens is not None:
        per_epoch = data.steps_per_epoch_by_tokens
        why_epoch = f"{per_epoch:,} an epoch, of at least {config.batch.tokens:,} trained tokens each"
    else:
        raise ValueError("data facts lack steps_per_epoch_by_tokens, which batch.tokens needs")
    by_epochs = max(1, math.ceil(config.stop.epochs * per_epoch - ROUNDING))
    total = min(by_epochs, config.stop.max_steps or by_epochs)
    capped = f", ended by stop.max_steps: {total:,}" if total < by_epochs else ""
    if config.stop.max_steps is not None and config.stop.max_steps > by_epochs:
        capped = f", before stop.max_steps: {config.stop.max_steps:,} (raise stop.epochs to reach it)"
    evaluate, checkpoint = _evaluate_every(config, data, total), _checkpoint_every(config, total)
    warmup, why_warmup = _warmup(config, total)
    why: tuple[str, ...] = (
        f"steps: {why_epoch}; × {config.stop.epochs:g} {'epoch' if config.stop.epochs == 1 else 'epochs'} = {by_epochs:,}{capped}",
        why_warmup,
        f"evaluation: {_every(evaluate)}" + ("" if data.num_validation_rows else " (there are no validation rows)"),
        f"checkpoints: {_every(checkpoint)}",
    )
    if batch_rows is not None and batch_rows > data.rows_per_epoch:
        there_are = f"there are {data.rows_per_epoch:,} training rows an epoch"
        why += (f"note: batch.rows is {batch_rows:,}, but {there_are}: each step has all of them",)
    early = [f"stop.{key}" for key in ("max_tokens", "max_time_s", "patience") if getattr(config.stop, key) is not None]
    if early:
        why += (f"end: {', '.join(early)} may end the run before its last step; the schedule is laid over all {total:,} steps",)
    return Steps(per_epoch, total, warmup, evaluate, checkpoint, why)


def _warmup(config: RunConfig, total: int) -> tuple[int, str]:
    """Steps as given, or a share of all steps rounded to the nearest, at least one if the run has ten; and why."""
    schedule = config.schedule
    decay = max(1, round(total * schedule.decay_ratio)) if schedule.name == "wsd" else 0  # as train/schedule.py has it
    room = max(0, total - decay)
    if schedule.warmup_steps is not None:
        if schedule.warmup_steps > total:
            raise UserError(
                f"schedule.warmup_steps: {schedule.warmup_steps} is more than the run's {total} steps",
                where="schedule.warmup_steps",
                why="the learning rate would never reach its peak",
                fix="make it smaller, or train for more steps (stop.epochs, stop.max_steps)",
            )
        if schedule.warmup_steps > room:
            raise UserError(
                f"schedule.warmup_steps: {schedule.warmup_steps} reaches into the decay, the last {total - room} of {total} steps",
                where="schedule.warmup_steps, schedule.decay_ratio",
                fix="make one of them smaller, or train for more steps (stop.epochs, stop.max_steps)",
            )
        return schedule.warmup_steps, f"warm-up: {schedule.warmup_steps:,} steps, as asked"
    ratio = AUTO_WARMUP_RATIO if schedule.warmup_ratio is None else schedule.warmup_ratio
    steps = int(ratio * total + 0.5)
    if ratio and total >= 10:
        steps = max(1, steps)
    if steps > room:  # the decay comes first
        return room, f"warm-up: {room:,} steps, all that the decay leaves"
    return steps, f"warm-up: {ratio:g} × {total:,} steps = {steps:,}"


def _evaluate_every(config: RunConfig, data: DataFacts, total: int) -> int:
    every = config.evaluate.every_steps
    if every == "auto":
        return math.ceil(total / AUTO_EVALUATIONS) if data.num_validation_rows else 0
    return every


def _checkpoint_every(config: RunConfig, total: int) -> int:
    every = config.checkpoint.every_steps
    return math.ceil(total / AUTO_CHECKPOINTS) if every == "auto" else every


def _every(steps: int) -> str:
    if not steps:
        return "not between the first and the last step"
    return "after every step" if steps == 1 else f"every {steps:,} steps"
