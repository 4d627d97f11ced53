"""Figures of ``benchmarks.survive``, computed from what its runs leave behind: the rows of metrics.jsonl and
restarts.jsonl, and when a rank was seen to enter its stages. No torch, no files, no processes.

All times are seconds since 1970. The row of a step is written when the step is done and before a checkpoint that
follows it, so the time between two rows contains all that a step costs, saves included.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MINUTES_BETWEEN_SAVES = 5  # for which the cost of a checkpoint is given
Course = dict[int, tuple[float, float]]  # loss and gradient norm by step
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Entered:
    """Rank 0 was first seen in this stage. ``pid``: of its process, another one after each restart."""

    pid: int
    stage: str
    at: float


@dataclass
class Kill:
    """A rank that was killed; ``gone``: when the last process of that attempt had ended."""

    rank: int
    at: float
    gone: float | None = None


@dataclass
class Recovery:
    """What one kill has cost. ``stages``: seconds from the kill to the next finished step, by what they went into."""

    rank: int
    lost_steps: int  # done again, the one in flight included
    from_step: int | None
    seconds: float
    stages: dict[str, float] = field(default_factory=dict)


def step_rows(rows: Rows) -> list[Mapping[str, Any]]:
    """Each step once, as it was done last, in order."""
    latest = {row["step"]: row for row in rows if row["kind"] == "step"}
    return [latest[step] for step in sorted(latest)]


def intervals(steps: Rows) -> dict[int, float]:
    """Seconds from the row before to the row of each step but the first."""
    return {after["step"]: after["time"] - before["time"] for before, after in itertools.pairwise(steps)}


def speed(rows: Rows, warm: int) -> dict[str, Any]:
    """Of all steps after the first ``warm``: the median step, and all tokens by all seconds."""
    steps = step_rows(rows)[warm:]
    if len(steps) < 2:
        raise ValueError(f"too few steps to measure: {len(steps)} after the first {warm}")
    seconds = list(intervals(steps).values())
    num_tokens = sum(row["num_tokens"] for row in steps[1:])
    return {
        "num_timed_steps": len(seconds),
        "step_s": round(statistics.median(seconds), 5),
        "step_s_min_max": [round(min(seconds), 5), round(max(seconds), 5)],
        "tokens_per_s": round(num_tokens / sum(seconds), 1),
    }


def stalls(rows: Rows, warm: int, every: int) -> dict[str, Any]:
    """What checkpoints after each ``every`` steps cost: of each the longest extra time of one step, and of all steps
    until it exists, beside the median of steps with no save under way. ``overlapping``: saves that began before the
    one before existed.
    """
    took = intervals(step_rows(rows)[warm:])
    begun = {row["step"]: row["time"] for row in step_rows(rows)}
    saves = [(row["step"], row["time"]) for row in rows if row["kind"] == "checkpoint" and row["step"] >= min(took)]
    last = max((step for step, _ in saves), default=0) + every  # a save that was not completed has begun there
    took = {step: seconds for step, seconds in took.items() if step <= last}
    beside = {step: [later for later in took if later > step and begun[later - 1] < end] for step, end in saves}
    quiet = [seconds for step, seconds in took.items() if not any(step in steps for steps in beside.values())]
    if not saves or not quiet or not all(beside.values()):
        raise ValueError(f"{len(saves)} saves beside {len(quiet)} other steps: too few to compare")
    usual = statistics.median(quiet)
    longest = [max(took[step] for step in steps) - usual for steps in beside.values()]
    first = [took[min(steps)] - usual for steps in beside.values()]
    total = [sum(took[step] - usual for step in steps) for steps in beside.values()]
    return {
        "num_saves": len(saves),
        "quiet_step_s": round(usual, 5),
        "exists_s": round(statistics.median(end - begun[step] for step, end in saves), 3),
        "longest_stall_s": round(max(longest), 4),
        "median_stall_s": round(statistics.median(first), 4),
        "stalls_s": [round(seconds, 4) for seconds in first],
        "median_total_s": round(statistics.median(total), 4),
        "cost_percent": round(100 * statistics.median(total) / (60 * MINUTES_BETWEEN_SAVES), 4),
        "overlapping": sum(end > begun[step] for (_, end), (step, _) in itertools.pairwise(saves)),
    }


def course_of(rows: Rows) -> Course:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in step_rows(rows)}


def compare(course: Course, other: Course) -> dict[str, Any]:
    """Losses and gradient norms at the steps that both have; ``first_different`` is None where all bits agree."""
    both = sorted(course.keys() & other.keys())
    different = [step for step in both if course[step] != other[step]]
    return {
        "compared_steps": len(both),
        "first_different": different[0] if different else None,
        "num_different": len(different),
        "max_loss_difference": max((abs(course[step][0] - other[step][0]) for step in both), default=None),
    }


def choose_kills(num_ranks: int, every_s: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """When, in seconds after the first steps, and which rank: one in the first tenth of each ``every_s`` seconds, so
    that steps after a kill are compared even where the undisturbed run is short.
    """
    draw = random.Random(seed)
    starts = [number * every_s for number in range(int(seconds / every_s))]
    return [(start + draw.uniform(0.0, every_s / 10), draw.randrange(num_ranks)) for start in starts]


def recoveries(kills: Sequence[Kill], restarts: Rows, entered: Sequence[Entered], rows: Rows) -> list[Recovery]:
    """Of each kill that was followed by a restart and another step."""
    steps, found = step_rows(rows), []
    for number, kill in enumerate(kills):
        until = kills[number + 1].at if number + 1 < len(kills) else float("inf")
        restart = next((row for row in restarts if kill.at <= row["time"] < until), None)
        done = next((row for row in steps if restart is not None and restart["time"] < row["time"] < until), None)
        if restart is None or done is None:
            continue
        stages = split(kill, restart, [one for one in entered if restart["time"] < one.at < done["time"]], done)
        of_restart = (restart["lost_steps"], restart["from_step"])
        found.append(Recovery(kill.rank, *of_restart, round(done["time"] - kill.at, 3), stages))
    return found


def split(
    kill: Kill, restart: Mapping[str, Any], entered: Sequence[Entered], done: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds of a recovery: until all ranks have ended, until the restart was decided, the wait before it, until rank
    0 has started Python, each of its stages, and in ``train`` what comes before the first step, and that step.
    """
    gone = min(kill.gone or restart["time"], restart["time"])
    begun = restart["time"] + restart["wait_s"]
    marks = [("ranks end", kill.at), ("decide", gone), ("wait", restart["time"]), ("start process", begun)]
    marks += [("import" if one.stage == "start" else one.stage, one.at) for one in entered]
    marks += [("first step", max(marks[-1][1], done["time"] - done["seconds"])), ("", done["time"])]
    found: dict[str, float] = {}
    for (name, begin), (_, end) in itertools.pairwise(marks):
        found[name] = round(found.get(name, 0.0) + end - begin, 3)
    return found


def medians(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By key, in the order of their first appearance."""
    found = list(found)
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: round(statistics.median(one[key] for one in found if key in one), 3) for key in keys}


def rate_after(rows: Rows, begin: float) -> float:
    """Tokens of distinct steps a second of wall time, from ``begin`` to the last step."""
    steps = [row for row in step_rows(rows) if row["time"] > begin]
    return sum(row["num_tokens"] for row in steps) / (steps[-1]["time"] - begin) if steps else 0.0
