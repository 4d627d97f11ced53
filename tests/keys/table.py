"""Keys whose effect is one thing to be seen in a run: (key, its value, other keys, what is looked at, what it is then).

That it is another thing without the key is ``test_the_check_sees_that_very_key``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.keys.lab import Lab, Ran

Row = tuple[str, Any, Mapping[str, Any], Callable[[Lab, Ran], Any], Any]


def steps(kind: str) -> Callable[[Lab, Ran], Any]:
    return lambda lab, ran: ran.column("step", kind)


def checkpoints(lab: Lab, ran: Ran) -> list[int]:
    return ran.checkpoints()


def rates(lab: Lab, ran: Ran) -> list[float]:
    return ran.rates


def first_difference(lab: Lab, ran: Ran) -> int:
    """The first step, counted from 1, whose loss is not the base run's, bit for bit; 0 if there is none."""
    pairs = zip(ran.losses, lab.base.losses, strict=True)
    return next((step for step, (one, other) in enumerate(pairs, start=1) if one != other), 0)


def micro_batches(lab: Lab, ran: Ran) -> tuple[int, list[int]]:
    """(samples of the first one, how many in each step)."""
    return ran.batch()["input_ids"].shape[0], ran.column("num_micro_batches")


def end(lab: Lab, ran: Ran) -> tuple[int, float, str]:
    return len(ran.losses), ran.column("epoch")[-1], ran.rank.state.stop_reason


EVALUATIONS, STEPS = steps("evaluation"), steps("step")
CONSTANT, UNPACKED = {"schedule.name": "constant"}, {"data.packing": False, "stop.max_steps": 1}
KEPT, EACH = {"checkpoint.keep_last": 9}, {"checkpoint.every_steps": 1}
TWO_EPOCHS = {"evaluate.every_steps": "auto", "checkpoint.every_steps": "auto", "stop.epochs": 2}
ROWS: tuple[Row, ...] = (
    ("evaluate.every_steps", 2, {}, EVALUATIONS, [0, 2, 4, 5]),
    ("evaluate.every_steps", 0.4, {}, EVALUATIONS, [0, 2, 4, 5]),
    ("evaluate.per_epoch", 2, TWO_EPOCHS, EVALUATIONS, [0, 3, 5, 8, 10]),
    ("evaluate.at_start", False, {}, EVALUATIONS, [5]),
    ("checkpoint.every_steps", 2, KEPT, checkpoints, [2, 4, 5]),
    ("checkpoint.per_epoch", 1, TWO_EPOCHS | KEPT, checkpoints, [5, 10]),
    ("checkpoint.every_minutes", 1e-9, KEPT, checkpoints, [1, 2, 3, 4, 5]),  # every step takes longer
    ("checkpoint.every_minutes", 600, KEPT, checkpoints, [5]),
    ("checkpoint.keep_last", 3, EACH, checkpoints, [3, 4, 5]),
    ("checkpoint.keep_last", "all", EACH, checkpoints, [1, 2, 3, 4, 5]),
    ("log.every_steps", 2, {}, STEPS, [2, 4]),
    ("optimizer.learning_rate", 1e-3, {}, first_difference, 2),
    ("optimizer.learning_rate", 1e-3, {}, lambda lab, ran: ran.column("learning_rate")[0], 1e-3),
    ("optimizer.weight_decay", 0.5, {}, first_difference, 2),
    ("schedule.name", "constant", {}, rates, pytest.approx([1.0] * 5)),
    ("schedule.name", "constant", {}, first_difference, 3),
    ("schedule.name", "linear", {}, rates, pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])),
    ("schedule.name", "cosine", {}, rates, pytest.approx([1.0, 0.904508, 0.654508, 0.345492, 0.095492], rel=1e-5)),
    ("schedule.name", "wsd", {}, rates, pytest.approx([1.0] * 5)),  # the last fifth begins at the peak
    ("schedule.warmup_ratio", 0.4, CONSTANT, rates, pytest.approx([0.5, 1, 1, 1, 1])),
    ("schedule.warmup_steps", 4, CONSTANT, rates, pytest.approx([0.25, 0.5, 0.75, 1, 1])),
    ("schedule.decay_ratio", 0.6, {"schedule.name": "wsd"}, rates, pytest.approx([1, 1, 1, 2 / 3, 1 / 3])),
    ("schedule.min_ratio", 0.5, {"schedule.name": "linear"}, rates, pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])),
    ("stop.epochs", 1.4, {}, lambda lab, ran: end(lab, ran)[:2], (7, pytest.approx(1.4))),
    ("stop.max_steps", 2, {}, lambda lab, ran: end(lab, ran)[::2], (2, "all 2 steps are done")),
    ("batch.micro_samples", 2, UNPACKED, micro_batches, (2, [4])),
    ("batch.accumulation", 8, UNPACKED, micro_batches, (1, [8])),
)


def make_check(rows: Iterable[Row]) -> Callable[[Lab], None]:
    def check(lab: Lab) -> None:
        for key, value, others, look, expected in rows:
            assert look(lab, lab.run({**others, key: value})) == expected, f"{key}: {value}"

    return check


EFFECTS = {key: make_check([row for row in ROWS if row[0] == key]) for key in dict.fromkeys(row[0] for row in ROWS)}
