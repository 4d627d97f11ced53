"""How long a run takes, from the seconds of its steps: evaluations, checkpoints and start added. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace

from manyhands.facts.types import Facts
from manyhands.plan.batch import ceil_div
from manyhands.plan.clock import Clock
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.rates import peak_flops
from manyhands.plan.steps import Steps
from manyhands.plan.time import all_attention, block_elementwise, block_matmuls, head
from manyhands.plan.types import DiskEstimate, TimeEstimate
from manyhands.plan.work import Micro

DISK_BYTES_S = 1e9  # assumed, of one machine's disk: one process after the other writes and reads at this rate
COMPILE_S = 40.0  # assumed: imports, compilation of blocks and the checks before the first step


def estimate_time(
    clock: Clock | None, asked: EstimateInput, facts: Facts, steps: Steps, disk: DiskEstimate, *, beside: bool = False
) -> TimeEstimate | None:
    """``asked`` has the chosen layout. ``beside``: training waits for the last checkpoint, and for others as far as
    writing takes longer than the steps between two. None for a CPU and for a GPU of an unknown kind, whose rates are
    not known.
    """
    if clock is None or clock.rates.source == "assumed":
        return None
    terms = clock.terms(asked)
    step_s, work = sum(terms.values()), clock.work(asked)
    ranks, data = asked.layout.world_size, facts.data
    evaluations = count_evaluations(steps, data.num_validation_samples)
    evaluation_s = _forward(clock, asked, data.num_validation_tokens, data.mean_length)
    checkpoint_s = disk.checkpoint_bytes / DISK_BYTES_S
    start_s = COMPILE_S + asked.model.num_parameters * 2 / DISK_BYTES_S
    between_s = step_s * steps.total / steps.num_checkpoints if beside else 0.0
    saving_s = checkpoint_s + (steps.num_checkpoints - 1) * max(0.0, checkpoint_s - between_s)
    total_s = start_s + steps.total * step_s + evaluations * evaluation_s + saving_s
    flops = model_flops(clock, asked)
    return TimeEstimate(
        terms={name: float(f"{seconds:.6g}") for name, seconds in terms.items() if seconds > 0},
        step_s=float(f"{step_s:.6g}"),
        tokens_per_s=float(f"{work.num_tokens / step_s:.6g}"),
        mfu=float(f"{flops / step_s / peak_flops(clock.kind):.4g}") if clock.kind is not None else None,
        evaluation_s=float(f"{evaluation_s:.6g}"),
        num_evaluations=evaluations,
        checkpoint_s=float(f"{checkpoint_s:.6g}"),
        start_s=float(f"{start_s:.6g}"),
        total_s=float(f"{total_s:.6g}"),
        gpu_hours=float(f"{total_s * ranks / 3600:.6g}"),
        source=clock.rates.source,
    )


def count_evaluations(steps: Steps, num_samples: int) -> int:
    """Of the whole run, the one at the end and one at the start included; none without samples."""
    if not num_samples:
        return 0
    if steps.evaluate_per_epoch:
        return 1 + ceil_div(steps.evaluate_per_epoch * steps.total, steps.per_epoch)
    return 2 + (steps.total // steps.evaluate_every if steps.evaluate_every else 0)


def _forward(clock: Clock, asked: EstimateInput, num_tokens: int, mean_length: float) -> float:
    """Seconds of the forward pass of a rank's share of ``num_tokens``, in samples of ``mean_length``."""
    tokens = num_tokens / asked.layout.world_size
    if not tokens:
        return 0.0
    s = clock.describe(asked)
    pairs = tokens * mean_length / 2
    micro = Micro(1.0, tokens, pairs, pairs)
    layers = asked.model.num_layers
    seconds = layers * (
        block_matmuls(s, tokens, backward=False) + block_elementwise(s, tokens, backward=False)
    ) + all_attention(s, micro, backward=False)
    return seconds + head(replace(s, estimate=asked), micro) / 2


def model_flops(clock: Clock, asked: EstimateInput) -> float:
    """Operations a rank's step needs by the model alone: 6 for each matmul weight and token, 4 where it is frozen, and
    attention's; nothing for what is computed again.
    """
    work, model = clock.work(asked), asked.model
    linears = sum(out * into for out, into in model.block_linear_shapes.values()) * model.num_layers
    weights = linears + model.vocab_size * model.hidden_size
    tokens = sum(micro.count * micro.tokens for micro in work.micros)
    pairs = sum(micro.count * micro.pairs for micro in work.micros)
    each = 4.0 if asked.num_adapter_parameters else 6.0
    return each * weights * tokens + 12.0 * pairs * model.num_layers * model.num_heads * model.head_dim
