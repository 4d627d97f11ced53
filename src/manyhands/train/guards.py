"""What ends a run: limits that were asked for, numbers that are no longer numbers. Pure functions over the loop's state."""

from __future__ import annotations

import math

from manyhands.config.schema import StopSection
from manyhands.errors import EXIT_FAILED, UserError
from manyhands.train.types import StepResult, TrainState


def stop_reason(stop: StopSection, num_steps: int, state: TrainState, next_tokens: int) -> str:
    """Why the next step of ``next_tokens`` tokens must not be taken; "" if it may. The same on every rank."""
    if state.step >= num_steps:
        return f"all {num_steps} steps are done"
    if stop.max_tokens is not None and state.tokens + next_tokens > stop.max_tokens:
        return f"stop.max_tokens = {stop.max_tokens} would be passed ({state.tokens} seen, {next_tokens} in the next step)"
    if stop.max_time_s is not None and state.elapsed_s >= stop.max_time_s:
        return f"stop.max_time_s = {stop.max_time_s:g} is used up"
    if stop.patience is not None and state.evaluations_without_gain >= stop.patience:
        return f"{state.evaluations_without_gain} evaluations in a row brought no lower validation loss (stop.patience)"
    return ""


def check_finite(result: StepResult) -> None:
    """A loss or gradient norm that is not a finite number ends the run: every later step would be lost too."""
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    ranks = [str(rank) for rank, loss in enumerate(result.rank_losses) if math.isinf(loss)]
    raise UserError(
        f"step {result.step} gave loss {result.loss} and gradient norm {result.grad_norm}",
        where=f"rank {', '.join(ranks)}" if ranks else f"step {result.step}, learning rate {result.learning_rate:.3g}",
        why="the numbers overflowed; mostly the learning rate is too high, or the weights were broken before",
        fix="lower optimizer.learning_rate or lengthen schedule.warmup_steps; the last checkpoint is untouched",
        exit_code=EXIT_FAILED,
    )
