"""The micro-batches of a step as the plan has them, and how much of what they compute is useful. Pure numpy."""

from __future__ import annotations

import numpy as np

from manyhands.data.order import RowOrder
from manyhands.data.pack import Layout, lay_out_packed, lay_out_rows, packing_efficiency
from manyhands.plan.types import Plan

MAX_SAMPLED_STEPS = 20


def lay_out_step(plan: Plan, rows: np.ndarray, lengths: np.ndarray) -> Layout:
    """The rows of one step as micro-batches of all ranks."""
    if plan.micro_tokens is not None:
        return lay_out_packed(rows, lengths, plan.world_size, plan.pack_tokens or plan.micro_tokens)
    assert plan.micro_rows is not None and plan.accumulation is not None
    return lay_out_rows(rows, plan.world_size, plan.micro_rows, plan.accumulation)


def expected_efficiency(plan: Plan, order: RowOrder, lengths: np.ndarray) -> tuple[float, int]:
    """(tokens of rows over tokens that are computed, steps looked at), over steps spread evenly over the first epoch.

    Computed is what the longest micro-batch of any rank has, padding included, times the ranks: the others wait for it.
    """
    num_steps = min(order.steps_per_epoch(0), plan.num_steps)
    steps = np.unique(np.linspace(0, num_steps - 1, MAX_SAMPLED_STEPS).astype(np.int64)).tolist()
    layouts = [lay_out_step(plan, order.rows(0, step), lengths) for step in steps]
    if plan.micro_tokens is not None and plan.pack_tokens is None:
        return packing_efficiency(layouts, lengths), len(steps)
    useful = paid = 0
    for micro in (micro for layout in layouts for micro in layout.micro_batches):
        useful += sum(int(lengths[part].sum()) for part in micro)
        padded = [len(part) * int(lengths[part].max(initial=0)) for part in micro]
        paid += len(micro) * (plan.pack_tokens or max(padded))
    return useful / paid, len(steps)
