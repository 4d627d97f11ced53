"""How many steps a run has, and at which it warms up, evaluates and saves. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.order import share_of, stretch_of, sum_steps
from manyhands.facts.types import DataFacts

AUTO_WARMUP_RATIO = 0.03
AUTO_EVALUATIONS = 5  # a run
AUTO_CHECKPOINTS = 10  # a run


@dataclass(frozen=True)
class Steps:
    """All in optimizer steps. ``why`` holds one sentence for each."""

    per_epoch: int
    total: int
    warmup: int
    evaluate_every: int
    checkpoint_every: int
    why: tuple[str, ...]


def count_steps(config: RunConfig, data: DataFacts, batch_samples: int | None) -> Steps:
    """Steps of the run: those of each epoch, which may differ by a few. An epoch's last step may be short; a part of an
    epoch is rounded up to whole steps.

    ``batch_samples`` is None where the batch is counted in trained tokens: the data then says how many steps each epoch
    has. max_tokens, max_time_s and patience end the loop while it runs and change nothing here.
    """
    per_epoch, by_epochs, why_epochs = _sum_epochs(config, data, batch_samples)
    total = min(by_epochs, config.stop.max_steps or by_epochs)
    if total < by_epochs:
        why_epochs += f"; ended by stop.max_steps: {total:,}"
    elif config.stop.max_steps is not None and config.stop.max_steps > by_epochs:
        why_epochs += f", before stop.max_steps: {config.stop.max_steps:,} (raise stop.epochs to reach it)"
    evaluate, checkpoint = _evaluate_every(config, data, total), _checkpoint_every(config, total)
    warmup, why_warmup = _warmup(config, total)
    why: tuple[str, ...] = (
        f"steps: {why_epochs}",
        why_warmup,
        f"evaluation: {_every(evaluate)}" + ("" if data.num_validation_samples else " (there are no validation rows)"),
        f"checkpoints: {_every(checkpoint)}",
    )
    if batch_samples is not None and batch_samples > data.samples_per_epoch:
        there_are = f"there are {data.samples_per_epoch:,} training rows an epoch"
        why += (f"note: batch.samples is {batch_samples:,}, but {there_are}: each step has all of them",)
    early = [f"stop.{key}" for key in ("max_tokens", "max_time_s", "patience") if getattr(config.stop, key) is not None]
    if early:
        why += (
            f"end: {', '.join(early)} may end the run before its last step; the schedule is laid over all {total:,} steps",
        )
    return Steps(per_epoch, total, warmup, evaluate, checkpoint, why)


def _sum_epochs(config: RunConfig, data: DataFacts, batch_samples: int | None) -> tuple[int, int, str]:
    """(steps of the first epoch, steps of ``stop.epochs`` epochs, how they follow). The second stops counting behind
    max_steps.
    """
    epochs, max_steps = config.stop.epochs, config.stop.max_steps
    asked = f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    if batch_samples is None:
        steps_of = data.steps_of_epochs
        if not steps_of:
            raise ValueError("data facts lack steps_of_epochs, which batch.loss_tokens needs")
        total = sum_steps(epochs, steps_of.__getitem__, None, max_steps)
        of_first = f"{steps_of[0]:,} {{}}, of at least {config.batch.loss_tokens:,} trained tokens each"
        differ = len(set(steps_of)) > 1
    else:
        shares = [share_of(weight, num_samples) for num_samples, weight in data.sources]
        period = math.lcm(*(share.denominator for share in shares))

        def count(epoch: int) -> int:
            return -(
                -sum(end - start for start, end in (stretch_of(share, epoch) for share in shares)) // batch_samples
            )

        total = sum_steps(epochs, count, period, max_steps)
        weighted = (
            f", the {data.num_samples:,} there are taken by their sources' weights"
            if data.samples_per_epoch != data.num_samples
            else ""
        )
        of_first = f"ceil({data.samples_per_epoch:,} rows / {batch_samples}) = {count(0):,} {{}}{weighted}"
        steps_of, differ = (count(0),), period > 1
    if max_steps is not None and total > max_steps:
        return steps_of[0], total, of_first.format("an epoch")
    if not differ:
        return steps_of[0], total, f"{of_first.format('an epoch')}; × {asked} = {total:,}"
    return (
        steps_of[0],
        total,
        f"{of_first.format('in the first epoch')}; {total:,} in {asked}, which differ by a few steps",
    )


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
        return math.ceil(total / AUTO_EVALUATIONS) if data.num_validation_samples else 0
    return every


def _checkpoint_every(config: RunConfig, total: int) -> int:
    every = config.checkpoint.every_steps
    return math.ceil(total / AUTO_CHECKPOINTS) if every == "auto" else every


def _every(steps: int) -> str:
    if not steps:
        return "not between the first and the last step"
    return "after every step" if steps == 1 else f"every {steps:,} steps"
