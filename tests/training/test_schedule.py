from __future__ import annotations

import pytest

from manyhands.training.schedule import make_schedule


def rates(name: str, num_steps: int = 10, **kwargs) -> list[float]:
    rate = make_schedule(name, peak=1.0, num_steps=num_steps, **{"warmup_steps": 0} | kwargs)
    return [rate(step) for step in range(num_steps)]


def test_warmup_rises_to_the_peak_and_no_step_has_rate_zero():
    values = rates("constant", warmup_steps=4)
    assert values == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_cosine_by_hand():
    values = rates("cosine", num_steps=4, min_ratio=0.2)  # t = 0, 1/4, 1/2, 3/4
    assert values == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5)])


def test_linear_by_hand():
    assert rates("linear", num_steps=6, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_wsd_is_flat_then_falls_to_the_minimum():
    values = rates("wsd", decay_ratio=0.4, min_ratio=0.1)  # decay over the last 4 of 10 steps
    assert values[:7] == [1.0] * 7
    assert values[7:] == pytest.approx([1 - 0.9 / 4, 1 - 0.9 / 2, 1 - 0.9 * 3 / 4])


def test_wsd_decays_from_the_end_of_a_warmup_that_reaches_into_its_decay():
    values = rates("wsd", warmup_steps=8, decay_ratio=0.4)
    assert values == pytest.approx([step / 8 for step in range(1, 9)] + [1.0, 0.5])


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_a_run_shorter_than_its_warmup_never_passes_the_peak(name):
    assert max(rates(name, num_steps=3, warmup_steps=8)) <= 1.0
