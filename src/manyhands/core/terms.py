"""Declarations of loss terms and of the metrics that belong to them.

A task, a family (``Family.terms``) or a converter (``on_loss``) declares a term; step, evaluation, sinks and reports
loop over what is declared and know no name. Imports neither torch nor numpy: the command line names the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

MAX_EXPONENT = 700.0  # exp of more is beyond float64


class SampleTables(Protocol):
    """What the weight of a term may depend on; ``data/store/store.py`` has more of it."""

    @property
    def num_loss_tokens(self) -> np.ndarray: ...

    @property
    def loss_weights(self) -> np.ndarray: ...

    @property
    def has_weights(self) -> bool: ...

    @property
    def lengths(self) -> np.ndarray: ...

    def sample(self, index: int) -> Mapping[str, np.ndarray]: ...


def weigh_loss_tokens(samples: SampleTables, numbers: np.ndarray) -> np.ndarray:
    """Returns the sum of the weights of each sample's loss tokens; their exact number where each token weighs 1."""
    return (samples.loss_weights if samples.has_weights else samples.num_loss_tokens)[numbers]


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation: ``figure`` of a sum over its weight, both summed over all ranks before.

    ``of`` names the (sum, weight): a term, or what the term's ``compute`` returns beside it for ``metrics``. A share is
    shown in percent, under ``label``.
    """

    name: str  # in metrics.jsonl and report.json
    of: str
    figure: Callable[[float], float] = float
    label: str = ""
    is_share: bool = False

    def format(self, value: float | None, number: str, share: str) -> str:
        """The value by one of the two formats; "-" for none."""
        if value is None:
            return "-"
        return format(value, share if self.is_share else ".1e" if number.endswith("f") and value >= 1e6 else number)


@dataclass(frozen=True)
class StepValue:
    """A number that a term needs of the whole step before its first backward pass: a mean over all ranks and
    micro-batches, the same for all of them, without gradients. Of an evaluation, over all of its samples.

    Args:
        name: of the entry of a batch that has it, a 0-d tensor.
        choose: (samples, numbers) -> numbers of samples to pass through the model for it, in micro-batches of their
            own (``pair_numbers`` in ``data/store/store.py`` names samples that are made of two).
        compute: (LossModel, batch, hidden states (n, e)) -> (sum, weight), 0-d tensors.
    """

    name: str
    choose: Callable[[Any, np.ndarray], np.ndarray]
    compute: Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class LossTerm:
    """A part of the loss: over all ranks and micro-batches of a step, its sums divided once by its weight, times its
    coefficient.

    Args:
        name: under which ``compute`` returns it.
        coefficient: what its mean is scaled by.
        weigh: (samples, numbers) -> the weight of each of these samples, known before the backward pass; the same on
            every rank. It runs in the thread that prepares batches. The forward pass returns the sum of these weights.
        compute: (LossModel, batch, hidden states (n, e), metrics) -> {name: (sum, weight)}, 0-d tensors; with
            ``metrics`` also what ``Metric.of`` names. A micro-batch without weight gives a zero that depends on every
            parameter. None: the model's cross-entropy.
        metrics: figures that an evaluation shows of it.
        entries: entries of a batch that ``compute`` alone reads: they are no inputs of the model.
        value: what it needs of the whole step first.
        needs_reference: it compares with the model before training: ``compute`` finds log-probabilities of answers in
            its batch, stored ones or those of a pass before the model's own.
    """

    name: str
    coefficient: float = 1.0
    weigh: Callable[[Any, np.ndarray], np.ndarray] = weigh_loss_tokens
    compute: Callable[..., Mapping[str, Any]] | None = None
    metrics: tuple[Metric, ...] = ()
    entries: frozenset[str] = frozenset()
    value: StepValue | None = None
    needs_reference: bool = False


IS_FOR_VALUE = "is_for_value"  # True in a batch that goes through the model for the terms' values alone


LANGUAGE_MODEL = LossTerm(
    "lm",
    metrics=(
        Metric("perplexity", "lm", lambda mean: math.exp(mean) if mean < MAX_EXPONENT else math.inf, "perplexity"),
        Metric("accuracy", "correct", label="token accuracy", is_share=True),
    ),
)


def find_metric(name: str, declared: Iterable[Metric]) -> Metric:
    """The metric of ``declared`` or of the language model that a figure is of; of an unknown one, its name alone."""
    known = {metric.name: metric for metric in (*LANGUAGE_MODEL.metrics, *declared)}
    return known.get(name) or Metric(name, name, label=name.replace("_", " "))
