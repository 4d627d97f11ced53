from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from manyhands.config.schema import GuardsSection, StopSection
from manyhands.training.guards import (
    Diverged,
    DivergenceGuard,
    RollBack,
    StepGuard,
    StragglerHook,
    _give_up,
    explain_nonfinite,
    find_deviating,
    fingerprint,
    is_spike,
    stop_reason,
)
from manyhands.training.loop import train
from manyhands.training.types import Evaluation, StepResult, TrainState
from tests.training.test_loop import Keep, make_loop
from tests.training.test_step import Plain


def result(loss: float, grad_norm: float = 1.0, num_loss_tokens: int = 1, step: int = 31) -> StepResult:
    return StepResult(step, 0.5, loss, (loss, 1.0), grad_norm, 1e-4, 1, 1, num_loss_tokens, 1, 1.0, 1.0)


def evaluation(step: int, loss: float) -> Evaluation:
    return Evaluation(step, loss, {}, 1, 1, 1, 0.1)


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
    with pytest.raises(Diverged, match="the gradient of step 31 is exactly 0 at loss 3"):
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


CALM = [2.0, 2.1, 1.9, 2.05, 1.95] * 6


@pytest.mark.parametrize(
    ("loss", "before", "spikes"),
    [
        (4.0, CALM, True),
        (2.4, CALM, False),  # many deviations, and less than half a nat
        (2.6, CALM, False),  # 10 deviations are 0.74 nats
        (2.9, CALM, True),
        (9.0, CALM[:15], False),  # too few to tell
        (0.6, [0.0] * 30, True),
        (4.0, [1.0, 3.0] * 15, False),  # as noisy as that
    ],
)
def test_a_spike_is_far_above_the_median_by_deviations_and_nats(loss: float, before: list[float], spikes: bool) -> None:
    assert is_spike(loss, before, 10.0) == spikes


def judge(state: TrainState, bad: StepResult, **keys) -> tuple[bool, list[str], list[tuple]]:
    said: list[str] = []
    kept: list[tuple] = []

    def keep(result: StepResult, fault: str, action: str) -> str:
        kept.append((result.step, fault, action))
        return "logs/batch-31.json"

    guard = StepGuard(GuardsSection(**keys), said.append, keep)
    return guard.judge(state, bad), said, kept


def test_what_is_done_is_what_was_asked_for_and_the_samples_are_kept() -> None:
    bad, spike = result(math.nan), result(9.0)
    with pytest.raises(Diverged, match="step 31 gave loss nan") as stopped:
        judge(TrainState(), bad)
    assert "its samples: logs/batch-31.json" in str(stopped.value) and "learning_rate" in str(stopped.value)
    assert judge(TrainState(), bad, nonfinite="skip")[0]
    with pytest.raises(RollBack) as asked:
        judge(TrainState(), result(1.0, math.inf), nonfinite="rollback", leave_out=3)
    assert asked.value.left_out == (28, 29, 30)
    skips, said, kept = judge(TrainState(losses_before=CALM), spike)
    assert not skips and "the loss jumped to 9 at step 31; the median of 30 before was 2" in said[0]
    assert kept == [(31, "spike", "warn")] and "logs/batch-31.json" in said[0]
    skips, said, _ = judge(TrainState(losses_before=CALM), spike, spike="skip")
    assert skips and "the update is skipped" in said[0]
    assert judge(TrainState(losses_before=CALM), spike, spike="off") == (False, [], [])
    with pytest.raises(RollBack):
        judge(TrainState(losses_before=CALM), spike, spike="rollback")


def test_skipping_and_rolling_back_have_an_end() -> None:
    state = TrainState()
    for _ in range(2):
        assert judge(state, result(math.nan), nonfinite="skip", max_in_a_row=2)[0]
    with pytest.raises(Diverged, match="max_in_a_row"):
        judge(state, result(math.nan), nonfinite="skip", max_in_a_row=2)
    state = TrainState(skipped_in_a_row=2)
    assert not judge(state, result(2.0), nonfinite="skip", max_in_a_row=2)[0] and state.skipped_in_a_row == 0
    with pytest.raises(Diverged, match="rolled back 2 times"):
        judge(TrainState(num_rollbacks=2), result(math.nan), nonfinite="rollback", max_in_a_row=2)


