"""The loop. It knows steps, evaluations and hooks; no feature's name stands in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from manyhands.config.schema import StopSection
from manyhands.errors import UserError
from manyhands.train.guards import check_finite, stop_reason
from manyhands.train.optimizer import rates_by_pattern, set_learning_rate
from manyhands.train.schedule import Schedule
from manyhands.train.step import StepSums, StepWork, run_step
from manyhands.train.types import Evaluate, Hook, ParallelModel, StepResult, TrainState


@dataclass
class Loop:
    """Everything one training loop needs. ``works`` yields the remaining steps, from ``state.step`` on."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    works: Iterable[StepWork]
    state: TrainState
    stop: StopSection
    num_steps: int
    max_grad_norm: float
    seed: int
    rank: int
    device: torch.device
    hooks: Sequence[Hook] = ()
    evaluate: Evaluate | None = None
    evaluate_every: int = 0
    evaluate_at_start: bool = True
    interrupted: Callable[[], bool] = lambda: False  # asked once a step; true on any rank stops all


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has stopped between two steps; ``state`` is consistent."""


def train(loop: Loop) -> TrainState:
    """Runs until a limit is reached; returns the state with ``stop_reason`` set. Raises Interrupted when asked to stop."""
    state = loop.state
    for hook in loop.hooks:
        hook.before_training(state)
    if state.step == 0 and loop.evaluate_at_start:
        _evaluate(loop)
    started, elapsed_before = time.monotonic(), state.elapsed_s
    for work in _until_stop(loop):
        begin = time.monotonic() - work.waited_s()  # the first micro-batch is here; waiting for it belongs to the step
        set_learning_rate(loop.optimizer, loop.schedule(work.step))
        sums = run_step(loop.parallel, loop.optimizer, work, max_grad_norm=loop.max_grad_norm, seed=loop.seed, rank=loop.rank)
        result, elapsed_s, interrupted = _agree(loop, work, sums, begin, elapsed_before + time.monotonic() - started)
        check_finite(result)
        state.step, state.rows, state.tokens = work.step + 1, state.rows + work.num_rows, state.tokens + work.num_tokens
        state.targets, state.elapsed_s = state.targets + work.num_targets, elapsed_s
        for hook in loop.hooks:
            hook.after_step(state, result)
        if loop.evaluate is not None and loop.evaluate_every and state.step % loop.evaluate_every == 0:
            _evaluate(loop)
        for hook in loop.hooks:
            hook.between_steps(state)
        if interrupted:
            raise Interrupted
    if state.evaluated_step != state.step:
        _evaluate(loop)
    for hook in loop.hooks:
        hook.after_training(state)
    return state


def _until_stop(loop: Loop) -> Iterator[StepWork]:
    for work in loop.works:
        loop.state.stop_reason = stop_reason(loop.stop, loop.num_steps, loop.state, work.num_tokens)
        if loop.state.stop_reason and loop.state.step == 0:
            raise UserError(f"no step can be taken: {loop.state.stop_reason}", fix="raise stop.max_tokens, or make the batch smaller")
        if loop.state.stop_reason:
            return
        yield work
    loop.state.stop_reason = stop_reason(loop.stop, loop.state.step, loop.state, 0)


def _agree(loop: Loop, work: StepWork, sums: StepSums, begin: float, elapsed_s: float) -> tuple[StepResult, float, bool]:
    """One small gather makes every rank know the same step: losses of all ranks, the slowest clock, a wish to stop."""
    flag = float(loop.interrupted())
    mine = torch.stack([sums.loss_sum, sums.grad_norm.double()])
    clocks = torch.tensor([work.rank_divisor, elapsed_s, flag, work.waited_s()], dtype=torch.float64)
    rows = [row.tolist() for row in loop.parallel.all_gather(torch.cat([mine, clocks.to(mine.device, non_blocking=True)]))]
    losses = tuple(row[0] / row[2] if row[2] else math.nan for row in rows)
    seconds = time.monotonic() - begin
    result = StepResult(
        step=work.step + 1,
        epoch=work.epoch,
        loss=sum(row[0] for row in rows) / work.divisor,
        rank_losses=losses,
        grad_norm=rows[0][1],
        learning_rate=loop.schedule(work.step),
        num_rows=work.num_rows,
        num_tokens=work.num_tokens,
        num_targets=work.num_targets,
        num_micro_batches=work.num_micro_batches,
        seconds=seconds,
        tokens_per_s=work.num_tokens / seconds,
        input_wait_s=max(row[5] for row in rows),
        learning_rates=rates_by_pattern(loop.optimizer),
    )
    return result, max(row[3] for row in rows), any(row[4] for row in rows)


def _evaluate(loop: Loop) -> None:
    if loop.evaluate is None:
        return
    state = loop.state
    evaluation = loop.evaluate(state)
    state.evaluated_step = state.step
    gained = state.best_loss is None or evaluation.loss < state.best_loss
    state.evaluations_without_gain = 0 if gained else state.evaluations_without_gain + 1
    if gained or state.best_step == 0:  # the model before training is a mark to pass; the best is a trained one
        state.best_loss, state.best_step = evaluation.loss, state.step
    for hook in loop.hooks:
        hook.after_evaluation(state, evaluation)
