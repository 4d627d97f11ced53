"""What a preview shows, as plain values and as the sentences and tables that terminal and page share. Pure.

Text from data files is as it is: terminal and page make it printable. Only tabs of samples are spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.text import printable
from manyhands.core.units import count_of
from manyhands.core.units import describe_counts as describe_by_source
from manyhands.data.tokenize.summary import PreparedData


@dataclass(frozen=True)
class Span:
    """Neighboring tokens of one weight, decoded; weight 0 is not trained."""

    text: str
    weight: float


@dataclass(frozen=True)
class ShownSample:
    """One sample. ``place`` is ``file:line``; ``num_loss_tokens`` are its loss tokens."""

    number: int
    source: str
    place: str
    num_tokens: int
    num_loss_tokens: int
    spans: tuple[Span, ...]
    images: tuple[ShownImage, ...] = ()


@dataclass(frozen=True)
class ShownImage:
    """One image of a sample. ``thumbnail`` is a data URL; "" where the image cannot be read any more."""

    place: str
    width: int
    height: int
    num_tokens: int
    thumbnail: str


@dataclass(frozen=True)
class ShownBatch:
    """The first micro-batch of rank 0 in a step, from 1; ``capacity`` in tokens, or rows where not packed."""

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
    """``share`` is that of the tokens of an epoch."""

    name: str
    path: str
    format: str
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_validation_samples: int
    weight: float
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
    """Everything shown. ``plan_error``: why there is no batch. ``efficiency``: from the plan."""

    run: str
    model: str
    max_length: int
    rows: tuple[ShownSample, ...] = ()
    num_more_rows: int = 0
    batch: ShownBatch | None = None
    plan_error: UserError | None = None
    sources: tuple[SourceCounts, ...] = ()
    lengths: tuple[Bin, ...] = ()
    length_words: str = ""
    efficiency: str = ""
    facts: PreparedData | None = None  # None where no row is left
    notes: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def num_refused(self) -> int:
        """Sources with at least one fault."""
        return len(self.refused)


MAX_BINS = 14
BINS_PER_DOUBLING = (4, 2, 1)  # the finest that gives few enough bins


def bin_lengths(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Rows by length, in bins whose borders grow by a constant factor: a doubling, or a half or quarter of one.

    ``lengths (rows)`` are tokens. Bins between the shortest and the longest row are there even where they are empty.
    """
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    for per_doubling in BINS_PER_DOUBLING:
        first = int(np.floor(np.log2(shortest) * per_doubling))
        last = int(np.floor(np.log2(longest) * per_doubling)) + 1
        if last - first <= MAX_BINS:
            break
    borders = np.unique(np.ceil(2.0 ** (np.arange(first, last + 1) / per_doubling)).astype(np.int64))
    place = np.searchsorted(borders, lengths, side="right") - 1
    num_bins = int(place.max()) + 1
    rows = np.bincount(place, minlength=num_bins)
    tokens = np.bincount(place, weights=lengths, minlength=num_bins)
    return tuple(
        Bin(int(borders[i]), int(borders[i + 1]) - 1, int(rows[i]), int(tokens[i]))
        for i in range(int(place.min()), num_bins)
    )


def describe_lengths(lengths: np.ndarray) -> str:
    """Shortest, median, longest and the length that 90 % of the rows do not pass."""
    if not len(lengths):
        return "no samples"
    low, median, high, top = (int(value) for value in np.quantile(lengths, (0.0, 0.5, 0.9, 1.0)))
    return f"shortest {low:,}, median {median:,}, 90 % up to {high:,}, longest {top:,} tokens"


SOURCE_TITLES = ("samples", "tokens", "loss tokens", "held out", "weight", "share")
LENGTH_TITLES = ("samples", "of all samples", "tokens")
SHARE_NOTE = "share: of the tokens of one epoch, each source repeated by its weight"
NUMBER_NOTE = "Each sample is headed by its number among the training samples, its source, file:line, and its tokens."


def percent(share: float) -> str:
    """Whole percents, with one decimal near the ends, where it matters."""
    whole = 0.095 <= share <= 0.9 or share in (0, 1)
    return f"{100 * share:.{0 if whole else 1}f} %"


def weight_mark(weight: float) -> str:
    """What follows trained tokens whose loss is multiplied; nothing after weight 1 or 0."""
    return "" if weight in (0, 1) else f"×{weight:.4g}"


def has_weights(preview: Preview) -> bool:
    return any(weight_mark(span.weight) for row in preview.rows for span in row.spans)


def tabulate_sources(sources: Sequence[SourceCounts]) -> list[tuple[str, ...]]:
    """The cells of ``SOURCE_TITLES`` for each source."""
    return [
        (
            *(
                f"{number:,}"
                for number in (entry.num_samples, entry.num_tokens, entry.num_loss_tokens, entry.num_validation_samples)
            ),
            f"{entry.weight:g}",
            percent(entry.share),
        )
        for entry in sources
    ]


def tabulate_lengths(bins: Sequence[Bin]) -> list[tuple[str, float, tuple[str, ...]]]:
    """(tokens of a row, length of the bar in (0, 1), cells of ``LENGTH_TITLES``) for each bin."""
    most, total = max((entry.num_samples for entry in bins), default=1), sum(entry.num_samples for entry in bins)
    return [
        (
            f"{entry.first:,}" if entry.first == entry.last else f"{entry.first:,}–{entry.last:,}",
            entry.num_samples / most,
            (f"{entry.num_samples:,}", percent(entry.num_samples / total), f"{entry.num_tokens:,}"),
        )
        for entry in bins
    ]


