"""The largest micro-batch before the first step: as large as any, and without a trace in what is trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manyhands.bench.case import Bench, Observer, read_options, run
from manyhands.bench.rows import BenchRow
from manyhands.planner.efficiency import largest_samples
from manyhands.planner.layout import Layout, change
from manyhands.training.types import StepResult
from manyhands.worker.batches import largest_batches
from manyhands.worker.stages import run_largest
from tests.planner.examples import llama_8b
from tests.support.plans import make_input

LAYOUT = make_input(llama_8b(), num_adapter_parameters=1, adapter_rank=1).layout


def chosen(lengths: list[int], layout: Layout, units: list[int] | None = None) -> list[list[int]]:
    samples: Any = SimpleNamespace(lengths=np.array(lengths), image_units=None if units is None else np.array(units))
    return [found.tolist() for found in largest_samples(layout, samples)]


def test_a_pack_takes_the_longest_samples_that_find_room() -> None:
    lengths = [10, 60, 30, 50, 20]
    packed = change(LAYOUT, micro_tokens=100, micro_samples=None)
    assert chosen(lengths, packed) == [[1, 2, 0]]
    assert chosen(lengths, change(packed, pack_tokens=55)) == [[3]]
    assert chosen([200, 300], packed) == [[1]], "one sample in any case"
    assert chosen(lengths, change(packed, micro_tokens=None, micro_samples=2)) == [[1, 3]]


def test_with_images_there_is_one_with_the_most_patches_too() -> None:
    """A planted sample of few tokens and many patches is in it, though the longest fill a micro-batch without it."""
    lengths, units = [10, 60, 30, 50, 20], [0, 10, 0, 0, 900]
    packed = change(LAYOUT, micro_tokens=100, micro_samples=None)
    assert chosen(lengths, packed, units) == [[1, 2, 0], [4, 1, 0]]
    assert chosen(lengths, change(packed, micro_tokens=None, micro_samples=2), units) == [[1, 3], [4, 1]]
    assert chosen(lengths, packed, [0] * 5) == chosen(lengths, packed) == [[1, 2, 0]]
    assert len(chosen([50, 50, 20], packed, [8, 8, 0])) == 1, "the same samples run once"


class Watcher(Observer):
    """Takes the largest micro-batch first if asked to, and keeps what was trained after it."""

    def __init__(self, tries: bool) -> None:
        self.tries, self.tokens = tries, 0
        self.results: list[StepResult] = []

    def before_first_step(self, bench: Bench) -> None:
        rank, data, built = bench.rank, bench.data, bench.built
        self.tokens = next(largest_batches(rank, data, built.loss_model, "train"))["input_ids"].numel()
        if self.tries:
            run_largest(rank, data, built)
            assert all(p.grad is None for p in built.model.parameters())
            assert built.loss_model.training

    def summarise(self, bench: Bench, loop: Any, results: list[StepResult]) -> dict[str, Any]:
        self.results = results
        return {}


@pytest.mark.ci
@pytest.mark.parametrize("method", ["lora", "full"])
def test_training_is_the_same_to_the_bit_with_and_without_it(method: Any, tmp_path: Path) -> None:
    row = BenchRow("largest", "", "tiny", method, 1, rows=4, length=128, data="chats")
    keys = ["parallel.device=cpu", "batch.micro_tokens=256", "data.validation_fraction=0.1"]
    options = read_options(argparse.ArgumentParser(), ["--steps=3", "--warm=1", f"--work={tmp_path}", *keys])
    seen = []
    for tries in (True, False):
        watcher = Watcher(tries)
        run(options, row, watcher)
        seen.append([(result.loss, result.grad_norm) for result in watcher.results])
        assert watcher.tokens >= 128
    assert len(seen[0]) >= 3 and seen[0] == seen[1]
