"""What a preview says, as plain values. Text from data files is harmless in all of them, but not escaped for a page."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.errors import UserError


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one weight, decoded; weight 0 is not trained."""

    text: str
    weight: float


@dataclass(frozen=True)
class ShownRow:
    """One row. ``place`` is ``file:line``; ``num_loss_tokens`` are its trained tokens."""

    number: int
    source: str
    place: str
    num_tokens: int
    num_loss_tokens: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ShownBatch:
    """The first micro-batch of the first rank in one step. ``step`` counts from 1; ``capacity`` is in tokens, or rows
    where not packed.
    """

    step: int
    num_steps: int
    num_step_samples: int
    num_ranks: int
    num_micro_batches: int
    num_samples: int
    num_tokens: int
    capacity: int
    packed: bool


@dataclass(frozen=True)
class SourceCounts:
    """``share`` is that of the tokens of an epoch; ``epoch_samples`` are the rows of an epoch, repeated ones counted
    each time.
    """

    name: str
    path: str
    format: str
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_validation_samples: int
    weight: float
    epoch_samples: float
    share: float


@dataclass(frozen=True)
class Bin:
    """Rows of ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class Refused:
    """What is wrong with one source: each error names up to 20 places."""

    source: str
    errors: tuple[UserError, ...]


@dataclass(frozen=True)
class Preview:
    """Everything that is shown. ``plan_error`` says why there is no batch; ``efficiency`` is what the plan says of
    it.
    """

    run: str
    model: str
    max_length: int
    rows: tuple[ShownRow, ...] = ()
    num_more_rows: int = 0
    batch: ShownBatch | None = None
    plan_error: UserError | None = None
    sources: tuple[SourceCounts, ...] = ()
    lengths: tuple[Bin, ...] = ()
    length_words: str = ""
    efficiency: str = ""
    num_validation_samples: int = 0
    num_validation_tokens: int = 0
    num_repeated: int = 0  # validation rows with the tokens of a training row
    num_truncated: int = 0
    num_split: int = 0
    num_dropped: int = 0
    notes: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def num_refused(self) -> int:
        """Sources with at least one fault."""
        return len(self.refused)
