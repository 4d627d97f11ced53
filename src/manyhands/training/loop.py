"""The loop, and a pass over validation samples. Knows steps, evaluations and hooks, and names no feature.

Evaluation sums over all ranks first, then divides each term once by its own weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from manyhands.config.schema import GuardsSection, StopSection
from manyhands.core.errors import UserError
from manyhands.core.terms import LANGUAGE_MODEL, LossTerm
from manyhands.training.guards import Replicas, StepGuard, stop_reason
from manyhands.training.schedule import Schedule
from manyhands.training.step import StepSums, StepWork, combine, compute_gradients, refuse_undeclared, with_values
from manyhands.training.types import Batch, Engine, Evaluate, Evaluation, Hook, StepFigures, StepResult, TrainState


@dataclass
class Loop:
    """Everything one training loop needs. ``works`` yields the remaining steps, from ``state.step`` on."""

    engine: Engine
    schedule: Schedule
    works: Iterable[StepWork]
    state: TrainState
    stop: StopSection
    num_steps: int
    max_grad_norm: float
    seed: int
    rank: int
    device: torch.device
    terms: Sequence[LossTerm] = (LANGUAGE_MODEL,)  # of the loss
    figures: Sequence[StepFigures] = ()
    hooks: Sequence[Hook] = ()
    evaluate: Evaluate | None = None
    evaluate_after: Callable[[int], bool] = lambda num_steps: False  # whether an evaluation follows so many steps
    evaluate_at_start: bool = True
    interrupted: Callable[[], bool] = lambda: False  # asked once a step; true on any rank stops all
    guard: StepGuard = field(default_factory=lambda: StepGuard(GuardsSection()))
    replicas: Replicas | None = None  # where ranks hold the same weights


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has stopped between two steps; ``state`` is consistent.

    ``evaluate`` may raise it too, on all ranks at once: an evaluation that did not end has not happened.
    """


def train(loop: Loop) -> TrainState:
    """Runs to a limit; returns the state with ``stop_reason``. Raises Interrupted when asked to stop."""
    state = loop.state
    for hook in loop.hooks:
        hook.before_training(state)
    if _is_due(loop):
        _evaluate(loop)
    for figures in loop.figures:
        figures.begin()
    started, elapsed_before = time.monotonic(), state.elapsed_s
    begin = started
    for work in _until_stop(loop):
        checks_before_update = loop.guard.decides_update(state)
        if not checks_before_update and loop.max_grad_norm == 0:
            loop.engine.update_in_backward(loop.schedule(work.step))
        sums = compute_gradients(loop.engine, work, seed=loop.seed, rank=loop.rank, terms=loop.terms)
        wait = _gather_reports(loop, work, sums, elapsed_before + time.monotonic() - started, sums.worked_until - begin)
        if not checks_before_update:
            loop.engine.step(loop.schedule(work.step), max_norm=loop.max_grad_norm)
        reports = wait()  # the step's one wait: for its sums, while the device still runs the update
        end = time.monotonic()
        result = _make_result(loop, work, reports, end - begin)
        if loop.replicas is not None:
            loop.replicas.compare(state, [report.fingerprints for report in reports])
        if loop.guard.judge(state, result):
            loop.engine.drop_gradients()
            result = replace(result, skipped=True)
        elif checks_before_update:
            loop.engine.step(loop.schedule(work.step), max_norm=loop.max_grad_norm)
            result = replace(result, learning_rates=loop.engine.learning_rates())
        state.step = work.step + 1
        state.samples += work.num_samples
        state.tokens += work.num_tokens
        state.loss_tokens += work.num_loss_tokens
        state.elapsed_s = max(report.elapsed_s for report in reports)
        start = 0
        for hook in loop.hooks:  # each gets what it has reported on every rank
            if num := hook.num_local_values:
                hook.on_gathered([report.of_hooks[start : start + num] for report in reports])
                start += num
        for hook in loop.hooks:
            hook.after_step(state, result)
        pause = time.monotonic()
        is_asked_to_stop = any(report.interrupted for report in reports)
        if _is_due(loop) and not is_asked_to_stop:
            _evaluate(loop)
        for hook in loop.hooks:
            hook.between_steps(state)
        if is_asked_to_stop:
            raise Interrupted
        begin = end + time.monotonic() - pause  # evaluations and checkpoints belong to no step; all else does
    if state.evaluated_step != state.step:
        _evaluate(loop)
    for hook in loop.hooks:
        hook.after_training(state)
    return state


