from __future__ import annotations

import math

import pytest

from manyhands.config.schema import StopSection
from manyhands.training.guards import Diverged, DivergenceGuard, stop_reason
from manyhands.training.types import Evaluation, StepResult, TrainState


def result(loss: float, grad_norm: float = 1.0, num_loss_tokens: int = 1, step: int = 7) -> StepResult:
    return StepResult(step, 0.5, loss, (loss, 1.0), grad_norm, 1e-4, 1, 1, num_loss_tokens, 1, 1.0, 1.0)


def evaluation(step: int, loss: float) -> Evaluation:
    return Evaluation(step, loss, 1.0, 0.0, 1, 1, 1, 0.1)


def watch(losses: list[float], state: TrainState | None = None, said: list[str] | None = None, **keys) -> int | None:
    """The step, counted from 1, at which the guard ends a run of these losses."""
    state = state or TrainState()
    guard = DivergenceGuard(StopSection(**keys), (said if said is not None else []).append)
    for step, loss in enumerate(losses, start=1):
        try:
            guard.after_step(state, result(loss, step=step))
        except Diverged:
            return step
    return None


def test_tokens_are_never_passed():
    stop = StopSection(max_tokens=100)
    assert stop_reason(stop, 50, TrainState(step=1, tokens=90), 10) == ""
    assert "stop.max_tokens" in stop_reason(stop, 50, TrainState(step=1, tokens=90), 11)


def test_time_patience_and_steps():
    assert "stop.max_time_s" in stop_reason(StopSection(max_time_s=5), 50, TrainState(elapsed_s=5.1), 1)
    assert "stop.patience" in stop_reason(StopSection(patience=2), 50, TrainState(evaluations_without_gain=2), 1)
    assert "50 steps" in stop_reason(StopSection(), 50, TrainState(step=50), 1)


def test_a_loss_that_stays_far_above_its_best_ends_the_run():
    assert watch([2.0] * 5 + [6.1] * 30) == 25  # 20 steps above 3 x 2.0
    assert watch([2.0] * 5 + [5.9] * 30) is None
    assert watch([2.0] * 5 + [6.1] * 30, divergence_factor=4.0) is None
    assert watch([2.0] * 5 + [6.1] * 30, divergence_steps=2) == 7


def test_a_loss_above_a_bound_ends_the_run_after_as_many_steps_in_a_row():
    losses = [9.0, 2.0, 6.0, 6.0, 2.0, 6.0, 6.0, 6.0]
    assert watch(losses) is None
    assert watch(losses, loss_above=5.0) == 8
    assert watch(losses, loss_above=5.0, loss_above_steps=2) == 4
    assert watch(losses, loss_above=6.0) is None, "above, not at"
    state, said = TrainState(), []
    assert watch(losses, state, said, loss_above=5.0, divergence="warn") is None
    assert len(said) == 1 and "it was above 5 (stop.loss_above) for 3 steps in a row" in said[0]
    state = TrainState()
    assert watch([6.0, 6.0], state, loss_above=5.0) is None and watch([6.0], state, loss_above=5.0) == 1, "resumed"


def test_spikes_an_easy_batch_and_small_losses_end_nothing():
    assert watch([2.0] * 5 + ([50.0] * 19 + [2.0]) * 3) is None, "spikes that pass"
    assert watch([0.1] + [1.5] * 40) is None, "one easy batch sets no mark"
    assert watch([0.01] * 5 + [0.9] * 40) is None, "90 times as much of next to nothing is no divergence"


def test_a_resumed_run_goes_on_counting_and_a_warned_one_says_it_once():
    state, said = TrainState(), []
    assert watch([2.0] * 5 + [9.0] * 10, state) is None
    assert watch([9.0] * 10, state) == 10
    state = TrainState()
    assert watch([2.0] * 5 + [9.0] * 40, state, said, divergence="warn") is None
    assert (
        len(said) == 1
        and "above 3 times its best for 20 steps in a row" in state.divergence
        and state.divergence in said[0]
    )


def test_a_gradient_of_exactly_0_ends_the_run_where_there_is_something_to_learn():
    guard = DivergenceGuard(StopSection(), print)
    guard.after_step(TrainState(), result(0.0, grad_norm=0.0))  # all is learned
    guard.after_step(TrainState(), result(3.0, grad_norm=0.0, num_loss_tokens=0))
    with pytest.raises(Diverged, match="the gradient of step 7 is exactly 0 at loss 3"):
        guard.after_step(TrainState(), result(3.0, grad_norm=0.0))


def test_a_held_out_loss_far_above_the_untrained_models_ends_the_run():
    state, guard = TrainState(), DivergenceGuard(StopSection(), print)
    guard.after_evaluation(state, evaluation(0, 2.0))
    guard.after_evaluation(state, evaluation(5, 5.9))  # overfitted, perhaps
    with pytest.raises(Diverged, match="was 2 before training"):
        guard.after_evaluation(state, evaluation(9, 6.1))
    with pytest.raises(Diverged, match="the held-out loss is nan after step 9"):
        DivergenceGuard(StopSection(divergence="warn"), print).after_evaluation(state, evaluation(9, math.nan))


def test_a_held_out_set_that_is_easier_than_training_ends_nothing():
    state, guard = TrainState(), DivergenceGuard(StopSection(), print)
    guard.after_evaluation(state, evaluation(0, 0.45))
    assert watch([2.3 - 0.007 * step for step in range(60)], state) is None


def test_a_run_that_only_overfits_is_warned_of():
    said: list[str] = []
    state, guard = TrainState(), DivergenceGuard(StopSection(), said.append)
    guard.after_evaluation(state, evaluation(0, 0.45))
    assert watch([0.5, 0.4, 0.3, 0.2, 0.1], state) is None
    guard.after_evaluation(state, evaluation(5, 1.6))
    assert len(said) == 1 and "the run overfits" in said[0] and not state.divergence


def test_a_run_that_is_wrong_from_its_second_step_on_ends_although_nothing_was_better():
    state, guard = TrainState(), DivergenceGuard(StopSection(), print)
    guard.after_evaluation(state, evaluation(0, 2.0))
    assert watch([2.1] + [50.0] * 30, state) == 21
