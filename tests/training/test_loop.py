"""The loop over a one-weight model: when it evaluates, when it stops, what hooks see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.config.schema import GuardsSection, StopSection
from manyhands.core.errors import UserError
from manyhands.training.guards import StepGuard
from manyhands.training.loop import Interrupted, Loop, train
from manyhands.training.step import StepWork, TermWeight
from manyhands.training.types import Evaluation, Hook, TrainState
from tests.training.test_step import Plain


class Log(Hook):
    def __init__(self) -> None:
        self.events: list[str] = []

    def after_step(self, state, result):
        self.events.append(f"step {result.step}")

    def after_evaluation(self, state, evaluation):
        self.events.append(f"evaluate {evaluation.step}")

    def between_steps(self, state):
        self.events.append(f"between {state.step}")


def make_loop(losses: list[float] | None = None, num_steps: int = 4, **kwargs) -> Loop:
    remaining = iter(losses or [])

    def evaluate(state: TrainState) -> Evaluation:
        return Evaluation(state.step, next(remaining, 1.0), {}, 1, 1, 1, 0.1)

    def works():
        for step in range(state.step, num_steps):
            yield StepWork(
                step, step / num_steps, 2, 10, 2, 1, {"lm": TermWeight(2, 2)}, [{"x": torch.tensor([1.0, 2.0])}]
            )

    state = kwargs.pop("state", TrainState())
    options = {
        "evaluate": evaluate,
        "evaluate_after": lambda num_steps: num_steps % 2 == 0,
        "stop": StopSection(),
    } | kwargs
    return Loop(
        engine=Plain(),
        schedule=lambda step: 0.1,
        works=works(),
        state=state,
        num_steps=num_steps,
        max_grad_norm=0.0,
        seed=0,
        rank=0,
        device=torch.device("cpu"),
        **options,
    )


def test_order_of_events():
    log = Log()
    state = train(make_loop(hooks=[log], num_steps=3))
    assert log.events == [
        *(
            "evaluate 0",
            "step 1",
            "between 1",
            "step 2",
            "evaluate 2",
            "between 2",
            "step 3",
            "between 3",
            "evaluate 3",
        ),
    ]
    assert (state.step, state.samples, state.tokens, state.loss_tokens) == (3, 6, 30, 6)
    assert state.stop_reason == "all 3 steps are done"


class Keep(Hook):
    def __init__(self) -> None:
        self.results = []

    def after_step(self, state, result):
        self.results.append(result)


class Clock:
    """In place of the ``time`` module: it advances where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("manyhands.training.loop.time", clock)
    return clock


def test_waiting_for_input_is_counted_and_belongs_to_the_step(clock: Clock):
    def works():
        for step in range(2):
            clock.now += 0.2
            yield StepWork(
                step,
                1.0,
                2,
                10,
                2,
                1,
                {"lm": TermWeight(2, 2)},
                [{"x": torch.tensor([1.0, 2.0])}],
                waited_s=lambda: 0.2,
            )

    keep = Keep()
    loop = make_loop(hooks=[keep], num_steps=2)
    loop.works = works()
    train(loop)
    for result in keep.results:
        assert result.input_wait_s == 0.2 and result.seconds == pytest.approx(0.2)


def test_the_seconds_of_all_steps_are_the_time_it_took_without_evaluations_and_checkpoints(clock: Clock):
    class Computes(Plain):
        def step(self, learning_rate, *, max_norm):
            clock.now += 1.0

    class Saves(Keep):
        def after_step(self, state, result):
            super().after_step(state, result)
            clock.now += 0.25  # writing metrics keeps the next step waiting

        def between_steps(self, state):
            clock.now += 30.0

    loop = make_loop(hooks=[(saves := Saves())], num_steps=4, evaluate=None)
    loop.engine = Computes()
    train(loop)
    assert [result.seconds for result in saves.results] == pytest.approx([1.0, 1.25, 1.25, 1.25])


def test_the_wait_for_a_steps_sums_comes_after_its_update_was_launched():
    events = []

    class Gathers(Plain):
        def all_gather(self, tensor):
            events.append("gather")
            return super().all_gather(tensor)

    loop = make_loop(hooks=[(keep := Keep())], num_steps=2, evaluate=None)
    loop.engine = Gathers()
    loop.engine.optimizer.register_step_post_hook(lambda *_: events.append(f"update after {len(keep.results)} results"))
    train(loop)
    assert events == ["gather", "update after 0 results", "gather", "update after 1 results"]


