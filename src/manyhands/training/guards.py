"""Watches a run's numbers: limits that end it, steps whose loss or gradient is not finite or whose loss is a spike, a
loss that only rises, replicas that differ, and ranks that are slower than the others.

Everything here reads numbers that each step's one gather has already brought to all ranks: nothing waits for a device,
and all ranks decide alike. Where a step may be skipped, the update waits for that gather; otherwise it is launched
before.

The time of a rank counts until its own work of a step is done and only the last backward pass is left, which waits for
the others' gradients. What that sees: a slow processor, slow data, a hook, a launch of kernels that is held up; on CPUs
the computation too. Work of a GPU is not waited for, so a slow GPU shows in the check before the first step
(``worker/health.py``). Under fsdp on CPUs the forward pass waits for other ranks, and evens the times out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from manyhands.config.schema import GuardsSection, StopSection
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.holding import computed_part
from manyhands.training.types import Evaluation, Hook, StepResult, TrainState

LEVEL_STEPS = 3  # the best loss is one that so many steps in a row reach: a single easy batch sets no mark
MIN_RISE = 1.0  # nats: where the loss is small already, a few times as much is noise
STRAGGLER_WINDOW = 50  # steps
STRAGGLER_SHARE = 0.1  # of the step's time, over the median of all ranks
FIRST_STEPS = 5  # of a launch: compilation, caches
MIN_LOSSES = 16  # before a loss can be called a spike
MIN_SPIKE = 0.5  # nats above the median: less is noise of small batches
TO_SIGMA = 1.4826  # of a normal distribution's median absolute deviation
WORD_BYTES = 8

Fault = Literal["nonfinite", "spike"]


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
    """A loss or gradient norm is not finite: later steps would be lost. ``samples``: the file with the batch."""
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


class RollBack(Exception):
    """Continue from the newest checkpoint, without the ``left_out`` steps. Raised on all ranks at once."""

    def __init__(self, left_out: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.left_out, self.why = tuple(left_out), why


def is_spike(loss: float, before: Sequence[float], mads: float) -> bool:
    """Whether ``loss`` exceeds earlier ones by ``mads`` scaled median absolute deviations and ``MIN_SPIKE``."""
    if len(before) < MIN_LOSSES:
        return False
    middle = statistics.median(before)
    deviation = TO_SIGMA * statistics.median(abs(one - middle) for one in before)
    return loss > middle + max(mads * deviation, MIN_SPIKE)


@dataclass
class StepGuard:
    """Judges each step. ``keep(result, fault, action)`` writes the step's samples down."""

    guards: GuardsSection
    log: Callable[[str], None] = print
    keep: Callable[[StepResult, Fault, str], str] = field(default=lambda result, fault, action: "")

    def decides_update(self, state: TrainState) -> bool:
        """Whether the next step's update waits for ``judge``."""
        return "skip" in (self.guards.nonfinite, self.guards.spike) or state.step in state.left_out

    def judge(self, state: TrainState, result: StepResult) -> bool:
        """Whether the step's update is left out. Raises Diverged or RollBack. ``state`` is of before the step."""
        if result.step - 1 in state.left_out:
            self.log(f"step {result.step} is left out (loss {result.loss:.4g})")
            return True
        fault = self._find(state, result)
        if fault is None:
            state.losses_before = [*state.losses_before, result.loss][-self.guards.spike_window :]
            state.skipped_in_a_row = 0
            return False
        action: str = self.guards.nonfinite if fault == "nonfinite" else self.guards.spike
        if fault == "nonfinite":
            what = f"step {result.step} gave loss {result.loss:.4g} and gradient norm {result.grad_norm:.4g}"
        else:
            before = state.losses_before
            what = f"the loss jumped to {result.loss:.4g} at step {result.step}; "
            what += f"the median of {len(before)} before was {statistics.median(before):.4g}"
        kept, most = self.keep(result, fault, action), self.guards.max_in_a_row
        if action == "skip":
            state.skipped_in_a_row += 1
            state.num_skipped += 1
            if state.skipped_in_a_row > most:
                raise _give_up(what, f"{most} steps in a row were skipped before", result)
        elif action == "rollback":
            if state.num_rollbacks >= most:
                raise _give_up(what, f"the run was rolled back {state.num_rollbacks} times before", result)
            raise RollBack(range(max(0, result.step - self.guards.leave_out), result.step), what)
        elif action == "stop":
            raise explain_nonfinite(result, kept)
        shown = f"; its samples: {kept}" if kept else ""
        if action == "warn":
            state.losses_before = [*state.losses_before, result.loss][-self.guards.spike_window :]
            self.log(f"warning: {what}{shown}; training continues (guards.spike: warn)")
            return False
        self.log(f"warning: {what}; the update is skipped{shown}")
        return True

    def _find(self, state: TrainState, result: StepResult) -> Fault | None:
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return "nonfinite"
        if self.guards.spike != "off" and is_spike(result.loss, state.losses_before, self.guards.spike_mads):
            return "spike"
        return None


