"""What the plan says about useful tokens: the share, counted by hand, why it is small, and proposals that hold."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from manyhands.planner.efficiency import _sample_steps, measure_efficiency
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, llama_1b, model_facts, run_config
from tests.support.plans import explain_why


def rows_of(lengths: list[int], **more: Any) -> Any:
    facts_ = data_facts(len(lengths), float(np.mean(lengths)), max(lengths), first_lengths=tuple(lengths), **more)
    return facts_.model_copy(update={"num_tokens": sum(lengths)})


def said(made: Plan) -> str:
    return next(sentence for sentence in explain_why(made) if sentence.startswith("efficiency: "))


def mixed_lengths(num_samples: int) -> list[int]:
    return np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, num_samples).astype(int), 8, 2000).tolist()


def test_the_share_is_that_of_the_padded_packs() -> None:
    data = rows_of([100, 200, 300, 50])
    made = plan(run_config(batch__samples=4), facts(llama_1b(), gpus=1, data=data))
    assert (
        made.efficiency == 650 / 768
        and "85% of the computed tokens are useful (measured on 1 step); the rest is padding" in said(made)
    )
    made = plan(run_config(batch__samples=4), facts(llama_1b(), gpus=2, data=data))
    assert made.efficiency == 650 / (2 * 384) and "the rest is padding and waiting for the fullest pack" in said(made)


def test_a_cpu_pads_nothing_and_waits_for_nobody() -> None:
    made = plan(run_config(batch__samples=2), facts(data=rows_of([10, 200, 30, 50])))
    assert (
        made.efficiency == 1
        and said(made) == "efficiency: 100% of the computed tokens are useful (measured on 2 steps of the first epoch)"
    )


def test_without_packing_rows_are_padded_to_the_longest() -> None:
    config = run_config(data__packing=False, batch__samples=4, batch__micro_samples=2)
    made = plan(config, facts(data=rows_of([10, 20, 30, 40])))
    assert made.efficiency == 100 / (2 * 20 + 2 * 40)
    padded = "padding up to the longest sample of a micro-batch, as samples differ in length"
    assert f"{padded}; data.packing=true would reach 100%" in said(made)
    cannot = model_facts(packs=False, packing_reason="rows see each other")
    assert "batch.micro_samples=1 would reach 100%" in said(plan(config, facts(cannot, data=rows_of([10, 20, 30, 40]))))


def test_steps_of_packs_are_laid_out_as_the_run_does() -> None:
    data = rows_of(mixed_lengths(3000), steps_of_epochs=(120,))
    made = plan(run_config(batch__packs=8), facts(llama_1b(), gpus=4, data=data))
    assert made.efficiency is not None and made.efficiency > 0.93
    assert made.layout.micro_tokens == 4096 and not made.layout.accumulates
    given = data.model_copy(update={"as_given": True})
    steps = list(_sample_steps(made, given))
    assert len(steps) > 10 and all((np.diff(samples) == 1).all() for samples in steps), "samples keep their order"
    kept = plan(run_config(batch__packs=8), facts(llama_1b(), gpus=4, data=given))
    assert kept.efficiency is not None and kept.efficiency < made.efficiency


def test_one_row_a_rank_without_packing_can_only_be_shortened() -> None:
    config = run_config(data__packing=False, batch__samples=2, batch__micro_samples=1)
    cannot = model_facts(packs=False, packing_reason="rows see each other")
    made = plan(config, facts(cannot, gpus=2, data=rows_of([10, 1000])))
    assert made.efficiency == 1010 / 2000 and said(made).endswith(
        "samples of similar length would help (data.max_length with data.too_long=truncate)"
    )


@pytest.mark.parametrize(("gpus", "rows"), [(8, 4), (8, 32), (2, 4)])
def test_a_proposed_batch_holds_what_it_promises(gpus: int, rows: int) -> None:
    facts_ = facts(llama_1b(), gpus=gpus, data=rows_of(mixed_lengths(2000)))
    made = plan(run_config(batch__samples=rows), facts_)
    assert made.efficiency is not None and made.efficiency < 0.9
    assert (
        f"a step has {rows} samples for {gpus} ranks" if rows < gpus else f"cannot be divided evenly among {gpus} ranks"
    ) in said(made)
    proposed = re.search(r"batch\.samples=(\d+) would reach ([\d.]+)%", said(made))
    assert proposed and float(proposed[2]) >= 90
    better = plan(run_config(batch__samples=int(proposed[1])), facts_)
    assert better.efficiency is not None and better.efficiency >= float(proposed[2]) / 100 - 0.01


def test_rows_of_one_length_are_proposed_in_multiples_of_the_ranks() -> None:
    data = rows_of([512] * 1000, num_validation_samples=20, num_validation_tokens=20 * 512)
    made = plan(run_config(batch__samples=10), facts(llama_1b(), gpus=8, data=data))
    assert made.efficiency == pytest.approx(10 / 16) and "batch.samples=16 would reach 100%" in said(made)


def test_a_batch_of_tokens_is_proposed_in_tokens() -> None:
    lengths = mixed_lengths(2000)
    data = rows_of(lengths, first_labels=tuple(lengths), steps_of_epochs=(200,))
    made = plan(run_config(batch__loss_tokens=3000), facts(llama_1b(), gpus=8, data=data))
    assert re.search(r"batch\.loss_tokens=\d+000 would reach 9\d", said(made))


def test_fewer_processes_are_proposed_where_there_are_no_more_rows() -> None:
    made = plan(run_config(batch__samples=6), facts(llama_1b(), gpus=8, data=rows_of([500, 510, 505, 500, 490, 512])))
    assert "a step has 6 samples for 8 ranks" in said(made) and re.search(r"parallel\.gpus=\d would reach", said(made))


def test_steps_beyond_the_sample_are_not_guessed() -> None:
    data = rows_of([100] * 100).model_copy(
        update={"samples_per_epoch": 1000, "num_samples": 1000, "sources": ((1000, 1.0),)}
    )
    made = plan(run_config(batch__samples=64), facts(data=data))
    assert measure_efficiency(made, data) == (1.0, 1)
    made = plan(run_config(batch__samples=128), facts(data=data))
    assert made.efficiency is None and not [
        sentence for sentence in explain_why(made) if sentence.startswith("efficiency")
    ]
