"""The search for the smallest memory: by the plan alone, then by runs whose outcome is emulated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.smallest import Attempt, judge, planned_smallest, search, smallest
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


def test_two_runs_suffice_where_the_allocator_needs_little_besides() -> None:
    attempts = search(18.0, machine(needed=17.02, allocated=17.0))
    assert limits(attempts) == [18.0, 17.17]
    assert smallest(attempts) == attempts[-1]


def result(reserved: float | None, outside: float = 0.5) -> dict[str, Any]:
    return {"peak_reserved_gib": reserved, "peak_allocated_gib": reserved, "outside_gib": outside}


def test_outcomes_are_read_from_what_a_run_said() -> None:
    assert judge(18.0, "", result(16.0)) == Attempt(18.0, "ran", 16.5, result(16.0))
    assert judge(16.0, "", result(16.0)).outcome == "out of memory"  # it took more than the limit beside the allocator
    assert judge(16.0, "torch.OutOfMemoryError: CUDA out of memory", None).outcome == "out of memory"
    assert judge(16.0, "ImportError: something else", None).outcome == "failed"
    assert judge(16.0, "", result(None)).outcome == "ran"
