"""How long candidates take: what the time estimate needs beside a layout, found once for a run; and how long the run
takes, evaluations, checkpoints and start added. Pure.

Steps are laid out as training does it, some of them, from the lengths that the facts have; where they have none, from
the mean length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.data.batch.divide import HALO
from manyhands.data.batch.pack import TILE_TOKENS, StepLayout, lay_out_packed, lay_out_unpacked
from manyhands.facts.gpu_kinds import kind_of_all
from manyhands.facts.types import DataFacts, Facts, GpuKind
from manyhands.planner.batch import ceil_div
from manyhands.planner.choices import Decisions, collate_rate
from manyhands.planner.layout import Layout
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.steps import Steps
from manyhands.planner.time.collectives import between_nodes
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.rates import Fitted, GpuRates, cpu_rates, load_fitted, peak_flops, rates_of
from manyhands.planner.time.terms import (
    estimate_step,
    forward,
)
from manyhands.planner.time.work import MeanStep, MicroBatchGroup, join_sizes, mean_work, sample_steps, work_of_lengths
from manyhands.planner.types import Candidate, DiskEstimate, Reason, TimeEstimate, reason

MAX_STEPS, MAX_SAMPLES = 64, 2_048  # laid out for each size of micro-batches; six steps missed the mean by a tenth
MAX_SIZES = 8  # of micro-batches, whose seconds are added up for each layout
DISK_BYTES_S = 1e9  # assumed, of one machine's disk: one process after the other writes and reads at this rate
MIN_FLASH4_SAVING = 0.03  # of a step: less is not worth a line of the plan
COMPILE_S = 40.0  # assumed: imports, compilation of blocks and the checks before the first step


@dataclass
class Clock:
    """Seconds of a layout's mean step. Work is laid out once for each size of micro-batches."""

    data: DataFacts
    kind: GpuKind | None  # None: of a CPU, or in no list; its seconds only compare layouts with each other
    rates: GpuRates
    fitted: Fitted
    attention: Literal["varlen", "sdpa", "blockwise"]
    num_local: int
    takes_flash4: bool  # FlashAttention 4 computes attention where it is installed; its self-test may still refuse
    has_flash4: bool
    batch: dict[str, Any]  # batch_samples, batch_loss_tokens, batch_packs, pack_tokens
    evaluates_at_start: bool = True
    _works: dict[tuple[Any, ...], MeanStep] = field(default_factory=dict)

    def terms(self, asked: EstimateInput) -> dict[str, float]:
        """Seconds of a mean step by term."""
        return estimate_step(self.describe(asked))

    def describe(self, asked: EstimateInput) -> TimeInput:
        return TimeInput(
            estimate=asked,
            work=self.work(asked),
            rates=self.rates,
            fitted=self.fitted,
            attention=self.attention,
            num_local=self.num_local,
            has_flash4=self.has_flash4,
            collate_tokens_s=collate_rate(self.data) * max(1, asked.layout.data_workers),
        )

    def work(self, asked: EstimateInput) -> MeanStep:
        layout = asked.layout
        key = (
            *(layout.micro_tokens, layout.micro_samples, layout.pack_tokens),
            *(layout.accumulation, layout.data_parallel_degree, layout.mesh.context, layout.device),
        )
        if key not in self._works:
            self._works[key] = self._lay_out(layout, asked.model.sliding_window)
        return self._works[key]

    def _lay_out(self, layout: Layout, window: int | None) -> MeanStep:
        steps = list(sample_steps(self.data, **self.batch, max_steps=MAX_STEPS, max_samples=MAX_SAMPLES))
        if not steps:
            samples = self.batch["batch_samples"]
            if self.batch["batch_packs"] is not None:
                samples = self.batch["batch_packs"] * self.batch["pack_tokens"] / max(1.0, self.data.mean_length)
            tokens = self.batch["batch_loss_tokens"]
            if tokens is not None:
                tokens *= self.data.num_tokens / max(1, self.data.num_loss_tokens)
            return mean_work(layout, self.data, samples=samples, tokens=tokens, window=window)
        lengths = np.array(self.data.first_lengths, dtype=np.int64)
        laid_out = [lay_out(layout, samples, lengths) for samples in steps]
        parts = [[[lengths[part] for part in micro] for micro in step.micro_batches] for step in laid_out]
        work = work_of_lengths(parts, layout, window, pack_tile(layout), self.data.num_documents)
        return join_sizes(work, MAX_SIZES)


def lay_out(layout: Layout, samples: np.ndarray, lengths: np.ndarray, more: np.ndarray | None = None) -> StepLayout:
    """The samples of one training step as micro-batches of all data-parallel ranks; ``lengths`` by sample id, and
    ``more``, what their images cost in tokens.
    """
    if layout.micro_tokens is not None:
        capacity = layout.pack_tokens or layout.micro_tokens
        return lay_out_packed(samples, lengths, layout.data_parallel_degree, capacity, more)
    assert layout.micro_samples is not None
    return lay_out_unpacked(samples, layout.data_parallel_degree, layout.micro_samples, layout.accumulation)


