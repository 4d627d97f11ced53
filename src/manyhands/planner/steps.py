"""How many steps a run has, and at which it warms up, evaluates and saves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from manyhands.config.schema import RunConfig, ScheduleSection
from manyhands.core.errors import UserError
from manyhands.core.units import count_of
from manyhands.data.batch.order import share_of, stretch_of, sum_steps
from manyhands.facts.types import DataFacts
from manyhands.planner.types import Plan, Reason, reason
from manyhands.training.schedule import Schedule, make_schedule

AUTO_WARMUP_RATIO = 0.03
AUTO_EVALUATIONS = 5  # a run
AUTO_CHECKPOINTS = 10  # a run


@dataclass(frozen=True)
class Steps:
    """All in optimizer steps, but for the numbers of evaluations and checkpoints in an epoch, 0 where these are spaced
    over the run. ``why`` holds a reason for each.
    """

    per_epoch: int
    total: int
    warmup: int
    evaluate_every: int
    checkpoint_every: int
    evaluate_per_epoch: int
    checkpoint_per_epoch: int
    why: tuple[Reason, ...]

    @property
    def num_checkpoints(self) -> int:
        """Of the whole run; one more than there will be where the last step follows one closely."""
        every = self.checkpoint_every
        if self.checkpoint_per_epoch:
            return min(self.total, -(-self.checkpoint_per_epoch * self.total // self.per_epoch))
        return -(-self.total // every) if every else 1


def count_steps(config: RunConfig, data: DataFacts, batch_samples: int | None) -> Steps:
    """Steps of the run: those of each epoch, which may differ by a few. An epoch's last step may be short; a part of an
    epoch is rounded up to whole steps.

    ``batch_samples`` is None where the batch is counted in loss tokens or packs: the steps of each epoch then follow
    from the data. max_tokens, max_time_s and patience end the loop while it runs and change nothing here.
    """
    per_epoch, by_epochs, of_epochs = _sum_epochs(config, data, batch_samples)
    total = min(by_epochs, config.stop.max_steps or by_epochs)
    evaluations = config.evaluate.per_epoch or 0
    checkpoints = config.checkpoint.per_epoch or 0
    evaluate = 0 if evaluations else _evaluate_every(config, data, total)
    checkpoint = 0 if checkpoints else _steps_between(config.checkpoint.every_steps, total, AUTO_CHECKPOINTS)
    warmup, why_warmup = _warmup(config, total)
    why: tuple[Reason, ...] = (
        reason("steps", **of_epochs, total=total, max_steps=config.stop.max_steps),
        why_warmup,
        reason("evaluation", every=evaluate, per_epoch=evaluations, has_samples=data.num_validation_samples > 0),
        reason("checkpoints", every=checkpoint, per_epoch=checkpoints),
    )
    if batch_samples is not None and batch_samples > data.samples_per_epoch:
        why += (reason("large_batch", batch=batch_samples, samples=data.samples_per_epoch),)
    early = [f"stop.{key}" for key in ("max_tokens", "max_time_s", "patience") if getattr(config.stop, key) is not None]
    if early:
        why += (reason("early_end", keys=early, total=total),)
    return Steps(per_epoch, total, warmup, evaluate, checkpoint, evaluations, checkpoints, why)


def schedule_of(section: ScheduleSection, plan: Plan) -> Schedule:
    """The learning rate of each step of the run, counted from 0."""
    return make_schedule(
        section.name,
        peak=plan.learning_rate,
        num_steps=plan.num_steps,
        warmup_steps=plan.warmup_steps,
        decay_ratio=section.decay_ratio,
        min_ratio=section.min_ratio,
    )


def explain_longer(section: ScheduleSection, before: Plan, after: Plan, done: int, limits: Sequence[str]) -> Reason:
    """What becomes of the schedule where a run of which ``done`` steps are done gets more by other ``limits``."""
    old, new = schedule_of(section, before), schedule_of(section, after)
    differing = [step + 1 for step in range(done) if old(step) != new(step)]
    return reason(
        "longer",
        limits=list(limits),
        schedule=section.name,
        done=done,
        before=before.num_steps,
        total=after.num_steps,
        last_rate=old(done - 1),
        next_rate=new(done),
        differing=[differing[0], differing[-1]] if differing else None,
    )


def _sum_epochs(config: RunConfig, data: DataFacts, batch_samples: int | None) -> tuple[int, int, dict[str, Any]]:
    """(steps of the first epoch, steps of ``stop.epochs`` epochs, how they follow). The second stops counting behind
    max_steps.
    """
    epochs, max_steps, counted = config.stop.epochs, config.stop.max_steps, None
    if batch_samples is None:
        steps_of = data.steps_of_epochs
        if not steps_of:
            raise ValueError("data facts have no steps_of_epochs, which batch.loss_tokens and batch.packs need")
        if epochs <= len(steps_of) or (max_steps is not None and sum(steps_of) > max_steps):
            total = sum_steps(epochs, steps_of.__getitem__, None, max_steps)
        else:  # as many as the counted epochs have on average
            total, counted = math.ceil(Fraction(repr(float(epochs))) * sum(steps_of) / len(steps_of)), len(steps_of)
        differ = len(set(steps_of)) > 1
    else:
        shares = [share_of(weight, num_samples) for num_samples, weight in data.sources]
        period = math.lcm(*(share.denominator for share in shares))

        def count(epoch: int) -> int:
            return -(
                -sum(end - start for start, end in (stretch_of(share, epoch) for share in shares)) // batch_samples
            )

        total = sum_steps(epochs, count, period, max_steps)
        steps_of, differ = (count(0),), period > 1
    weighted = batch_samples is not None and data.samples_per_epoch != data.num_samples
    values = {
        "per_epoch": steps_of[0],
        "epochs": epochs,
        "of_epochs": total if max_steps is None or total <= max_steps else None,
        "differ": differ,
        "counted": counted,
        "batch_samples": batch_samples,
        "batch_loss_tokens": config.batch.loss_tokens,
        "batch_packs": config.batch.packs,
        "pack_tokens": config.data.max_length,
        "samples_per_epoch": data.samples_per_epoch,
        "num_samples": data.num_samples if weighted else None,
    }
    return steps_of[0], total, values


def _warmup(config: RunConfig, total: int) -> tuple[int, Reason]:
    """Steps as given, which may be more than the run has (``warn_of_values`` has a warning then), or a share of all
    steps rounded to the nearest, at least one if the run has ten; and why.
    """
    schedule = config.schedule
    decay = (
        max(1, round(total * schedule.decay_ratio)) if schedule.name == "wsd" else 0
    )  # as training/schedule.py has it
    room = max(0, total - decay)
    if schedule.warmup_steps is not None:
        if decay and schedule.warmup_steps > room:
            raise UserError(
                f"schedule.warmup_steps: {schedule.warmup_steps} reaches into the decay,"
                f" the last {total - room} of {count_of(total, 'step')}",
                where="schedule.warmup_steps, schedule.decay_ratio",
                fix="make one of them smaller, or train for more steps (stop.epochs, stop.max_steps)",
            )
        return schedule.warmup_steps, reason("warmup", steps=schedule.warmup_steps, source="asked")
    ratio = AUTO_WARMUP_RATIO if schedule.warmup_ratio is None else schedule.warmup_ratio
    steps = int(ratio * total + 0.5)
    if ratio and total >= 10:
        steps = max(1, steps)
    if steps > room:  # the decay comes first
        return room, reason("warmup", steps=room, source="decay")
    return steps, reason("warmup", steps=steps, source="ratio", ratio=ratio, total=total)


def _evaluate_every(config: RunConfig, data: DataFacts, total: int) -> int:
    every = config.evaluate.every_steps
    if every == "auto" and not data.num_validation_samples:
        return 0
    return _steps_between(every, total, AUTO_EVALUATIONS)


def _steps_between(asked: int | float | Literal["auto"], total: int, auto: int) -> int:
    """As asked; of a share of the run, rounded up; ``auto`` times a run."""
    if asked == "auto":
        return math.ceil(total / auto)
    if isinstance(asked, float):
        return math.ceil(Fraction(repr(asked)) * total)  # the decimal as written: 0.07 of 100 steps are 7
    return asked