@pytest.mark.parametrize(
    ("max_grad_norm", "guards", "expected"),
    [(0.0, {}, [0.1, 0.1]), (1.0, {}, []), (0.0, {"nonfinite": "skip"}, []), (0.0, {"spike": "skip"}, [])],
)
def test_weights_may_be_updated_in_the_backward_pass_unless_gradients_are_looked_at_first(
    max_grad_norm: float, guards: dict[str, Any], expected: list[float]
):
    loop = make_loop(num_steps=2, guard=StepGuard(GuardsSection(**guards)))
    loop.max_grad_norm, told = max_grad_norm, []
    loop.engine.update_in_backward = told.append  # type: ignore[method-assign]
    train(loop)
    assert told == expected


def test_a_step_that_a_rollback_leaves_out_is_not_updated_in_the_backward_pass():
    loop, told = make_loop(num_steps=3, state=TrainState(left_out=[1])), []
    loop.engine.update_in_backward = lambda rate: told.append(loop.state.step)  # type: ignore[method-assign]
    train(loop)
    assert told == [0, 2]


def test_max_tokens_stops_before_it_is_passed():
    state = train(make_loop(stop=StopSection(max_tokens=25)))
    assert state.tokens == 20 and "stop.max_tokens" in state.stop_reason


@pytest.mark.parametrize("later", [4.5, 4.0])
def test_patience_counts_evaluations_without_gain(later):
    """No worse is no gain."""
    state = train(make_loop([5.0, 4.0, later, later], num_steps=20, stop=StopSection(patience=2)))
    assert state.step == 6 and state.best_loss == 4.0 and state.best_step == 2 and "patience" in state.stop_reason


def test_a_resumed_loop_does_not_evaluate_at_start_again():
    log = Log()
    train(make_loop(hooks=[log], num_steps=4, state=TrainState(step=2, evaluated_step=2)))
    assert log.events[0] == "step 3"


def test_an_evaluation_that_a_stop_came_before_is_made_up_for_by_the_next_launch():
    log, whole = Log(), Log()
    train(make_loop(hooks=[whole]))
    state = TrainState()
    with pytest.raises(Interrupted):
        train(make_loop(hooks=[log], state=state, interrupted=lambda: state.step == 1))
    assert log.events[-2:] == ["step 2", "between 2"]
    train(make_loop(hooks=[log], state=state))
    evaluations = [event for event in log.events if event.startswith("evaluate")]
    assert (
        evaluations
        == [event for event in whole.events if event.startswith("evaluate")]
        == ["evaluate 0", "evaluate 2", "evaluate 4"]
    )
    assert log.events.index("evaluate 2") < log.events.index("step 3")


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_evaluation_that_was_stopped_has_not_happened(at: int):
    """Before training, between steps and at the end: the next launch makes it whole, and repeats none."""
    log, state = Log(), TrainState()
    loop = make_loop(hooks=[log], state=state)
    evaluate = loop.evaluate

    def stopped(now: TrainState) -> Evaluation:
        if now.step == at:
            raise Interrupted
        return evaluate(now)

    loop.evaluate = stopped
    with pytest.raises(Interrupted):
        train(loop)
    assert state.step == at and state.evaluated_step == (at - 2 if at else -1)
    train(make_loop(hooks=[log], state=state))
    assert [event for event in log.events if event.startswith("evaluate")] == ["evaluate 0", "evaluate 2", "evaluate 4"]
    assert [event for event in log.events if event.startswith("step")] == ["step 1", "step 2", "step 3", "step 4"]


def test_interruption_comes_between_two_steps():
    log = Log()
    with pytest.raises(Interrupted):
        train(make_loop(hooks=[log], interrupted=lambda: True))
    assert log.events[-1] == "between 1"


def test_a_limit_below_the_first_step_is_an_error_not_an_empty_run():
    with pytest.raises(UserError, match=r"no step can be taken: stop\.max_tokens = 9"):
        train(make_loop(stop=StopSection(max_tokens=9)))


def test_the_model_before_training_is_a_mark_for_patience_and_never_the_best():
    state = train(make_loop([1.0, 3.0, 2.0], num_steps=4))
    assert (state.best_loss, state.best_step, state.evaluations_without_gain) == (2.0, 4, 0)
    state = train(make_loop([1.0, 3.0, 4.0], num_steps=20, stop=StopSection(patience=2)))
    assert (state.step, state.best_step) == (4, 2)


def test_figures_of_hooks_belong_to_the_evaluation():
    class Measures(Log):
        def measure(self, state, evaluation):
            return {"double": 2 * evaluation.loss}

    class Keeps(Log):
        def after_evaluation(self, state, evaluation):
            kept.append((evaluation.loss, evaluation.metrics))

    kept = []
    train(make_loop([3.0, 2.0, 1.0], hooks=[Keeps(), Measures()]))
    assert kept and all(metrics == {"double": 2 * loss} for loss, metrics in kept)