def pack_tile(layout: Layout) -> int:
    """Packs are padded to multiples of so many tokens: whole tiles on a GPU and where blocks are compiled, else not at
    all. Ranks that divide a pack get whole tiles each, or two chunks of one length, from which a halo can be taken.
    """
    tile = TILE_TOKENS if layout.compile or layout.device == "cuda" else 1
    return tile if layout.mesh.context == 1 else max(2 * HALO, tile) * layout.mesh.context


def make_clock(config: RunConfig, facts: Facts, made: Decisions, num_local: int, batch: dict[str, Any]) -> Clock:
    """``config`` is resolved; ``batch``: fields of the plan that say which samples form a step."""
    fitted = load_fitted()
    kind = (facts.host.kind or kind_of_all(made.gpus)) if made.device == "cuda" else None
    cores = facts.host.num_cores / num_local
    rates = rates_of(kind, facts.host.calibration, fitted) if made.device == "cuda" else cpu_rates(cores)
    if facts.node_link is not None:  # of a node: its ranks share it
        rates = replace(rates, node_link=1e9 * facts.node_link.value / num_local)
    takes = made.device == "cuda" and made.attention == "varlen" and made.compute != "float32"
    takes = takes and all(gpu.architecture.has_flash4 for gpu in made.gpus)
    return Clock(
        data=facts.data,
        kind=kind,
        rates=rates,
        fitted=fitted,
        attention=made.attention,
        num_local=num_local,
        takes_flash4=takes,
        has_flash4=takes and facts.host.has_flash4,
        batch=batch,
        evaluates_at_start=config.evaluate.at_start,
    )


def explain_flash4(clock: Clock, asked: EstimateInput) -> list[Reason]:
    """What installing FlashAttention 4 would save of a step, where it is worth mentioning."""
    if clock.has_flash4 or clock.kind is None or not clock.takes_flash4:
        return []
    step_s, faster_s = (sum(c.terms(asked).values()) for c in (clock, replace(clock, has_flash4=True)))
    saved = 1 - faster_s / step_s
    return [reason("flash4", saved=saved)] if saved >= MIN_FLASH4_SAVING else []


def explain_links(facts: Facts, clock: Clock, base: EstimateInput, candidates: Sequence[Candidate]) -> list[Reason]:
    """What a step moves between nodes under each strategy, and how long that takes by itself; the fastest candidate of
    each that fits, else the first. Nothing for one node.
    """
    layouts: dict[str, Layout] = {}
    for candidate in sorted(candidates, key=lambda c: (not c.chosen, not c.memory.fits)):
        layouts.setdefault(candidate.layout.strategy, candidate.layout)
    moved = {name: between_nodes(clock.describe(replace(base, layout=layout))) for name, layout in layouts.items()}
    if not any(moved.values()):
        return []
    rate = clock.rates.node_link * clock.num_local
    source = facts.node_link.source if facts.node_link is not None else None
    ways = {name: {"bytes": int(size), "seconds": size / rate} for name, size in moved.items()}
    return [reason("node_links", gb_s=rate / 1e9, source=source, ways=ways)]


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
    evaluations = count_evaluations(steps, data.num_validation_samples, at_start=clock.evaluates_at_start)
    evaluation_s = _forward(clock, asked, data.num_validation_tokens) * (1 + asked.num_more_passes)
    checkpoint_s = disk.checkpoint_bytes / DISK_BYTES_S
    start_s = COMPILE_S + asked.model.num_parameters * 2 / DISK_BYTES_S
    if asked.reference == "stored":
        read = min(1.0, steps.total / steps.per_epoch) * data.num_tokens
        start_s += _forward(clock, asked, read + data.num_validation_tokens)
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


def count_evaluations(steps: Steps, num_samples: int, *, at_start: bool) -> int:
    """Of the whole run, the one after its last step included, which may be due then anyway; none without samples."""
    if not num_samples:
        return 0
    if steps.evaluate_per_epoch:
        return at_start + min(steps.total, ceil_div(steps.evaluate_per_epoch * steps.total, steps.per_epoch))
    return at_start + (ceil_div(steps.total, steps.evaluate_every) if steps.evaluate_every else 1)


def _forward(clock: Clock, asked: EstimateInput, num_tokens: float) -> float:
    """Seconds of the forward pass of a rank's share of ``num_tokens``, in samples of the mean length."""
    tokens = num_tokens / asked.layout.world_size
    if not tokens:
        return 0.0
    s = clock.describe(asked)
    pairs = tokens * clock.data.mean_length / clock.data.num_documents / 2
    return forward(s, MicroBatchGroup(1.0, tokens, pairs, pairs))


def model_flops(clock: Clock, asked: EstimateInput) -> float:
    """Operations a rank's step needs by the model alone: 6 for each matmul weight and token, 4 where it is frozen, and
    attention's; nothing for what is computed again.
    """
    work, model = clock.work(asked), asked.model
    linears = model.sum_linears(lambda shape: shape.active_size)
    weights = linears + model.vocab_size * model.hidden_size
    tokens = sum(micro.count * micro.tokens for micro in work.micros)
    pairs = sum(micro.count * micro.pairs for micro in work.micros)
    layers = model.num_layers * model.attention_share
    each = 4.0 if asked.num_adapter_parameters else 6.0
    return each * weights * tokens + 12.0 * pairs * layers * model.num_heads * model.head_dim
