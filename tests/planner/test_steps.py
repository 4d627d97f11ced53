from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.batch.order import SampleOrder
from manyhands.data.tokenize import summary
from manyhands.data.tokenize.summary import _steps_of_epochs
from manyhands.facts.types import DataFacts
from manyhands.planner.steps import count_steps, explain_longer
from manyhands.planner.text import explain
from tests.planner.examples import data_facts, run_config
from tests.support.plans import explain_why, make_plan


def steps(batch_samples: int | None = 32, *, num_samples: int = 1000, data: dict | None = None, **keys: object):
    return count_steps(run_config(**keys), data_facts(num_samples=num_samples, **(data or {})), batch_samples)


@pytest.mark.parametrize(
    ("batch_samples", "num_samples", "keys", "total"),
    [
        (32, 1000, {}, 32),  # the last step of an epoch may be short
        (32, 1024, {}, 32),
        (32, 1025, {}, 33),
        *((32, 1000, {"stop__epochs": epochs}, total) for epochs, total in ((0.5, 16), (0.51, 17), (3, 96))),
        *((32, 1000, {"stop__epochs": epochs}, total) for epochs, total in ((0.001, 1), (0.3, 10), (1.25, 40))),
        (32, 1000, {"stop__max_steps": 7}, 7),
        (32, 1000, {"stop__max_steps": 1000}, 32),
        (1, 100, {"stop__epochs": 0.07}, 7),  # as floats the product is more, and rounding up would make it 8
        (1, 100, {"stop__epochs": 2.07}, 207),
    ],
)
def test_steps_of_a_run(batch_samples, num_samples, keys, total):
    assert steps(batch_samples, num_samples=num_samples, **keys).total == total


def test_batches_of_tokens_take_the_datas_count():
    of_epochs = {"steps_of_epochs": (11, 12, 10)}
    counted = steps(None, data=of_epochs, batch__loss_tokens=100, stop__epochs=3)
    assert (counted.per_epoch, counted.total) == (11, 33)
    assert steps(None, data=of_epochs, batch__loss_tokens=100, stop__epochs=2.15).total == 11 + 12 + 2


def walk(order: SampleOrder, epochs: float) -> int:
    """Steps that begin before so many epochs are done, taken one by one as the loop takes them."""
    step = 0
    while True:
        epoch, index = order.locate(step)
        assert len(order.samples(epoch, index))
        if epoch + Fraction(index, order.steps_per_epoch(epoch)) >= Fraction(repr(float(epochs))):
            return step
        step += 1


def facts_of(
    lengths: np.ndarray, sources: np.ndarray, weights: tuple[float, ...], config: RunConfig, order: SampleOrder
) -> DataFacts:
    of_epochs = _steps_of_epochs(config.stop, order) if config.batch.loss_tokens else ()
    counts = tuple((int((sources == source).sum()), weight) for source, weight in enumerate(weights))
    return data_facts(
        num_samples=len(lengths), samples_per_epoch=order.samples_in_epoch(0), sources=counts, steps_of_epochs=of_epochs
    )


@pytest.mark.parametrize("epochs", [0.3, 1.0, 2.5, 3.0, 4.0, 13.0])
@pytest.mark.parametrize(
    ("num_samples", "weights"),
    [(17, (0.5,)), (200, (1.0,)), (101, (0.3, 1.25)), (64, (0.125, 2.0, 0.7)), (9, (0.15,)), (10, (0.06,))],
)
@pytest.mark.parametrize("batch", [{"samples": 8}, {"samples": 3}, {"loss_tokens": 500}, {"loss_tokens": 90}])
def test_the_plan_ends_where_the_order_does(num_samples, weights, batch, epochs):
    random = np.random.default_rng(num_samples)
    lengths = random.integers(5, 120, num_samples).astype(np.int32)
    sources = np.arange(num_samples) % len(weights)
    config = run_config(stop__epochs=epochs, **{f"batch__{key}": value for key, value in batch.items()})
    order = SampleOrder(num_samples, 0, batch.get("samples"), batch.get("loss_tokens"), lengths, sources, weights)
    data = facts_of(lengths, sources, weights, config, order)
    assert count_steps(config, data, batch.get("samples")).total == walk(order, epochs)


