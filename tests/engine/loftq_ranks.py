"""What the ranks do for ``test_loftq_ranks``: factors begin at what NF4 loses, and are gathered."""

from __future__ import annotations

from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.convert import loftq
from manyhands.convert.adapter import adapter_state
from manyhands.convert.loftq import initialize_with_loftq
from manyhands.planner.types import Plan
from tests.support.layouts import build


def begin(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """The whole factors, the share, and the names of the weights that this rank has read."""
    engine, read, original = build(plan, config), [], loftq.read_stored

    def recorded(stored: Any) -> Any:
        read.append(stored.name)
        return original(stored)

    loftq.read_stored = recorded
    try:
        share = initialize_with_loftq(engine.model, plan, config, engine.world.device)
    finally:
        loftq.read_stored = original
    return {
        "factors": {name: tensor.numpy() for name, tensor in adapter_state(engine.model).items()},
        "share": share,
        "read": read,
    }
