"""What the loop works with. Protocols instead of imports: the loop knows no model, no process group and no kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from manyhands.core.terms import Metric

# One micro-batch: named tensors; see data/batch/batches.py for the names.
Batch = Mapping[str, Any]
# What a forward pass returns: name -> (sum, weight), both 0-d tensors. The step divides, nobody else.
Terms = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Engine(Protocol):
    """A model with its parallelism and its optimizer: all that the loop knows of either.

    ``engine/native.py`` implements it on FSDP2 and DDP. Every rank calls every method, in the same order. One step is
    ``forward`` and ``backward`` for each micro-batch, then ``gradient_norm``, then ``step``; before them
    ``update_in_backward`` where it applies.
    """

    model: torch.nn.Module  # the Hugging Face model inside: its parameter names are the checkpoint's

    def update_in_backward(self, learning_rate: float) -> None:
        """Before a step whose update is certain and whose gradients are not clipped: the engine may update each weight
        as soon as its gradient is complete. ``step`` still follows.
        """
        ...

    def forward(self, batch: Batch, *, metrics: bool = False) -> Terms:
        """Loss terms of a micro-batch; ``metrics`` adds what ``Metric.of`` names. Without autograd no gradients."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradients of ``loss``, a share of the step's loss, to those of earlier micro-batches.

        ``last``: no further micro-batch follows, so gradients are summed (never averaged) over ranks. Parts of the
        model that no micro-batch of the step reaches on any rank have none then, in every layout: their zeros would
        let an optimizer move them by its moments.
        """
        ...

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of all gradients, summed in float64, as a 0-d float64 tensor, the same on every rank."""
        ...

    def step(self, learning_rate: float, *, max_norm: float) -> None:
        """Clips gradients to the global 2-norm ``max_norm`` (0: does not), updates the weights and frees gradients."""
        ...

    def drop_gradients(self) -> None:
        """Forgets what backward passes have given since the last step: in place of ``step``."""
        ...

    def learning_rates(self) -> Mapping[str, float]:
        """The rates of parameters that have their own, by pattern, as of the latest step."""
        ...

    def save(
        self,
        folder: Path,
        state: dict[str, Any],
        *,
        manifest_extra: dict[str, Any] | None = None,
        progress: Callable[[int, int], None] = ...,
    ) -> None:
        """Writes weights, optimizer states and ``state`` (JSON) as a checkpoint that exists when its manifest does."""
        ...

    def load(self, folder: Path, *, is_checked: bool = False, report: Callable[[str], None] = ...) -> dict[str, Any]:
        """Loads ``save``'s checkpoint on any number of ranks, bit for bit but for what ``report`` gets."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns it."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A small tensor from every rank, in rank order."""
        ...


