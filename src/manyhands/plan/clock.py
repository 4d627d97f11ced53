"""How long candidates take: what the time estimate needs beside a layout, found once for a run. Pure.

Steps are laid out as training does it, some of them, from the lengths that the facts have; where they have none, from
the mean length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.data.pack import TILE_TOKENS, StepLayout, lay_out_packed, lay_out_unpacked
from manyhands.facts.gpu_kinds import kind_of_all
from manyhands.facts.types import DataFacts, Facts, GpuKind
from manyhands.plan.choices import COLLATE_SAMPLE_S, COLLATE_TOKEN_S, Decisions
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.layout import Layout
from manyhands.plan.rates import Fitted, GpuRates, cpu_rates, load_fitted, rates_of
from manyhands.plan.sampling import sample_steps
from manyhands.plan.time import TimeInput, between_nodes, estimate_step
from manyhands.plan.types import Candidate, Reason, reason
from manyhands.plan.work import MeanStep, mean_work, work_of_lengths

MAX_STEPS, MAX_SAMPLES = 6, 2_048  # laid out for each size of micro-batches


@dataclass
class Clock:
    """Seconds of a layout's mean step. Work is laid out once for each size of micro-batches."""

    data: DataFacts
    kind: GpuKind | None  # None: of a CPU, or in no list; its seconds only compare layouts with each other
    rates: GpuRates
    fitted: Fitted
    attention: Literal["varlen", "sdpa", "blockwise"]
    num_local: int
    batch: dict[str, Any]  # batch_samples, batch_loss_tokens, batch_packs, pack_tokens
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
            collate_tokens_s=collate_rate(self.data) * max(1, asked.layout.data_workers),
        )

    def work(self, asked: EstimateInput) -> MeanStep:
        layout = asked.layout
        key = (
            *(layout.micro_tokens, layout.micro_samples, layout.pack_tokens),
            *(layout.accumulation, layout.data_parallel_degree, layout.device),
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
        tile = TILE_TOKENS if layout.compile or layout.device == "cuda" else 1
        return work_of_lengths(parts, layout, window, tile)


def lay_out(layout: Layout, samples: np.ndarray, lengths: np.ndarray, more: np.ndarray | None = None) -> StepLayout:
    """The samples of one training step as micro-batches of all data-parallel ranks; ``lengths`` by sample id, and
    ``more``, what their images cost in tokens.
    """
    if layout.micro_tokens is not None:
        capacity = layout.pack_tokens or layout.micro_tokens
        return lay_out_packed(samples, lengths, layout.data_parallel_degree, capacity, more)
    assert layout.micro_samples is not None
    return lay_out_unpacked(samples, layout.data_parallel_degree, layout.micro_samples, layout.accumulation)


def collate_rate(data: DataFacts) -> float:
    """Tokens/s of one thread, as ``choices.choose_data_workers`` counts them."""
    mean = max(1.0, data.mean_length)
    return mean / (COLLATE_SAMPLE_S + mean * COLLATE_TOKEN_S)


def make_clock(config: RunConfig, facts: Facts, made: Decisions, num_local: int, batch: dict[str, Any]) -> Clock:
    """``config`` is settled; ``batch``: fields of the plan that say which samples form a step."""
    fitted = load_fitted()
    kind = (facts.host.kind or kind_of_all(made.gpus)) if made.device == "cuda" else None
    cores = facts.host.num_cores / num_local
    rates = rates_of(kind, facts.host.calibration, fitted) if made.device == "cuda" else cpu_rates(cores)
    if facts.node_link is not None:  # of a node: its ranks share it
        rates = replace(rates, node_link=1e9 * facts.node_link.value / num_local)
    return Clock(
        data=facts.data,
        kind=kind,
        rates=rates,
        fitted=fitted,
        attention=made.attention,
        num_local=num_local,
        batch=batch,
    )


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
