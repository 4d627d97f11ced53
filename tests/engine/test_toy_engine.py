"""Two engines, one loop: the toy trains what the native engine trains, bit for bit, and resumes from what it saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.config.schema import StopSection
from manyhands.core.world import World
from manyhands.engine.native import NativeEngine
from manyhands.model.loss import LossModel
from manyhands.training.loop import Loop, train
from manyhands.training.step import StepWork, TermWeight
from manyhands.training.types import Evaluation, Hook, StepResult, TrainState
from manyhands.worker.rank import RunEngine
from tests.support.layouts import Documents, count_loss_tokens, pack
from tests.support.tiny import tiny_model
from tests.support.toy_engine import ToyEngine

CPU = torch.device("cpu")
NUM_STEPS, CLIP = 6, 0.5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}


def make_toy(make: Callable[..., torch.optim.Optimizer]) -> RunEngine:
    loss_model = LossModel(tiny_model("llama"))
    return ToyEngine(loss_model, loss_model.model, make)


def make_native(make: Callable[..., torch.optim.Optimizer]) -> RunEngine:
    engine = NativeEngine(LossModel(tiny_model("llama")), World(0, 0, 1, CPU))
    engine.optimizer = make(list(engine.model.parameters()))
    return engine


def documents(seed: int) -> Documents:
    draw = np.random.default_rng(seed)
    return [(draw.integers(0, 256, n).tolist(), [True] * n) for n in (7 + seed, 12)]


def run(engine: RunEngine, first: int = 0, last: int = NUM_STEPS) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    results: list[StepResult] = []

    class Keep(Hook):
        def after_step(self, state: TrainState, result: StepResult) -> None:
            results.append(result)

    def works() -> Any:
        for step in range(first, last):
            micro_batches = [documents(2 * step), documents(2 * step + 1)]
            count = int(sum(map(count_loss_tokens, micro_batches)))
            weights = {"lm": TermWeight(count, count)}
            yield StepWork(step, 0.0, 4, count, count, 2, weights, [pack(each) for each in micro_batches])

    train(
        Loop(
            engine=engine,
            schedule=lambda step: 1e-2 / (step + 1),
            works=works(),
            state=TrainState(step=first),
            stop=StopSection(),
            num_steps=last,
            max_grad_norm=CLIP,
            seed=0,
            rank=0,
            device=CPU,
            hooks=[Keep()],
        )
    )
    return results, {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_toy_trains_the_losses_of_the_native_engine_bit_for_bit(optimizer: str) -> None:
    (native, native_weights), (toy, toy_weights) = (
        run(make(OPTIMIZERS[optimizer])) for make in (make_native, make_toy)
    )
    assert [result.loss for result in toy] == [result.loss for result in native]
    norms = [result.grad_norm for result in toy]
    assert norms == pytest.approx([result.grad_norm for result in native], rel=1e-12)  # summed in another order
    assert min(norms) < CLIP < max(norms) or max(norms) > CLIP
    assert native[-1].loss < native[0].loss
    assert all(torch.equal(toy_weights[name], native_weights[name]) for name in native_weights)


@pytest.mark.parametrize("make", [make_native, make_toy])
def test_an_engine_resumes_from_what_it_saved(make: Callable[..., RunEngine], tmp_path: Path) -> None:
    adamw = OPTIMIZERS["AdamW"]
    results, weights = run(make(adamw))
    first = make(adamw)
    run(first, 0, 3)
    first.save(tmp_path / "step-3", {"step": 3})
    resumed = make(adamw)
    assert resumed.load(tmp_path / "step-3") == {"step": 3}
    later, later_weights = run(resumed, 3)
    assert [result.loss for result in later] == [result.loss for result in results[3:]]
    assert all(torch.equal(later_weights[name], weights[name]) for name in weights)


def test_copies_under_way_end_before_another_state_is_loaded(tmp_path: Path) -> None:
    """What they complete is of the state before: it must not come after a rollback."""
    engine = make_native(OPTIMIZERS["SGD"])
    assert isinstance(engine, NativeEngine)
    run(engine, 0, 1)
    engine.save(tmp_path / "step-1", {"step": 1})
    weight, seen = next(engine.model.parameters()), []
    with torch.no_grad():
        weight.fill_(7)
    engine.before_update(lambda: seen.append(bool((weight == 7).all())))
    engine.load(tmp_path / "step-1")
    run(engine, 1, 2)
    assert seen == [True] and not (weight == 7).all()


def test_both_engines_evaluate_alike() -> None:
    from manyhands.training.loop import evaluate

    found: list[Evaluation] = []
    for make in (make_native, make_toy):
        engine = make(OPTIMIZERS["SGD"])
        batches = [pack(documents(seed)) for seed in range(2)]
        counts = {"num_samples": 4, "num_tokens": 39, "num_loss_tokens": {"": 37}}
        found.append(evaluate(engine, engine.model, batches, TrainState(), **counts, device=CPU))
    assert found[0].loss == found[1].loss and found[0].figures == found[1].figures


def test_both_engines_give_the_same_logits_to_the_checks_and_to_generation() -> None:
    native, toy = (make(OPTIMIZERS["SGD"]) for make in (make_native, make_toy))
    assert native.is_local and toy.is_local
    ids = torch.arange(20).reshape(2, 10)
    logits = native.logits({"input_ids": ids})
    assert logits.shape == (2, 10, 260) and not logits.requires_grad
    assert torch.equal(toy.logits({"input_ids": ids}), logits)
    assert torch.equal(toy.next_token_logits(ids), native.next_token_logits(ids))
    torch.testing.assert_close(native.next_token_logits(ids), logits[:, -1])


def test_every_engine_has_what_the_worker_calls() -> None:
    asked = {name for name in dir(RunEngine) if not name.startswith("_")}
    assert {"logits", "next_token_logits", "is_local", "make_optimizer", "optimizer", "forward", "save"} <= asked
    for make in (make_native, make_toy):
        assert asked <= set(dir(make(OPTIMIZERS["SGD"])))