def test_seventeen_rows_of_half_weight():
    counted = steps(8, num_samples=17, data={"sources": ((17, 0.5),), "samples_per_epoch": 9}, stop__epochs=4)
    assert (counted.per_epoch, counted.total) == (2, 2 + 1 + 2 + 1)  # 9, 8, 9 and 8 rows
    assert "2 in the first epoch; 6 in 4 epochs, which differ" in explain_why(counted)[0].replace(
        "ceil(9 samples / 8) = ", ""
    ).replace(", drawn from 17 by source weight", "")


def test_of_thousands_of_epochs_that_differ_the_first_ones_are_laid_out(monkeypatch):
    monkeypatch.setattr(summary, "COUNTED_EPOCHS", 4)
    lengths = np.random.default_rng(0).integers(5, 90, 40)
    order = SampleOrder(40, 0, batch_packs=2, pack_tokens=100, lengths=lengths)
    config = run_config(batch__packs=2, data__max_length=100, stop__epochs=1000)
    first = _steps_of_epochs(config.stop, order)
    assert first == tuple(map(order.steps_per_epoch, range(4)))
    counted = steps(None, data={"steps_of_epochs": first}, batch__packs=2, stop__epochs=1000)
    assert counted.total == math.ceil(1000 * sum(first) / 4)
    assert "as many as the first 4 have on average" in explain_why(counted)[0] or len(set(first)) == 1
    few = run_config(batch__packs=2, data__max_length=100, stop__epochs=2.5)
    assert _steps_of_epochs(few.stop, order) == first[:3]
    ended = steps(None, data={"steps_of_epochs": first}, batch__packs=2, stop__epochs=1e300, stop__max_steps=30)
    assert ended.total == 30
    many = steps(None, data={"steps_of_epochs": first}, batch__packs=2, stop__epochs=1e9, stop__max_steps=10**8)
    assert many.total == 10**8


def test_many_epochs_are_counted_at_once():
    """A billion epochs, of which every ten are alike: 0.3 of 101 rows."""
    data = {"sources": ((101, 0.3),), "samples_per_epoch": 30}
    ten = steps(4, num_samples=101, data=data, stop__epochs=10).total
    assert steps(4, num_samples=101, data=data, stop__epochs=1e9).total == ten * 10**8
    assert (
        steps(
            None, data={"steps_of_epochs": (5, 6)}, batch__loss_tokens=100, stop__epochs=1e9, stop__max_steps=10
        ).total
        == 10
    )


def test_warm_up():
    assert steps(stop__epochs=10).warmup == 10  # 0.03 * 320 = 9.6
    assert steps(stop__max_steps=10).warmup == 1
    assert steps(stop__max_steps=5).warmup == 0
    assert steps(schedule__warmup_ratio=0.25).warmup == 8
    assert steps(schedule__warmup_steps=0).warmup == 0
    assert steps(schedule__warmup_steps=33).warmup == 33, "the rate ends below its peak, which the plan warns of"


def test_evaluations_and_checkpoints():
    assert (steps().evaluate_every, steps().checkpoint_every) == (7, 4)
    assert steps(evaluate__every_steps=3, checkpoint__every_steps=0).evaluate_every == 3
    assert steps(checkpoint__every_steps=0).checkpoint_every == 0
    assert steps(data={"num_validation_samples": 0}).evaluate_every == 0
    assert steps(evaluate__every_steps=0.25, checkpoint__every_steps=0.07).checkpoint_every == 3  # of 32, rounded up
    assert 0.07 * 100 > 7 and steps(1, num_samples=100, checkpoint__every_steps=0.07).checkpoint_every == 7
    assert steps(evaluate__every_steps=0.25).evaluate_every == 8


