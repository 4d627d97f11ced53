"""Figures of what saving and faults cost, from rows made by hand; and a real run on a CPU whose ranks are killed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.survive_figures import (
    Entered,
    Kill,
    compare,
    course_of,
    intervals,
    medians,
    recoveries,
    speed,
    stalls,
    step_rows,
)


def step(number: int, time: float, seconds: float = 1.0, loss: float = 2.0) -> dict[str, Any]:
    fields = {"kind": "step", "step": number, "time": time, "seconds": seconds}
    return fields | {"loss": loss, "grad_norm": 0.5, "num_tokens": 100}


def saved(number: int, time: float) -> dict[str, Any]:
    return {"kind": "checkpoint", "step": number, "time": time}


def test_a_step_that_was_done_again_counts_once() -> None:
    rows = [step(1, 1.0), step(2, 2.0), step(3, 3.0), step(3, 9.0), step(4, 10.0)]
    assert [row["time"] for row in step_rows(rows)] == [1.0, 2.0, 9.0, 10.0]
    assert intervals(step_rows(rows)) == {2: 1.0, 3: 7.0, 4: 1.0}


def test_speed_leaves_the_first_steps_out_and_counts_all_tokens() -> None:
    found = speed([step(1, 0.0), step(2, 50.0), step(3, 51.0), step(4, 52.0), step(5, 56.0)], warm=1)
    assert found["num_timed_steps"] == 3 and found["step_s"] == 1.0 and found["step_s_min_max"] == [1.0, 4.0]
    assert found["tokens_per_s"] == 50.0
    with pytest.raises(ValueError, match="too few steps"):
        speed([step(1, 0.0), step(2, 50.0)], warm=1)


def test_a_stall_is_what_steps_take_longer_while_a_checkpoint_is_written() -> None:
    """Steps of 1 s; the save after step 4 holds step 5 up by 0.5 s and step 6 by 0.1 s, and exists within step 6."""
    times = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.6, 7: 7.6, 8: 8.6}
    rows = [step(number, time) for number, time in times.items()]
    found = stalls([*rows[:5], saved(4, 6.5), *rows[5:]], warm=0, every=4)
    assert found["num_saves"] == 1 and found["quiet_step_s"] == 1.0 and found["overlapping"] == 0
    assert found["longest_stall_s"] == 0.5 and found["stalls_s"] == [0.5]
    assert found["median_total_s"] == 0.6 and found["cost_percent"] == 0.2  # of 300 s
    assert found["exists_s"] == 2.5


def test_losses_are_compared_bit_for_bit_at_the_steps_that_both_have() -> None:
    course = course_of([step(1, 0.0), step(2, 1.0), step(3, 2.0)])
    same = compare(course, course_of([step(2, 0.0), step(3, 1.0), step(4, 2.0)]))
    assert same["compared_steps"] == 2 and same["first_different"] is None and same["max_loss_difference"] == 0.0
    other = compare(course, course_of([step(2, 0.0), step(3, 1.0, loss=2.0 + 2**-40)]))
    assert other["first_different"] == 3 and other["num_different"] == 1
    assert other["max_loss_difference"] == 2**-40
    assert compare(course, {})["max_loss_difference"] is None


def test_a_recovery_is_split_into_what_its_seconds_went_into() -> None:
    kill = Kill(rank=1, at=100.0, gone=100.5)
    restart = {"time": 100.75, "wait_s": 1.0, "lost_steps": 1, "from_step": 7}
    entered = [Entered(5, "train", 50.0), Entered(9, "start", 102.0), Entered(9, "join", 106.0)]
    entered += [Entered(9, "train", 108.0), Entered(9, "checkpoint", 120.0)]
    rows = [step(7, 99.0), step(8, 110.0, seconds=1.5), step(9, 111.5)]
    [found] = recoveries([kill], [restart], entered, rows)
    assert (found.lost_steps, found.from_step, found.seconds) == (1, 7, 10.0)
    assert found.stages == {
        "ranks end": 0.5,
        "decide": 0.25,
        "wait": 1.0,
        "start process": 0.25,
        "import": 4.0,
        "join": 2.0,
        "train": 0.5,
        "first step": 1.5,
    }
    assert sum(found.stages.values()) == found.seconds
    assert recoveries([kill], [restart], entered, rows[:1]) == []  # it has not recovered yet
    assert medians([found.stages, {"join": 3.0, "resume": 1.0}])["join"] == 2.5