def describe_batch(batch: ShownBatch) -> str:
    """Where in the run the rows that follow are."""
    several = batch.num_ranks * batch.num_micro_batches > 1
    capacity = (
        f" of at most {batch.capacity:,}"
        if batch.packed
        else f" (micro-batches of at most {count_of(batch.capacity, 'sample')}, not packed)"
    )
    laid = (
        f"{count_of(batch.num_samples, 'sample')}{' side by side' if batch.num_samples > 1 else ''}, "
        f"{batch.num_tokens:,} tokens"
        if batch.packed
        else count_of(batch.num_samples, "sample")
    )
    laid += capacity
    head = f"Step {batch.step:,} of {batch.num_steps:,} trains {count_of(batch.num_step_samples, 'sample')}"
    if not several:
        return f"{head}, in one micro-batch: {laid}."
    processes = f" on each of {batch.num_ranks:,} processes" if batch.num_ranks > 1 else ""
    first = "the first micro-batch" + (" of process 0" if batch.num_ranks > 1 else "")
    return (
        f"{head}, in {count_of(batch.num_micro_batches, 'micro-batch', 'micro-batches')}{processes}. This is "
        f"{first}: {laid}."
    )


def describe_plan_error(error: UserError) -> str:
    why = f" ({error.why})" if error.why else ""
    return (
        f"The run cannot be planned on this machine, so samples are shown in the order of the data: {error.what}{why}."
    )


def head_row(row: ShownSample) -> str:
    return (
        f"sample {row.number:,} · {row.source} · {row.place} · {count_of(row.num_tokens, 'token')}, "
        f"{count_of(row.num_loss_tokens, 'loss token')}"
    )


def head_image(image: ShownImage) -> str:
    return f"image {image.place} · {image.width:,} x {image.height:,} pixels · {count_of(image.num_tokens, 'token')}"


def describe_more(preview: Preview) -> str:
    """What was not decoded, and how to see it."""
    if not preview.num_more_rows:
        return ""
    if preview.batch is None:
        return f"{count_of(preview.num_more_rows, 'more sample')}: --rows N shows more"
    holds = "this micro-batch holds " if preview.rows else "the micro-batch holds "
    more = count_of(preview.num_more_rows, "more sample" if preview.rows else "sample")
    return f"{holds}{more}: --step {preview.batch.step} shows all of it, --rows N the first N"


def describe_counts(preview: Preview) -> Iterator[tuple[str, str]]:
    """(name, value) of what became of the rows as a whole."""
    yield "length", preview.length_words
    if preview.efficiency and preview.batch is not None:
        yield "packing" if preview.batch.packed else "not packed", preview.efficiency
    facts = preview.facts
    assert facts is not None, "counted where there are samples"
    if not facts.num_validation_samples:
        yield "validation", "none"
    else:
        also = "none of them in the training set"
        if facts.num_repeated:
            also = f"{facts.num_repeated:,} of them also in the training set (the same tokens)"
        samples = count_of(facts.num_validation_samples, "sample")
        yield "validation", f"{samples}, {facts.num_validation_tokens:,} tokens, {also}"
    length = f"data.max_length = {preview.max_length:,} tokens"
    if facts.num_truncated:
        yield "cut", f"{count_of(facts.num_truncated, 'sample')} at {length}"
    if facts.num_split:
        yield "split", f"{count_of(facts.num_split, 'document')} into samples of {length}"
    for key, counts in facts.left_out.items():
        yield "left out", f"{describe_by_source(counts)}, by {key}"
    if facts.num_dropped:
        yield "left out", f"{count_of(facts.num_dropped, 'sample')} beyond max_samples"
    yield "refused", f"rows of {count_of(preview.num_refused, 'source')}, see below" if preview.refused else "none"


def describe_end(preview: Preview) -> str:
    """The last line where there are faults."""
    return (
        f"A run refuses this data: correct {count_of(preview.num_refused, 'source')} first. Samples and counts "
        f"cover the valid rows; a file is read up to its first unreadable line."
    )


def to_json(preview: Preview) -> dict[str, Any]:
    """The preview as JSON has it: samples with their spans as [text, weight], errors as text."""
    return {
        **{name: getattr(preview, name) for name in ("run", "model", "max_length", "num_more_rows", "length_words")},
        "samples": [{**asdict(row), "spans": [[span.text, span.weight] for span in row.spans]} for row in preview.rows],
        "batch": None if preview.batch is None else asdict(preview.batch),
        "plan_error": None if preview.plan_error is None else str(preview.plan_error),
        "sources": [asdict(source) for source in preview.sources],
        "lengths": [asdict(one) for one in preview.lengths],
        "counts": [] if preview.facts is None else [list(pair) for pair in describe_counts(preview)],
        "notes": list(preview.notes),
        "refused": [{"source": one.source, "errors": list(map(str, one.errors))} for one in preview.refused],
    }


def decode_spans(tokenizer: Any, ids: np.ndarray, weights: np.ndarray) -> Iterator[Span]:
    """Stretches of equal weight of ``ids (T)`` int32, ``weights (T)`` float32, each decoded, special tokens spelt."""
    position = 0
    for weight, group in groupby(weights.tolist()):
        end = position + len(list(group))
        text = tokenizer.decode(
            ids[position:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield Span(printable(text.replace("\t", "    ")), weight)
        position = end