class Poisoned(Plain):
    """Its gradient is not finite at one step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.bad_step, self.num_norms, self.before = step, 0, []

    def gradient_norm(self) -> torch.Tensor:
        self.num_norms += 1
        self.before.append(next(self.model.parameters()).detach().clone())
        if self.num_norms == self.bad_step:
            for parameter in self.model.parameters():
                parameter.grad.fill_(math.nan)
        return super().gradient_norm()


def test_a_skipped_step_leaves_the_weights_and_counts_as_a_step() -> None:
    keep, engine = Keep(), Poisoned(2)
    loop = make_loop(hooks=[keep], guard=StepGuard(GuardsSection(nonfinite="skip"), lambda text: None))
    loop.engine = engine
    state = train(loop)
    assert [one.skipped for one in keep.results] == [False, True, False, False]
    assert (state.step, state.samples, state.num_skipped, state.skipped_in_a_row) == (4, 8, 1, 0)
    assert torch.equal(engine.before[1], engine.before[2]) and not torch.equal(engine.before[2], engine.before[3])


def test_the_default_ends_the_run_at_that_step() -> None:
    loop = make_loop()
    loop.engine = Poisoned(2)
    with pytest.raises(Diverged, match="step 2 gave loss"):
        train(loop)


@pytest.mark.parametrize("error", [explain_nonfinite(result(math.nan)), _give_up("a spike", "3 before", result(9.0))])
def test_another_learning_rate_is_another_run(error: Diverged) -> None:
    """A resume with it is refused."""
    assert "learning_rate" in error.fix and "--fresh" in error.fix


def test_the_guard_s_memory_is_part_of_the_state() -> None:
    state = TrainState(losses_before=[1.0], left_out=[3], replicas_equal_at=100)
    assert TrainState(**json.loads(json.dumps(state.__dict__))) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_fingerprint_sees_every_bit_and_which_parameter_it_is_of(dtype: torch.dtype) -> None:
    def make() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [(torch.randn(3, 7) * 9).to(dtype), (torch.randn(5) * 9).to(dtype), torch.zeros(0, dtype=dtype)]

    cpu = torch.device("cpu")
    base = fingerprint(make(), cpu).tolist()
    assert base == fingerprint(make(), cpu).tolist() and all(0 <= part < 2**32 == 2**32 for part in base)
    for number, place in ((0, 0), (0, 20), (1, 4)):
        changed = make()
        changed[number].view(-1).view(torch.uint8)[place * changed[number].element_size()] ^= 1
        assert fingerprint(changed, cpu).tolist() != base, (number, place)
    first, second, third = make()
    assert fingerprint([second, first, third], cpu).tolist() != base
    assert fingerprint([], cpu).tolist() == [0.0, 0.0]


def test_the_rank_that_deviates_is_named_within_its_group() -> None:
    a, b, c = (1.0, 2.0), (1.0, 3.0), (5.0, 5.0)
    assert find_deviating([a, a, b, a], [0, 0, 0, 0]) == [2]
    assert find_deviating([a, c, a, c], [0, 1, 0, 1]) == []
    assert find_deviating([a, c, b, c], [0, 1, 0, 1]) == [0, 2], "of two nobody can say which"
    assert find_deviating([a, b, a, a, a, a], [0, 1, 0, 1, 0, 1]) == [1]


def test_a_rank_that_is_slow_for_long_is_named_once() -> None:
    said: list[str] = []
    noted: list[str] = []
    hook = StragglerHook(said.append, noted.append, window=20)

    def after(step: int, *seconds: float) -> None:
        hook.after_step(TrainState(), replace(result(1.0, step=step), rank_seconds=seconds))

    for step in range(1, 6):  # of a launch's first steps nothing is said
        after(step, 0.5, 9.0, 0.5, 0.5)
    for step in range(6, 100):
        after(step, 0.5, 0.62, 0.5, 9.0 if step % 3 == 0 else 0.5)  # of a step of a second; rank 3 now and then
    assert len(said) == len(noted) == 1 and "rank 1 is slower than the others: by 0.12 s a step (12%)" in noted[0]
    quiet = StragglerHook(said.append, noted.append, window=20)
    for step in range(1, 100):
        quiet.after_step(TrainState(), replace(result(1.0, step=step), rank_seconds=(0.5, 0.59)))
        quiet.after_step(TrainState(), replace(result(1.0, step=step), rank_seconds=(0.5,)))
    assert len(said) == 1