def _until_stop(loop: Loop) -> Iterator[StepWork]:
    for work in loop.works:
        loop.state.stop_reason = stop_reason(loop.stop, loop.num_steps, loop.state, work.num_tokens)
        if loop.state.stop_reason and loop.state.step == 0:
            raise UserError(
                f"no step can be taken: {loop.state.stop_reason}",
                where="stop.max_tokens",
                fix="raise stop.max_tokens, or make the batch smaller",
            )
        if loop.state.stop_reason:
            return
        yield work
    loop.state.stop_reason = stop_reason(loop.stop, loop.state.step, loop.state, 0)


class _RankReport(NamedTuple):
    """What one rank knows of a step."""

    sums: dict[str, float]  # of each loss term
    weights: dict[str, float]  # of each loss term on this rank, for its own mean
    grad_norm: float
    figures: dict[str, float]
    elapsed_s: float
    interrupted: float
    waited_s: float
    busy_s: float  # of the step, until this rank's own work was done
    fingerprints: tuple[float, ...]  # of its trained weights before the update, where they are compared
    of_hooks: Sequence[float]  # of all of them, in order


def _gather_reports(
    loop: Loop, work: StepWork, sums: StepSums, elapsed_s: float, busy_s: float
) -> Callable[[], list[_RankReport]]:
    """Every rank's report of the step by one small gather. Call the result to wait for it, and nothing later."""
    names = sorted(sums.terms)  # the same on every rank
    weights = [float(work.weights[name].own) for name in names]
    of_hooks = [float(value) for hook in loop.hooks for value in hook.local_values()]
    clocks = torch.tensor(
        [*weights, elapsed_s, float(loop.interrupted()), work.waited_s(), busy_s, *of_hooks], dtype=torch.float64
    )
    figures = [figure.double() for each in loop.figures for figure in each.read(loop.engine.all_reduce_sum)]
    mine = torch.stack([*(sums.terms[name] for name in names), sums.grad_norm.double(), *figures])
    parts = [mine, clocks.to(mine.device, non_blocking=True)]
    if loop.replicas is not None and loop.replicas.is_due(work.step):
        parts.append(loop.replicas.fingerprint(mine.device))
    gathered = torch.stack(loop.engine.all_gather(torch.cat(parts)))
    num_of_hooks, arrived = len(of_hooks), None
    if gathered.is_cuda:
        gathered = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True).copy_(gathered, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def wait() -> list[_RankReport]:
        if arrived is not None:
            arrived.synchronize()
        return [read(*values) for values in gathered.tolist()]

    def read(*values: float) -> _RankReport:
        num, end = len(names), len(names) + 1 + len(figures)
        own_sums = dict(zip(names, values[:num], strict=True))
        figure_names = [name for each in loop.figures for name in each.metrics]
        own_figures = dict(zip(figure_names, values[num + 1 : end], strict=True))
        own_weights = dict(zip(names, values[end : end + num], strict=True))
        elapsed_s, interrupted, waited_s, busy_s, *others = values[end + num :]
        of_hooks, fingerprints = others[:num_of_hooks], tuple(others[num_of_hooks:])
        clocks = (elapsed_s, interrupted, waited_s, busy_s)
        return _RankReport(own_sums, own_weights, values[num], own_figures, *clocks, fingerprints, of_hooks)

    return wait


def _make_result(loop: Loop, work: StepWork, reports: list[_RankReport], seconds: float) -> StepResult:
    sums = {name: sum(report.sums[name] for report in reports) for name in reports[0].sums}
    terms = _means(sums, {name: work.weights[name].total for name in sums})
    return StepResult(
        step=work.step + 1,
        epoch=work.epoch,
        loss=combine(terms, loop.terms),
        rank_losses=tuple(combine(_means(report.sums, report.weights), loop.terms) for report in reports),
        grad_norm=reports[0].grad_norm,
        learning_rate=loop.schedule(work.step),
        num_samples=work.num_samples,
        num_tokens=work.num_tokens,
        num_loss_tokens=work.num_loss_tokens,
        num_micro_batches=work.num_micro_batches,
        seconds=seconds,
        tokens_per_s=work.num_tokens / seconds,
        input_wait_s=max(report.waited_s for report in reports),
        learning_rates=loop.engine.learning_rates(),
        terms=terms if len(sums) > 1 else {},
        figures=reports[0].figures,
        rank_seconds=tuple(round(report.busy_s, 6) for report in reports),
    )


def _means(sums: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Each term divided by its own weight; one that weighs nothing has no mean."""
    return {name: value / weights[name] for name, value in sums.items() if weights[name]}


def _is_due(loop: Loop) -> bool:
    """Whether an evaluation before the next step is missing: a resumed run may have stopped before it."""
    state = loop.state
    if state.step == 0:
        return loop.evaluate_at_start
    return state.evaluated_step != state.step and loop.evaluate_after(state.step)


def _evaluate(loop: Loop) -> None:
    if loop.evaluate is None:
        return
    state = loop.state
    evaluation = loop.evaluate(state)
    measured = {name: value for hook in loop.hooks for name, value in hook.measure(state, evaluation).items()}
    evaluation = replace(evaluation, metrics=measured) if measured else evaluation
    state.evaluated_step = state.step
    gained = state.best_loss is None or evaluation.loss < state.best_loss
    state.evaluations_without_gain = 0 if gained else state.evaluations_without_gain + 1
    if gained or state.best_step == 0:  # the model before training is a mark to pass; the best is a trained one
        state.best_loss, state.best_step = evaluation.loss, state.step
    for hook in loop.hooks:
        hook.after_evaluation(state, evaluation)


NO_SETS: Mapping[str, Iterable[Batch]] = {}


def evaluate(
    engine: Engine,
    module: nn.Module,
    micro_batches: Iterable[Batch],
    state: TrainState,
    *,
    num_samples: int,
    num_tokens: int,
    num_loss_tokens: Mapping[str, int],
    device: torch.device,
    terms: Sequence[LossTerm] = (LANGUAGE_MODEL,),
    sample: Callable[[], tuple[tuple[str, str], ...]] | None = None,
    sets: Mapping[str, Iterable[Batch]] = NO_SETS,
) -> Evaluation:
    """Each of ``terms`` by its weight, and their metrics, over all ranks. Every rank must bring the same number of
    micro-batches.

    ``sets``: micro-batches of further sets, each measured by itself; where ``micro_batches`` are none, all of them
    together are what is measured. ``num_loss_tokens``: of each set by name, and of what is measured as "". ``module``
    is put into evaluation mode for the pass.
    """
    start = time.monotonic()
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            sums = _sum_terms(engine, micro_batches, terms, device)
            by_set = {name: _sum_terms(engine, batches, terms, device) for name, batches in sets.items()}
            samples = sample() if sample is not None else ()
    finally:
        module.train(was_training)
    for other in by_set.values() if not sums else ():
        sums = {
            name: (sums.get(name, (0.0, 0.0))[0] + a, sums.get(name, (0.0, 0.0))[1] + b)
            for name, (a, b) in other.items()
        }
    loss, figures, losses = _to_figures(sums, terms)
    measured = {name: _to_figures(found, terms) for name, found in by_set.items()}
    return Evaluation(
        step=state.step,
        loss=loss,
        figures=figures,
        num_samples=num_samples,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens[""],
        seconds=time.monotonic() - start,
        samples=samples,
        sets={
            name: {"loss": loss, **figures, "num_loss_tokens": num_loss_tokens[name]}
            for name, (loss, figures, _) in measured.items()
        },
        terms=losses if len(losses) > 1 else {},
        declared=tuple(metric for term in terms for metric in term.metrics),
    )


def _sum_terms(
    engine: Engine, micro_batches: Iterable[Batch], terms: Sequence[LossTerm], device: torch.device
) -> dict[str, tuple[float, float]]:
    """(sum, weight) by term and metric over all ranks, float64, read once; empty without micro-batches."""
    names = sorted({name for term in terms for name in (term.name, *(metric.of for metric in term.metrics))})
    sums = torch.zeros(0, dtype=torch.float64, device=device)
    for batch in with_values(engine, micro_batches):
        found = engine.forward(batch, metrics=True)
        refuse_undeclared(found, names)
        added = torch.stack([number.double() for name in names for number in found[name]])
        sums = added if len(sums) == 0 else sums + added
    if len(sums) == 0:
        return {}
    totals = engine.all_reduce_sum(sums).tolist()
    return {name: (totals[2 * i], totals[2 * i + 1]) for i, name in enumerate(names)}


def _to_figures(
    sums: Mapping[str, tuple[float, float]], terms: Sequence[LossTerm]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """The loss of a set of samples, its figures, and its loss by term."""
    means = {name: total / weight for name, (total, weight) in sums.items() if weight}
    metrics = [metric for term in terms for metric in term.metrics if metric.of in means]
    losses = {term.name: means[term.name] for term in terms if term.name in means}
    return combine(means, terms), {metric.name: metric.figure(means[metric.of]) for metric in metrics}, losses