@dataclass
class TrainState:
    """Where the run is. Written into each checkpoint as JSON; holds nothing that belongs to one rank."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # samples seen
    tokens: int = 0  # tokens seen, untrained included
    loss_tokens: int = 0  # loss tokens seen
    elapsed_s: float = 0.0  # seconds of training, over all launches
    best_loss: float | None = None  # lowest validation loss
    best_step: int | None = None
    evaluations_without_gain: int = 0
    evaluated_step: int = -1  # of the newest evaluation, so that a resumed run does not repeat it
    stop_reason: str = ""  # set when the run is finished
    # What training/guards.py watches.
    recent_losses: list[float] = field(default_factory=list)  # of the last few steps
    best_level: float | None = None  # lowest loss that a few steps in a row had, start_level included
    start_loss: float | None = None  # held-out loss before training
    start_level: float | None = None  # the higher one of that and the first step's loss, both of untrained weights
    steps_above: int = 0  # in a row, far above the best
    steps_over_bound: int = 0  # in a row, above stop.loss_above
    divergence: str = ""  # what was found, if anything was
    losses_before: list[float] = field(default_factory=list)  # of the last guards.spike_window steps
    skipped_in_a_row: int = 0
    num_skipped: int = 0
    num_rollbacks: int = 0
    left_out: list[int] = field(default_factory=list)  # steps, counted from 0, that a rollback leaves out
    replicas_equal_at: int | None = None  # number of steps after which replicas were last found equal


@dataclass(frozen=True)
class StepResult:
    """An optimizer step, the same on every rank. Losses are means over loss tokens in nats, with all terms."""

    step: int  # 1 for the first
    epoch: float
    loss: float
    rank_losses: tuple[float, ...]  # mean over each rank's own loss tokens (nan where it had none)
    grad_norm: float
    learning_rate: float
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_micro_batches: int
    seconds: float  # since the step before ended, evaluations and checkpoints left out
    tokens_per_s: float  # over all ranks
    input_wait_s: float = 0.0  # of ``seconds``: what the rank that waited longest waited for its micro-batches
    learning_rates: Mapping[str, float] = field(default_factory=dict)  # of groups that have their own, by pattern
    terms: Mapping[str, float] = field(
        default_factory=dict
    )  # the loss by term, each over its own weight, where there are several
    figures: Mapping[str, float] = field(default_factory=dict)  # of ``StepFigures``, by name
    skipped: bool = False  # its update was left out (guards)
    rank_seconds: tuple[float, ...] = ()  # of each rank, until its own work was done and it waited for others


@dataclass(frozen=True)
class Evaluation:
    """A pass over validation samples. ``loss`` is the sum of the terms' means over all ranks, by coefficient;
    ``figures`` are those of the declared metrics, by name: ``perplexity`` and ``accuracy`` of a language model.
    """

    step: int
    loss: float
    figures: Mapping[str, float]
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    seconds: float
    samples: tuple[tuple[str, str], ...] = field(default=())  # (prompt, answer)
    sets: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # of evaluate.data by name: loss, figures, num_loss_tokens
    terms: Mapping[str, float] = field(
        default_factory=dict
    )  # the loss by term, each over its own weight, where there are several
    metrics: Mapping[str, float] = field(default_factory=dict)  # of hooks, by name
    declared: tuple[Metric, ...] = ()  # what the figures are; not part of a row

    def to_row(self) -> dict[str, Any]:
        """Its values as metrics.jsonl has them: each figure under its own name."""
        values = asdict(replace(self, declared=()))
        del values["declared"]
        return {"step": self.step, "loss": self.loss, **values.pop("figures"), **values}


ROW_FIELDS = frozenset({each.name for each in fields(Evaluation)} | {"kind", "time", "run"})


def figures_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of what ``to_row`` gave."""
    return {name: value for name, value in row.items() if name not in ROW_FIELDS}


class StepFigures(Protocol):
    """Figures of a step beside its loss, gathered on the device (``LossModel.figures``)."""

    metrics: Sequence[str]  # their names, the same on every rank

    def begin(self) -> None:
        """Forgets what was gathered so far."""

    def read(self, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        """The step's figures on the device, 0-d, equal on all ranks, without waiting; begins again."""
        ...


class Hook:
    """A door into the loop: every rank calls every hook at the same moments, in the same order."""

    def before_training(self, state: TrainState) -> None: ...

    num_local_values = 0  # numbers that ``local_values`` returns, the same on every rank

    def local_values(self) -> Sequence[float]:
        """Numbers of this rank that travel with the step's one gather."""
        return ()

    def on_gathered(self, values: Sequence[Sequence[float]]) -> None:
        """What ``local_values`` gave in this step, by rank: the same on every rank. Called before ``after_step``."""

    def after_step(self, state: TrainState, result: StepResult) -> None: ...

    def measure(self, state: TrainState, evaluation: Evaluation) -> Mapping[str, float]:
        """Figures of its own that belong to an evaluation, by name; what counts is what rank 0 returns."""
        return {}

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None: ...

    def after_checkpoint(self, state: TrainState, folder: Path) -> None:
        """``folder`` holds a complete checkpoint."""

    def between_steps(self, state: TrainState) -> None:
        """After everything that belongs to a step, its evaluation included: the moment for a checkpoint."""

    def after_training(self, state: TrainState) -> None: ...


Evaluate = Callable[[TrainState], Evaluation]
