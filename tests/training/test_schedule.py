from __future__ import annotations

import pytest

from manyhands.training.schedule import make_schedule


def rates(name: str, num_steps: int = 10, **kwargs) -> list[float]:
    rate = make_schedule(name, peak=1.0, num_steps=num_steps, **{"warmup_steps": 0} | kwargs)
    return [rate(step) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("name", "num_steps", "keys", "expected"),
    [
        ("constant", 10, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0] + [1.0] * 6),
        ("cosine", 4, {"min_ratio": 0.2}, [1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5)]),
        ("linear", 6, {"warmup_steps": 2}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        # flat, and over the last 4 of 10 steps down to the minimum
        ("wsd", 10, {"decay_ratio": 0.4, "min_ratio": 0.1}, [1.0] * 7 + [1 - 0.9 / 4, 1 - 0.9 / 2, 1 - 0.9 * 3 / 4]),
        # from the end of a warmup that reaches into the decay
        ("wsd", 10, {"warmup_steps": 8, "decay_ratio": 0.4}, [step / 8 for step in range(1, 9)] + [1.0, 0.5]),
    ],
)
def test_schedules_by_hand(name, num_steps, keys, expected):
    """No step has the rate 0."""
    assert rates(name, num_steps, **keys) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_a_run_shorter_than_its_warmup_never_passes_the_peak(name):
    assert max(rates(name, num_steps=3, warmup_steps=8)) <= 1.0