def test_evaluations_and_checkpoints_by_epoch():
    counted = steps(evaluate__per_epoch=2, checkpoint__per_epoch=1, stop__epochs=3)
    assert (counted.evaluate_every, counted.checkpoint_every) == (0, 0)
    assert (counted.evaluate_per_epoch, counted.checkpoint_per_epoch, counted.num_checkpoints) == (2, 1, 3)
    said = explain_why(counted)
    assert any("evaluation: 2 in each epoch, the last at its end" in sentence for sentence in said)
    assert any("checkpoints: at the end of each epoch" in sentence for sentence in said)
    assert steps(checkpoint__per_epoch=100).num_checkpoints == 32  # after every step


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("batch", [{"batch_samples": 8}, {"batch_loss_tokens": 90}])
def test_parts_of_an_epoch_are_as_many_as_asked_evenly_spaced_and_end_with_it(num_parts, batch):
    """Also where epochs differ in their number of steps."""
    lengths = np.random.default_rng(0).integers(5, 30, 101).astype(np.int32)
    order = SampleOrder(101, 0, **batch, num_loss_tokens=lengths, sources=np.zeros(101, int), weights=(0.7,))
    first = 0
    for epoch in range(10):
        num_steps = order.steps_per_epoch(epoch)
        ends = [index for index in range(num_steps) if order.ends_part(first + index, num_parts)]
        assert len(ends) == min(num_parts, num_steps) and ends[-1] == num_steps - 1
        gaps = np.diff([-1, *ends])
        assert gaps.max() - gaps.min() <= 1
        first += num_steps


def test_warm_up_and_decay_share_the_run():
    assert steps(schedule__name="wsd", schedule__decay_ratio=1.0).warmup == 0
    assert steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_ratio=0.5).warmup == 16
    assert steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_steps=16).warmup == 16
    with pytest.raises(UserError, match="17 reaches into the decay, the last 16 of 32 steps") as caught:
        steps(schedule__name="wsd", schedule__decay_ratio=0.5, schedule__warmup_steps=17)
    assert "schedule.decay_ratio" in caught.value.where


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stop__max_tokens": 1000}, "stop.max_tokens"),
        ({"stop__max_steps": 1000}, "before stop.max_steps: 1,000 (raise stop.epochs"),
        ({"stop__max_steps": 7}, "ended by stop.max_steps: 7"),
        ({"batch_samples": 64, "num_samples": 20}, "there are 20 training samples"),
    ],
)
def test_what_ends_the_run_first_and_too_large_a_batch_are_said(keys, said):
    assert any(said in sentence for sentence in explain_why(steps(**keys)))
    assert not any("training samples" in sentence for sentence in explain_why(steps(20, num_samples=20)))


def test_max_steps_may_end_a_part_of_an_epoch_that_was_never_laid_out():
    order = SampleOrder(4, 0, None, 100, np.full(4, 60))
    config = run_config(batch__loss_tokens=100, stop__epochs=1.5, stop__max_steps=1)
    data = data_facts(num_samples=4, steps_of_epochs=_steps_of_epochs(config.stop, order))
    assert count_steps(config, data, None).total == 1


@pytest.mark.parametrize(
    ("schedule", "before", "after", "done", "said"),
    [
        ({"name": "constant"}, (3, 0), (6, 0), 3, "All steps have the rates of a run that was this long"),
        ({"name": "constant"}, (3, 0), (12, 1), 3, "All steps have the rates"),  # one step of warm-up has the peak
        ({"name": "constant"}, (9, 0), (90, 3), 9, "steps 1 to 2 would have had other rates"),
        ({"name": "wsd", "decay_ratio": 0.5}, (8, 0), (16, 0), 4, "All steps have the rates"),
        ({"name": "wsd", "decay_ratio": 0.5}, (8, 0), (16, 0), 6, "step 6 would have had other rates"),
        ({"name": "cosine"}, (4, 1), (8, 1), 4, "steps 3 to 4 would have had other rates"),
        ({"name": "linear"}, (4, 0), (8, 0), 4, "step 5 has a learning rate of 0.0005, step 4 had 0.00025"),
    ],
)
def test_a_longer_run_says_what_becomes_of_its_schedule(schedule, before, after, done, said):
    plans = [make_plan(num_steps=steps, warmup_steps=warmup) for steps, warmup in (before, after)]
    section = run_config(**{f"schedule__{key}": value for key, value in schedule.items()}).schedule
    text = explain(explain_longer(section, *plans, done, ["stop.epochs: 1 -> 2"]))
    assert said in text and f"stop.epochs: 1 -> 2: {after[0]} steps, of which {done} are done" in text
