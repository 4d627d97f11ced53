"""The one division: arithmetic on a model with a single weight w, whose loss on token x is w * x."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands.core.terms import IS_FOR_VALUE, LANGUAGE_MODEL, LossTerm
from manyhands.training.loop import evaluate
from manyhands.training.step import StepWork, TermWeight, compute_gradients
from manyhands.training.types import TrainState
from tests.support.toy_engine import ToyEngine


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))


class Plain(ToyEngine):
    """The toy engine on it; the optimizer is SGD."""

    def __init__(self) -> None:
        super().__init__(None, OneWeight(), functools.partial(torch.optim.SGD, lr=1.0))

    def forward(self, batch, *, metrics=False):
        x = batch["x"]
        return {"lm": ((self.model.w * x).sum(), torch.tensor(float(x.numel())))}


def work(*micro_batches: list[float]) -> StepWork:
    tensors = [{"x": torch.tensor(values)} for values in micro_batches]
    num_loss_tokens = sum(len(values) for values in micro_batches)
    weights = {"lm": TermWeight(num_loss_tokens, num_loss_tokens)}
    return StepWork(0, 0.0, 1, num_loss_tokens, num_loss_tokens, len(tensors), weights, tensors)


def step(engine: Plain, *micro_batches: list[float], max_grad_norm: float = 0.0, lr: float = 1.0):
    sums = compute_gradients(engine, work(*micro_batches), seed=0, rank=0)
    engine.step(lr, max_norm=max_grad_norm)
    return sums


def test_ragged_micro_batches_weigh_by_tokens_not_by_micro_batch():
    # loss = (1 + 2 + 3 + 10) / 4 = 4, d/dw = 4, w = 1 - 4 = -3. The mean of means would be (2 + 10) / 2 = 6.
    engine = Plain()
    sums = step(engine, [1.0, 2.0, 3.0], [10.0])
    assert sums.terms["lm"].item() == 16.0
    assert sums.grad_norm.item() == 4.0
    assert engine.model.w.item() == pytest.approx(-3.0)


def test_accumulation_does_not_change_the_update():
    whole, parts = Plain(), Plain()
    step(whole, [1.0, 2.0, 3.0, 10.0])
    step(parts, [1.0], [2.0, 3.0], [10.0])
    assert whole.model.w.item() == parts.model.w.item()


def test_only_the_last_micro_batch_reduces():
    engine = Plain()
    step(engine, [1.0], [2.0], [3.0])
    assert engine.lasts == [False, False, True]


def test_clipping_scales_to_the_norm_and_never_up():
    engine = Plain()
    step(engine, [4.0], max_grad_norm=0.5)
    assert engine.model.w.item() == pytest.approx(1 - 0.5, abs=1e-5)
    engine = Plain()
    step(engine, [0.25], max_grad_norm=0.5)
    assert engine.model.w.item() == pytest.approx(1 - 0.25)


def test_dropout_is_keyed_by_step_and_repeats():
    seen = []

    class Drops(Plain):
        def forward(self, batch, *, metrics=False):
            seen.append(torch.rand(()).item())
            return super().forward(batch)

    step(Drops(), [1.0], [1.0])
    torch.rand(7)  # whatever else consumed random numbers in between
    step(Drops(), [1.0], [1.0])
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_a_value_of_the_whole_step_comes_first_and_repeats_its_dropout():
    """The micro-batches for it pass without gradients; the others get their sum by their weight."""
    seen, drawn = [], []

    class Valued(Plain):
        def forward(self, batch, *, metrics=False):
            if IS_FOR_VALUE in batch:
                assert not torch.is_grad_enabled()
                drawn.append(torch.rand(()).item())
                return {"value": (batch["x"].sum(), torch.tensor(batch["x"].numel()))}
            seen.append(float(batch["value"]))
            return super().forward(batch)

    for _ in range(2):
        made = work([1.0], [1.0])
        first = [{"x": torch.tensor(values), IS_FOR_VALUE: True} for values in ([1.0, 2.0, 3.0], [6.0])]
        compute_gradients(Valued(), replace(made, micro_batches=[*first, *made.micro_batches]), seed=0, rank=0)
        torch.rand(7)
    assert seen == [3.0] * 4
    assert drawn[:2] == drawn[2:]


def test_the_sum_of_weights_divides_where_there_are_any():
    # sum(w x) with weights 2 and 1 for losses 3 and 6: (2 * 3 + 6) / 3 = 4 = d/dw, and w = 1 - 4
    engine = Plain()
    weighted = replace(work([6.0, 6.0]), weights={"lm": TermWeight(3.0, 3.0)})
    sums = compute_gradients(engine, weighted, seed=0, rank=0)
    engine.step(1.0, max_norm=0.0)
    assert sums.terms["lm"].item() == 12.0 and engine.model.w.item() == pytest.approx(-3.0)


BOTH = (LANGUAGE_MODEL, LossTerm("router", 0.25))


class TwoTerms(Plain):
    """w x over the loss tokens, and w y over whatever a second term counts: more of it, or less."""

    def forward(self, batch, *, metrics=False):
        terms = super().forward(batch) | {
            "router": ((self.model.w * batch["y"]).sum(), torch.tensor(float(batch["n"])))
        }
        return terms | ({"correct": (torch.tensor(1.0), torch.tensor(2.0))} if metrics else {})


TWO_TERMS = [
    {"x": torch.tensor([1.0, 2.0, 0.5]), "y": torch.tensor(4.0), "n": 30},
    {"x": torch.tensor([0.5]), "y": torch.tensor(6.0), "n": 70},
]


def evaluate_on(engine: Plain, batches: list, terms=(LANGUAGE_MODEL,)):
    counts = {"num_samples": 2, "num_tokens": 4, "num_loss_tokens": {"": 4}}
    return evaluate(engine, engine.model, batches, TrainState(), **counts, device=torch.device("cpu"), terms=terms)


def test_every_term_is_divided_by_its_own_weight_and_scaled_by_its_coefficient():
    # reference in float64: d/dw (sum(w x) / n_x + 0.25 sum(w y) / n_y), with n_x = 4 tokens and n_y = 100
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    ((w * 1 + w * 2 + w * 0.5 + w * 0.5) / 4 + 0.25 * (w * 4 + w * 6) / 100).backward()
    assert w.grad.item() == pytest.approx(1.025)

    engine, weights = TwoTerms(), {"lm": TermWeight(4, 4), "router": TermWeight(100, 100)}
    given = replace(work([1.0, 2.0, 0.5], [0.5]), micro_batches=TWO_TERMS, weights=weights)
    sums = compute_gradients(engine, given, seed=0, rank=0, terms=BOTH)
    assert engine.model.w.grad.item() == pytest.approx(w.grad.item(), rel=1e-6)
    assert {name: value.item() for name, value in sums.terms.items()} == {"lm": 4.0, "router": 10.0}

    found = evaluate_on(engine, TWO_TERMS, BOTH)
    assert found.loss == pytest.approx(1.025) and found.terms == pytest.approx({"lm": 1.0, "router": 0.1})
    assert found.figures == pytest.approx({"perplexity": math.exp(1.0), "accuracy": 0.5})


def test_a_term_of_no_weight_adds_nothing():
    engine, weights = TwoTerms(), {"lm": TermWeight(4, 4), "router": TermWeight(0, 0)}
    given = replace(work([1.0, 2.0, 0.5], [0.5]), micro_batches=TWO_TERMS, weights=weights)
    compute_gradients(engine, given, seed=0, rank=0, terms=BOTH)
    assert engine.model.w.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize(("terms", "make"), [((LANGUAGE_MODEL,), TwoTerms), (BOTH, Plain)])
def test_a_term_that_is_undeclared_or_missing_is_refused_by_name(terms, make):
    given = replace(work([1.0]), micro_batches=TWO_TERMS[:1], weights={"lm": TermWeight(1, 1)})
    with pytest.raises(ValueError, match="router"):
        compute_gradients(make(), given, seed=0, rank=0, terms=terms)
    with pytest.raises(ValueError, match="router"):
        evaluate_on(make(), TWO_TERMS, terms)


@pytest.mark.distributed
def test_terms_are_divided_by_their_weights_over_all_ranks(world):
    """Three ranks with 1, 2 and 0 of the loss tokens and other parts of the second term: the loss and gradient of one
    rank.
    """
    answers = world.run("tests.training.term_ranks:train_and_evaluate", world_size=3)
    assert answers == [answers[0]] * 3
    # lm: (1 + 2 + 3) / 3 = 2; router: (4 + 0 + 6) / 100 = 0.1, times its coefficient 0.5. The gradient is the loss
    # where w is 1
    wanted = {"gradient": 2.05, "loss": 2.05, "lm": 2.0, "router": 0.1, "held out": 2.05}
    assert answers[0] == pytest.approx(wanted)


@pytest.mark.parametrize("of_batches", [[(800.0, 1.0, 1, 1)], [(6.0, 1.5, 1, 4), (3.0, 3.0, 2, 4)]])
def test_evaluation_divides_the_loss_by_weight_and_hits_by_tokens(of_batches):
    class Weighted(Plain):
        def forward(self, batch, *, metrics=False):
            loss, weight, hits, tokens = batch["x"]
            return {"lm": (loss, weight), "correct": (hits, tokens)}

    found = evaluate_on(Weighted(), [{"x": torch.tensor(values)} for values in of_batches])
    if len(of_batches) == 1:  # a hopeless loss has no perplexity of 300 digits
        assert (found.loss, found.figures["perplexity"]) == (800.0, math.inf)
    else:
        assert (found.loss, found.figures["accuracy"]) == (2.0, 3 / 8)