def _give_up(what: str, why: str, result: StepResult) -> Diverged:
    return Diverged(
        what,
        where=f"step {result.step}, learning rate {result.learning_rate:.3g}",
        why=f"{why} (guards.max_in_a_row)",
        fix="start again with a lower optimizer.learning_rate (--fresh), or look at the samples in logs/batch-*.json;"
        " the last checkpoint is unaffected",
        exit_code=EXIT_FAILED,
    )


def fingerprint(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Two float64 numbers on ``device``, exact integers below 2^32, that any changed bit of this rank's part of the
    parameters changes: its bytes summed as 64-bit integers, each parameter's times an odd factor of its own, modulo
    2^64. Reads each byte once and holds no copy.
    """
    # Not of masters: of DeepSpeed's no two ranks hold the same part.
    parts = (computed_part(parameter) for parameter in parameters)
    sums = [_sum_words(part).to(device) for part in parts]
    if not sums:
        return torch.zeros(2, dtype=torch.float64, device=device)
    factors = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1
    total = (torch.stack(sums) * factors).sum()
    return torch.stack([total & 0xFFFFFFFF, (total >> 32) & 0xFFFFFFFF]).double()


def _sum_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = len(flat) - len(flat) % WORD_BYTES
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == len(flat) else total + 257 * flat[whole:].sum(dtype=torch.int64)


def find_deviating(fingerprints: Sequence[tuple[float, ...]], groups: Sequence[int]) -> list[int]:
    """Ranks whose weights differ from the majority's; without a majority all of the group."""
    deviating: list[int] = []
    for group in sorted(set(groups)):
        ranks = [rank for rank, one in enumerate(groups) if one == group]
        found = [fingerprints[rank] for rank in ranks]
        usual = max(set(found), key=found.count)
        if found.count(usual) == len(ranks):
            continue
        is_clear = 2 * found.count(usual) > len(ranks)
        deviating += [rank for rank in ranks if not is_clear or fingerprints[rank] != usual]
    return deviating


@dataclass
class Replicas:
    """Compares the trained weights of ranks that should hold the same. ``groups``: for each rank, the part it holds."""

    parameters: Sequence[torch.Tensor]
    groups: Sequence[int]
    every: int  # steps

    def is_due(self, step: int) -> bool:
        """Whether weights are compared in a step counted from 0, as they are before its update."""
        return step % self.every == 0

    def fingerprint(self, device: torch.device) -> torch.Tensor:
        return fingerprint(self.parameters, device)

    def compare(self, state: TrainState, fingerprints: Sequence[tuple[float, ...]]) -> None:
        """Diverged where replicas differ. ``fingerprints``: of all ranks, or empty. ``state``: before the step."""
        if not fingerprints[0]:
            return
        if ranks := find_deviating(fingerprints, self.groups):
            raise explain_deviating(ranks, state.step, state.replicas_equal_at)
        state.replicas_equal_at = state.step


def explain_deviating(ranks: Sequence[int], num_steps: int, equal_at: int | None) -> Diverged:
    names = ", ".join(map(str, ranks))
    since = "" if equal_at is None else f"; they were equal after step {equal_at}"
    several = len(ranks) > 1
    older = f"of step {equal_at} or before" if equal_at else "that is older"
    return Diverged(
        f"rank{'s' * several} {names} hold{'s' * (not several)} other trained weights than the ranks that should hold"
        " the same",
        where=f"after step {num_steps}{since}",
        why="equal updates gave other numbers: mostly a GPU or memory with errors, or a hook that changes weights on"
        " some ranks only",
        fix=f"check those GPUs (manyhands doctor; nvidia-smi -q -d ECC) and leave them out; resume from a checkpoint"
        f" {older}, later ones may hold either (remove them). guards.replicas_every=0 compares nothing",
        exit_code=EXIT_FAILED,
    )


class DivergenceGuard(Hook):
    """Ends a diverged run, or warns once and notes it in the state, as ``stop.divergence`` says."""

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
