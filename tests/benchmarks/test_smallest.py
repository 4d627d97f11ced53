"""The search for the smallest memory: by the plan alone, then by runs whose outcome is emulated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.smallest import TOLERANCE, Attempt, judge, planned_smallest, search, smallest
from manyhands.bench.case import with_memory
from manyhands.core.errors import UserError
from manyhands.planner.search import plan
from tests.planner.examples import GIB, data_facts, facts, llama_8b, run_config

LONG = data_facts(num_samples=5000, mean=4096, longest=4096, num_validation_samples=0, num_validation_tokens=0)


def machine(needed: float, allocated: float) -> Callable[[float], Attempt]:
    """A way that runs in ``needed`` GiB, of which it has allocated ``allocated``."""
    return lambda limit: Attempt(limit, "ran", allocated) if limit >= needed else Attempt(limit, "out of memory")


def limits(attempts: list[Attempt]) -> list[float]:
    return [attempt.limit_gib for attempt in attempts]


def test_the_plan_names_the_smallest_memory_without_a_gpu() -> None:
    config, the_facts = run_config(batch__samples=2), facts(llama_8b(), gpus=1, host_bytes=100 * GIB, data=LONG)
    found = planned_smallest(config, the_facts, with_memory)
    assert found is not None and 16 < found < 19  # 15 GiB of frozen weights
    leanest = plan(config, with_memory(the_facts, found))
    assert leanest.layout.activation_checkpointing in ("full", "except_attention")  # what they keep leaves the device
    assert (leanest.layout.offload_activations, leanest.layout.pack_tokens) == (True, 4096)
    with pytest.raises(UserError, match="does not fit"):
        plan(config, with_memory(the_facts, found - 0.1))
    kept = planned_smallest(
        run_config(batch__samples=2, parallel__activation_checkpointing="none"), the_facts, with_memory
    )
    assert kept is not None and kept > found + 15


def test_work_that_fits_nowhere_has_no_smallest_memory() -> None:
    config = run_config(method__name="full", parallel__offload="all")
    assert planned_smallest(config, facts(llama_8b(), gpus=1, host_bytes=GIB, data=LONG), with_memory) is None


def test_two_runs_suffice_where_the_allocator_needs_little_besides() -> None:
    attempts = search(18.0, machine(needed=17.02, allocated=17.0))
    assert limits(attempts) == [18.0, 17.17]
    assert smallest(attempts) == attempts[-1]


def test_what_failed_is_halved_with_what_ran() -> None:
    attempts = search(20.0, machine(needed=18.6, allocated=16.0))
    best = smallest(attempts)
    assert best is not None and 18.6 <= best.limit_gib <= 18.6 * (1 + TOLERANCE) + 0.4
    assert attempts[1].limit_gib == 16.16 and attempts[1].outcome == "out of memory"
    assert len(attempts) <= 5


def test_a_plan_that_believed_too_little_goes_up() -> None:
    attempts = search(10.0, machine(needed=12.5, allocated=12.45))
    assert limits(attempts)[:3] == [10.0, 11.5, 13.22]
    best = smallest(attempts)
    assert best is not None and best.limit_gib <= 12.5 * (1 + TOLERANCE)


def test_runs_are_counted_and_other_failures_end_the_search() -> None:
    never = search(10.0, machine(needed=1000, allocated=900), max_runs=3)
    assert len(never) == 3 and smallest(never) is None
    broken = search(10.0, lambda limit: Attempt(limit, "failed"))
    assert len(broken) == 1 and smallest(broken) is None
    on_a_cpu = search(10.0, lambda limit: Attempt(limit, "ran"))
    assert len(on_a_cpu) == 1 and smallest(on_a_cpu) == on_a_cpu[0]


def result(reserved: float | None, outside: float = 0.5) -> dict[str, Any]:
    return {"peak_reserved_gib": reserved, "peak_allocated_gib": reserved, "outside_gib": outside}


def test_outcomes_are_read_from_what_a_run_said() -> None:
    assert judge(18.0, "", result(16.0)) == Attempt(18.0, "ran", 16.5, result(16.0))
    assert judge(16.0, "", result(16.0)).outcome == "out of memory"  # it took more than the limit beside the allocator
    assert judge(16.0, "torch.OutOfMemoryError: CUDA out of memory", None).outcome == "out of memory"
    assert judge(16.0, "ImportError: something else", None).outcome == "failed"
    assert judge(16.0, "", result(None)).outcome == "ran"
