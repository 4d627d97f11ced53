"""How the steps of a plan are carried out, and how much of what they compute is useful. Pure numpy; knows no files.

Where less than 90 % is useful, the plan says why, and what would be better: each proposal is laid out before it is
made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from manyhands.data.order import bound_by_tokens
from manyhands.data.pack import TILE_TOKENS, StepLayout, lay_out_packed, lay_out_rows, packing_efficiency, padded_tokens
from manyhands.facts.types import DataFacts, Facts
from manyhands.plan.batch import Split, ceil_div, constant_pack_tokens
from manyhands.plan.types import Plan

MAX_STEPS, MAX_ROWS = 20, 16_384  # laid out, spread over the epoch; one step in any case
GOOD_SHARE = 0.9
MAX_FACTOR = 64  # times the batch, in a proposal
MIN_GAIN = 0.02  # less is not worth a proposal


def lay_out_step(plan: Plan, rows: np.ndarray, lengths: np.ndarray) -> StepLayout:
    """The rows of one training step as micro-batches of all ranks; ``lengths`` by row id."""
    if plan.micro_tokens is not None:
        return lay_out_packed(rows, lengths, plan.world_size, plan.pack_tokens or plan.micro_tokens)
    assert plan.micro_samples is not None and plan.accumulation is not None
    return lay_out_rows(rows, plan.world_size, plan.micro_samples, plan.accumulation)


def pack_tile(plan: Plan) -> int:
    """Packs are padded to multiples of so many tokens: whole tiles on a GPU and where blocks are compiled, else not at
    all.
    """
    return TILE_TOKENS if plan.compile or plan.device == "cuda" else 1


def measure_efficiency(plan: Plan, data: DataFacts) -> tuple[float, int] | None:
    """(tokens of rows over tokens that are computed, steps laid out); None where the facts hold no whole step.

    Computed is what the longest micro-batch of any rank has, padding included, times the ranks: the others wait for it.
    """
    steps = list(_sample_steps(plan, data))
    if not steps:
        return None
    lengths = np.array(data.first_lengths, dtype=np.int64)
    layouts = [lay_out_step(plan, rows, lengths) for rows in steps]
    if plan.micro_tokens is not None:
        return packing_efficiency(layouts, lengths, pack_tile(plan), plan.pack_tokens if plan.compile else None), len(
            steps
        )
    useful = paid = 0
    for micro in (micro for layout in layouts for micro in layout.micro_batches):
        useful += sum(int(lengths[rows].sum()) for rows in micro)
        paid += len(micro) * max(len(rows) * int(lengths[rows].max(initial=0)) for rows in micro)
    return useful / paid, len(steps)


def _sample_steps(plan: Plan, data: DataFacts) -> Iterator[np.ndarray]:
    """Rows, counted from 0 in the order of the first epoch, of steps that are spread over what the facts have of it."""
    num_samples = len(data.first_lengths)
    if plan.batch_loss_tokens is not None:
        bounds = bound_by_tokens(np.array(data.first_labels, dtype=np.int64), plan.batch_loss_tokens)
    else:
        assert plan.batch_samples is not None
        bounds = np.append(np.arange(0, num_samples, plan.batch_samples), num_samples)
    if num_samples < data.samples_per_epoch:
        bounds = bounds[:-1]  # the last step goes on beyond the sample
    num_steps = min(len(bounds) - 1, plan.num_steps)
    if num_steps < 1:
        return
    wanted = max(1, min(MAX_STEPS, MAX_ROWS * num_steps // int(bounds[num_steps])))
    for step in np.unique(np.linspace(0, num_steps - 1, wanted).astype(np.int64)).tolist():
        yield np.arange(bounds[step], bounds[step + 1])


def with_efficiency(plan: Plan, facts: Facts) -> Plan:
    """The plan with the share of its computed tokens that is useful, and a sentence on it behind the one on the
    batch.
    """
    measured = measure_efficiency(plan, facts.data)
    if measured is None:
        return plan
    share, num_steps = measured
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps of the first epoch"
    sentence = f"efficiency: {_percent(share)} of the computed tokens are useful ({steps} laid out)"
    if share < 1:
        sentence += f"; the rest is {_rest(plan)}"
    if share < GOOD_SHARE:
        sentence += f", as {_why(plan, facts.data)}; {_propose(plan, facts, share)}"
    place = next((index for index, said in enumerate(plan.why, start=1) if said.startswith("batch: ")), len(plan.why))
    return plan.model_copy(update={"efficiency": share, "why": (*plan.why[:place], sentence, *plan.why[place:])})


def _percent(share: float) -> str:
    return f"{share:.{0 if share <= GOOD_SHARE or share == 1 else 1}%}"


def _rest(plan: Plan) -> str:
    """What else is computed."""
    if plan.micro_tokens is None:
        return "padding up to the longest row of a micro-batch" + (" of any rank" if plan.world_size > 1 else "")
    padding = pack_tile(plan) > 1 or plan.pack_tokens is not None
    return " and ".join(["padding"] * padding + ["waiting for the fullest pack"] * (plan.world_size > 1))


def _why(plan: Plan, data: DataFacts) -> str:
    if plan.micro_tokens is None:
        return "rows differ in length"
    sizes = sorted(map(len, _sample_steps(plan, data)))
    rows = sizes[len(sizes) // 2]
    if rows < plan.world_size:
        return f"a step has {rows} {'row' if rows == 1 else 'rows'} for {plan.world_size} ranks"
    if plan.world_size > 1:
        return f"the {rows} rows of a step cannot be dealt evenly to {plan.world_size} ranks"
    return f"a step of {rows} {'row' if rows == 1 else 'rows'} leaves much of its packs empty"


def _propose(plan: Plan, facts: Facts, share: float) -> str:
    """The first change that reaches 90 %, or else the best; or what can be done without knowing how much it gives."""
    tried: list[tuple[float, str]] = []
    for change, other in _changes(plan, facts):
        measured = measure_efficiency(other, facts.data)
        if measured is not None:
            tried.append((measured[0], change))
            if measured[0] >= GOOD_SHARE:
                break
    best, change = max(tried, default=(0.0, ""))
    if best > share + MIN_GAIN:
        return f"{change} would reach {_percent(best)}"
    return "rows of like length would help (data.max_length with data.too_long=truncate)"


def _changes(plan: Plan, facts: Facts) -> Iterator[tuple[str, Plan]]:
    """What could be set otherwise, and the plan with it; the pack's size, which the memory was estimated for, stays."""
    data = facts.data
    if plan.micro_tokens is None:
        assert plan.micro_samples is not None and plan.batch_samples is not None
        if facts.model.packs:
            tokens = padded_tokens(plan.micro_samples * data.max_length)
            yield "data.packing=true", plan.model_copy(update={"micro_samples": None, "micro_tokens": tokens})
        if plan.micro_samples > 1:
            yield (
                "batch.micro_samples=1",
                plan.model_copy(update={"micro_samples": 1, "accumulation": plan.batch_samples // plan.world_size}),
            )
        return
    factor, step_rows = 1, max(map(len, _sample_steps(plan, data)))
    while factor <= MAX_FACTOR and factor * step_rows <= MAX_ROWS:
        if plan.batch_loss_tokens is not None:
            tokens = factor * plan.batch_loss_tokens
            yield f"batch.loss_tokens={tokens}", plan.model_copy(update={"batch_loss_tokens": tokens})
        else:
            assert plan.batch_samples is not None
            rows = ceil_div(factor * plan.batch_samples, plan.world_size) * plan.world_size
            if rows > data.samples_per_epoch:
                break
            yield f"batch.samples={rows}", _with_rows(plan, rows, plan.world_size, data)
        factor *= 2
    ranks = plan.world_size // 2
    while ranks:
        what = f"{ranks} {'process' if ranks == 1 else 'processes'} (parallel.gpus)"
        yield what, _with_rows(plan, plan.batch_samples, ranks, data)
        ranks //= 2


def _with_rows(plan: Plan, rows: int | None, world_size: int, data: DataFacts) -> Plan:
    split = Split(rows, plan.batch_loss_tokens, None, plan.micro_tokens, None, 0)
    pack_tokens = constant_pack_tokens(split, data, world_size)
    return plan.model_copy(update={"batch_samples": rows, "world_size": world_size, "pack_tokens": pack_tokens})
