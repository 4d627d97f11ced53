"""The smallest GPU memory at which a row still runs: first by the plan alone, then tried with torch's allocator held to
it.

    python -m benchmarks 8b-lora --smallest

The plan says, without a GPU, for which smallest memory it finds a way; that way is the leanest. It is run for a few
steps in that memory and then, in the same way, in less, or in more where it failed. Only memory in which it did run
counts. A run that fails for another reason ends the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts
from manyhands.planner.search import plan

Outcome = Literal["ran", "out of memory", "failed"]
TOLERANCE = 0.02  # of the memory: nearer is not searched
GROWTH = 1.15  # from one that failed to the next, where none has run yet
STEP_GIB = 0.05  # of the plan's own answer


@dataclass(frozen=True)
class Attempt:
    """One run in ``limit_gib``. ``least_gib``: what was allocated and what lies outside of the allocator; no limit
    below can do.
    """

    limit_gib: float
    outcome: Outcome
    least_gib: float | None = None
    row: dict[str, Any] | None = None


def planned_smallest(
    config: RunConfig, facts: Facts, resize: Callable[[Facts, float], Facts], largest_gib: float = 1024.0
) -> float | None:
    """GiB of the smallest GPU that the plan finds a way for, to ``STEP_GIB``; None where there is none. Pure.

    ``resize`` gives the facts with GPUs of so many GiB.
    """

    def fits(gib: float) -> bool:
        try:
            plan(config, resize(facts, gib))
        except UserError:
            return False
        return True

    if not fits(largest_gib):
        return None
    low, high = 0, round(largest_gib / STEP_GIB)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * STEP_GIB) else (middle, high)
    return round(high * STEP_GIB, 2)


def search(planned_gib: float, run: Callable[[float], Attempt], *, max_runs: int = 5) -> list[Attempt]:
    """All attempts, the first in what the plan believes. ``run`` tries one limit in GiB.

    After the first that ran, one just above what it had allocated: that is mostly the answer, as the allocator needs
    little besides. Then halving between the smallest that ran and the largest that did not.
    """
    attempts: list[Attempt] = []
    too_small, enough, limit = 0.0, None, planned_gib
    while len(attempts) < max_runs:
        attempt = run(limit)
        attempts.append(attempt)
        if attempt.outcome == "failed" or (attempt.outcome == "ran" and attempt.least_gib is None):
            break  # a CPU tells nothing about what was allocated
        first_that_ran = attempt.outcome == "ran" and enough is None
        if attempt.outcome == "ran":
            enough = limit
            too_small = max(too_small, min(attempt.least_gib or 0.0, limit))
        else:
            too_small = max(too_small, limit)
        if enough is None:
            limit = round(too_small * GROWTH, 2)
            continue
        if enough - too_small <= TOLERANCE * enough:
            break
        limit = round(too_small * (1 + TOLERANCE / 2) if first_that_ran else (too_small + enough) / 2, 2)
    return attempts


def smallest(attempts: list[Attempt]) -> Attempt | None:
    """The one in the least memory that ran."""
    return min(
        (attempt for attempt in attempts if attempt.outcome == "ran"),
        key=lambda attempt: attempt.limit_gib,
        default=None,
    )


def judge(limit_gib: float, output: str, row: dict[str, Any] | None) -> Attempt:
    """What a process of ``manyhands.bench.case`` said: its row if it ran, else why not. One that took more than its
    limit counts as too large for it: what lies outside of the allocator is not held back.
    """
    if row is None:
        return Attempt(limit_gib, "out of memory" if "OutOfMemoryError" in output else "failed")
    if row.get("peak_reserved_gib") is None:
        return Attempt(limit_gib, "ran", None, row)
    outside = row["outside_gib"]
    over = row["peak_reserved_gib"] + outside > limit_gib * (1 + TOLERANCE / 4)
    return Attempt(limit_gib, "out of memory" if over else "ran", row["peak_allocated_gib"] + outside, row)


def describe(attempt: Attempt) -> str:
    """One line: the memory, how it went, and in which way."""
    text = f"{attempt.limit_gib:.2f} GiB: {attempt.outcome}"
    if attempt.row is None:
        return text
    row = attempt.row
    layout = f"{row['strategy']}, activation checkpointing {row['activation_checkpointing']}" + (
        ", activations offloaded" if row["offload_activations"] else ""
    )
    speed = f"{row['tokens_per_s_gpu']:,} tokens/s, allocated {row['peak_allocated_gib']}"
    return f"{text}, {speed}, {layout}, packs of {row['pack_tokens']}"
