"""What ends a run: limits that were asked for, numbers that are no longer numbers, a loss that only rises; and ranks
that are slower than the others, step after step.

Everything here reads numbers that each step's one gather has already brought to all ranks: nothing waits for a device,
and all ranks decide alike.

The time of a rank counts until its own work of a step is done and only the last backward pass is left, which waits for
the others' gradients. What that sees: a slow processor, slow data, a hook, a launch of kernels that is held up; on CPUs
the computation too. Work of a GPU is not waited for, so a slow GPU shows in the check before the first step
(``worker/health.py``). Under fsdp on CPUs the forward pass waits for other ranks, and evens the times out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from manyhands.config.schema import StopSection
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.training.types import Evaluation, Hook, StepResult, TrainState

LEVEL_STEPS = 3  # the best loss is one that so many steps in a row reach: a single easy batch sets no mark
MIN_RISE = 1.0  # nats: where the loss is small already, a few times as much is noise
STRAGGLER_WINDOW = 50  # steps
STRAGGLER_SHARE = 0.1  # of the step's time, over the median of all ranks
FIRST_STEPS = 5  # of a launch: compilation, caches


def stop_reason(stop: StopSection, num_steps: int, state: TrainState, next_tokens: int) -> str:
    """Why the next step of ``next_tokens`` tokens must not be taken; "" if it may. The same on every rank."""
    if state.step >= num_steps:
        return f"all {num_steps} steps are done" if num_steps > 1 else "its one step is done"
    if stop.max_tokens is not None and state.tokens + next_tokens > stop.max_tokens:
        return (
            f"stop.max_tokens = {stop.max_tokens} would be passed ({state.tokens} seen, {next_tokens} in the next step)"
        )
    if stop.max_time_s is not None and state.elapsed_s >= stop.max_time_s:
        return f"stop.max_time_s = {stop.max_time_s:g} is reached"
    if stop.patience is not None and state.evaluations_without_gain >= stop.patience:
        return (
            "the last evaluation did not lower the validation loss (stop.patience)"
            if state.evaluations_without_gain == 1
            else f"{state.evaluations_without_gain} evaluations in a row did not lower the validation loss "
            "(stop.patience)"
        )
    return ""


class Diverged(UserError):
    """Training has diverged; more steps would not bring it back."""


def explain_nonfinite(result: StepResult, samples: str = "") -> Diverged:
    """A loss or gradient norm that is not a finite number: every later step would be lost too. ``samples``: the file
    that lists what was in the batch.
    """
    ranks = [str(rank) for rank, loss in enumerate(result.rank_losses) if math.isinf(loss)]
    return Diverged(
        f"step {result.step} gave loss {result.loss} and gradient norm {result.grad_norm}",
        where=(f"rank {', '.join(ranks)}" if ranks else f"step {result.step}, learning rate {result.learning_rate:.3g}")
        + (f"; its samples: {samples}" if samples else ""),
        why="the numbers overflowed; mostly the learning rate is too high, or the weights were broken before",
        fix="start again with a lower optimizer.learning_rate or a longer schedule.warmup_steps (--fresh);"
        " the last checkpoint is unaffected. guards.nonfinite=skip leaves such a step's update out",
        exit_code=EXIT_FAILED,
    )


class DivergenceGuard(Hook):
    """Ends a run that has diverged, or warns once and notes it in the state, as ``stop.divergence`` asks. See its
    description.
    """

    def __init__(self, stop: StopSection, log: Callable[[str], None]) -> None:
        self.stop, self.log = stop, log

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if result.skipped:  # nothing was learned from it, and its loss says nothing of the weights
            return
        rising = self._is_rising(state, result.loss)
        bound = self.stop.loss_above
        over = bound is not None and result.loss > bound
        state.steps_over_bound = state.steps_over_bound + 1 if over else 0
        if result.grad_norm == 0 and result.num_loss_tokens and result.loss != 0:
            self._found(
                state,
                f"the gradient of step {result.step} is exactly 0 at loss {result.loss:.4g}",
                "nothing is learned any more",
            )
        elif rising and state.steps_above >= self.stop.divergence_steps:
            self._found(
                state,
                f"the loss is {result.loss:.4g} at step {result.step}, and was {state.best_level:.4g}",
                f"it was above {self.stop.divergence_factor:g} times its best for {_in_a_row(state.steps_above)}",
            )
        elif over and state.steps_over_bound >= self.stop.loss_above_steps:
            self._found(
                state,
                f"the loss is {result.loss:.4g} at step {result.step}",
                f"it was above {bound:g} (stop.loss_above) for {_in_a_row(state.steps_over_bound)}",
            )

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        if evaluation.step == 0:
            state.start_loss = evaluation.loss
        if not math.isfinite(evaluation.loss):
            raise self._error(
                f"the held-out loss is {evaluation.loss} {_when(evaluation)}",
                "the weights no longer give finite numbers",
            )
        if state.start_loss is None or not self._is_far_above(evaluation.loss, state.start_loss):
            return
        what = f"the held-out loss is {evaluation.loss:.4g} {_when(evaluation)},"
        what += f" and was {state.start_loss:.4g} before training"
        if state.start_level is not None and state.recent_losses and max(state.recent_losses) <= state.start_level:
            self.log(  # patience and keep_best exist for this
                f"warning: {what}, while the training loss fell:"
                " the run overfits, or the held-out samples are of another kind"
            )
        else:
            self._found(
                state,
                what,
                f"it is more than {self.stop.divergence_factor:g} times what the untrained model has:"
                " training made it worse",
            )

    def _is_rising(self, state: TrainState, loss: float) -> bool:
        above = state.best_level is not None and self._is_far_above(loss, state.best_level)
        state.steps_above = state.steps_above + 1 if above else 0
        if not state.recent_losses and state.start_loss is not None:
            # Held-out samples may be easier than those that are trained.
            state.start_level = max(loss, state.start_loss)
        state.recent_losses = [*state.recent_losses, loss][-LEVEL_STEPS:]
        marks = [max(state.recent_losses)] if len(state.recent_losses) == LEVEL_STEPS else []
        marks += [mark for mark in (state.best_level, state.start_level) if mark is not None]
        state.best_level = min(marks, default=None)
        return above

    def _is_far_above(self, loss: float, mark: float) -> bool:
        return loss > max(self.stop.divergence_factor * mark, mark + MIN_RISE)

    def _found(self, state: TrainState, what: str, why: str) -> None:
        if self.stop.divergence == "fail":
            state.divergence = f"{what}: {why}"
            raise self._error(what, why)
        if not state.divergence:
            state.divergence = f"{what}: {why}"
            self.log(f"warning: {state.divergence}; training continues (stop.divergence: warn)")

    def _error(self, what: str, why: str) -> Diverged:
        return Diverged(
            f"training has diverged: {what}",
            where="optimizer.learning_rate, or the data of the last steps (metrics.jsonl)",
            why=why,
            fix="start again with a lower optimizer.learning_rate or a longer schedule.warmup_steps (--fresh);"
            " the last checkpoint is untouched. To continue anyway, set stop.divergence=warn",
            exit_code=EXIT_FAILED,
        )


def _in_a_row(num_steps: int) -> str:
    return "one step" if num_steps == 1 else f"{num_steps} steps in a row"


def _when(evaluation: Evaluation) -> str:
    return "before training" if evaluation.step == 0 else f"after step {evaluation.step}"


class StragglerHook(Hook):
    """Names each slow rank once, in the log and by ``note``, for the report."""

    def __init__(self, log: Callable[[str], None], note: Callable[[str], None], window: int = STRAGGLER_WINDOW) -> None:
        self.log, self.note = log, note
        self.named: set[int] = set()
        self._left_out = FIRST_STEPS
        self._excess: deque[list[float]] = deque(maxlen=window)  # by step and rank, as shares of the step
        self._seconds: deque[float] = deque(maxlen=window)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if len(result.rank_seconds) < 2 or result.seconds <= 0:
            return
        if self._left_out:
            self._left_out -= 1
            return
        # Of two, the faster one is what the other is compared with.
        usual = statistics.median_low(result.rank_seconds)
        self._excess.append([(own - usual) / result.seconds for own in result.rank_seconds])
        self._seconds.append(result.seconds)
        if len(self._excess) == self._excess.maxlen and result.step % 10 == 0:
            self._judge(result.step)

    def _judge(self, step: int) -> None:
        for rank, shares in enumerate(zip(*self._excess, strict=True)):
            share = statistics.median(shares)
            if share > STRAGGLER_SHARE and rank not in self.named:
                self.named.add(rank)
                lost_s = share * statistics.median(self._seconds)
                text = (
                    f"rank {rank} is slower than the others: by {lost_s:.3g} s a step ({share:.0%}) in the"
                    f" {len(self._excess)} steps before step {step}; every step waits for it"
                )
                self.log(f"warning: {text}")
                self.note(text)
