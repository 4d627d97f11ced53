from __future__ import annotations

import pytest

from manyhands.errors import UserError
from manyhands.plan.steps import count_steps
from tests.plan.examples import data_facts, run_config


def steps(batch_rows: int | None = 32, *, num_rows: int = 1000, data: dict | None = None, **keys: object):
    return count_steps(run_config(**keys), data_facts(num_rows=num_rows, **(data or {})), batch_rows)


def test_the_last_step_of_an_epoch_may_be_short():
    assert steps().per_epoch == steps().total == 32
    assert steps(num_rows=1024).per_epoch == 32
    assert steps(num_rows=1025).per_epoch == 33


@pytest.mark.parametrize(("epochs", "total"), [(0.5, 16), (0.51, 17), (3, 96), (0.001, 1), (0.3, 10), (1.25, 40)])
def test_parts_of_epochs(epochs, total):
    assert steps(stop__epochs=epochs).total == total


def test_max_steps_wins_if_smaller():
    assert steps(stop__max_steps=7).total == 7
    assert steps(stop__max_steps=1000).total == 32


def test_rounding_does_not_add_a_step():
    assert steps(1, num_rows=30, stop__epochs=0.1).total == 3  # 0.1 * 30 = 3.0000000000000004


def test_batches_of_tokens_take_the_datas_count():
    assert steps(None, data={"steps_per_epoch_by_tokens": 11}, batch__tokens=100).per_epoch == 11


def test_warm_up():
    assert steps(stop__epochs=10).warmup == 10  # 0.03 * 320 = 9.6
    assert steps(stop__max_steps=10).warmup == 1
    assert steps(stop__max_steps=5).warmup == 0
    assert steps(schedule__warmup_ratio=0.25).warmup == 8
    assert steps(schedule__warmup_steps=0).warmup == 0
    with pytest.raises(UserError, match="33 is more than the run's 32 steps"):
        steps(schedule__warmup_steps=33)


def test_evaluations_and_checkpoints():
    assert (steps().evaluate_every, steps().checkpoint_every) == (7, 4)
    assert steps(evaluate__every_steps=3, checkpoint__every_steps=0).evaluate_every == 3
    assert steps(checkpoint__every_steps=0).checkpoint_every == 0
    assert steps(data={"num_validation_rows": 0}).evaluate_every == 0


def test_early_ends_are_said():
    assert any("stop.max_tokens" in sentence for sentence in steps(stop__max_tokens=1000).why)


def test_warm_up_and_decay_share_the_run():
    assert steps(schedule__name="wsd", schedule__decay_ratio=1.0).warmup == 0
    assert steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_ratio=0.5).warmup == 16
    assert steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_steps=16).warmup == 16
    with pytest.raises(UserError, match="17 reaches into the decay, the last 16 of 32 steps") as caught:
        steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_steps=17)
    assert "schedule.decay_ratio" in caught.value.where


def test_what_ends_the_run_first_is_said():
    assert "before stop.max_steps: 1,000 (raise stop.epochs" in steps(stop__max_steps=1000).why[0]
    assert "ended by stop.max_steps: 7" in steps(stop__max_steps=7).why[0]


def test_a_batch_larger_than_the_data_is_said():
    assert any("there are 20 training rows" in sentence for sentence in steps(64, num_rows=20).why)
    assert not any("training rows" in sentence for sentence in steps(20, num_rows=20).why)
