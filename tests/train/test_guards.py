from __future__ import annotations

import math

import pytest

from manyhands.config.schema import StopSection
from manyhands.errors import UserError
from manyhands.train.guards import check_finite, stop_reason
from manyhands.train.types import StepResult, TrainState


def result(loss: float, grad_norm: float = 1.0) -> StepResult:
    return StepResult(7, 0.5, loss, (loss, 1.0), grad_norm, 1e-4, 1, 1, 1, 1, 1.0, 1.0)


def test_tokens_are_never_passed():
    stop = StopSection(max_tokens=100)
    assert stop_reason(stop, 50, TrainState(step=1, tokens=90), 10) == ""
    assert "stop.max_tokens" in stop_reason(stop, 50, TrainState(step=1, tokens=90), 11)


def test_time_patience_and_steps():
    assert "stop.max_time_s" in stop_reason(StopSection(max_time_s=5), 50, TrainState(elapsed_s=5.1), 1)
    assert "stop.patience" in stop_reason(StopSection(patience=2), 50, TrainState(evaluations_without_gain=2), 1)
    assert "50 steps" in stop_reason(StopSection(), 50, TrainState(step=50), 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_says_what_to_do(loss):
    with pytest.raises(UserError) as caught:
        check_finite(result(loss))
    assert "step 7" in str(caught.value) and "learning_rate" in str(caught.value)
