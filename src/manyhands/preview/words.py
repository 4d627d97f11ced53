"""Sentences that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manyhands.core.errors import UserError
from manyhands.preview.types import Bin, Preview, ShownBatch, ShownRow, SourceCounts

SOURCE_TITLES = ("rows", "tokens", "trained", "held out", "weight", "share")
LENGTH_TITLES = ("rows", "of all rows", "tokens")
SHARE_NOTE = "share: of the tokens of one epoch, each source taken as often as its weight says"
NUMBER_NOTE = "Each row is headed by its number among the training rows, its source, file:line, and its tokens."


def count(number: int, noun: str, plural: str = "") -> str:
    """1 row, 2 rows."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


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
        else f" (micro-batches of at most {count(batch.capacity, 'row')}, not packed)"
    )
    laid = (
        f"{count(batch.num_samples, 'row')}{' side by side' if batch.num_samples > 1 else ''}, {batch.num_tokens:,} tokens"
        if batch.packed
        else count(batch.num_samples, "row")
    )
    laid += capacity
    head = f"Step {batch.step:,} of {batch.num_steps:,} trains {count(batch.num_step_samples, 'row')}"
    if not several:
        return f"{head}, in one micro-batch: {laid}."
    processes = f" on each of {batch.num_ranks:,} processes" if batch.num_ranks > 1 else ""
    first = "the first micro-batch" + (" of process 0" if batch.num_ranks > 1 else "")
    return f"{head}, in {count(batch.num_micro_batches, 'micro-batch', 'micro-batches')}{processes}. This is {first}: {laid}."


def describe_plan_error(error: UserError) -> str:
    why = f" ({error.why})" if error.why else ""
    return f"The run cannot be planned here, so rows are shown in the order of the data: {error.what}{why}."


def head_row(row: ShownRow) -> str:
    return f"row {row.number:,} · {row.source} · {row.place} · {count(row.num_tokens, 'token')}, {row.num_loss_tokens:,} trained"


def describe_more(preview: Preview) -> str:
    """What was not decoded, and how to see it."""
    if not preview.num_more_rows:
        return ""
    if preview.batch is None:
        return f"{count(preview.num_more_rows, 'more row')}: --rows N shows more"
    holds = "this micro-batch holds " if preview.rows else "the micro-batch holds "
    more = count(preview.num_more_rows, "more row" if preview.rows else "row")
    return f"{holds}{more}: --step {preview.batch.step} shows all of it, --rows N the first N"


def describe_counts(preview: Preview) -> Iterator[tuple[str, str]]:
    """(name, value) of what became of the rows as a whole."""
    yield "length", preview.length_words
    if preview.efficiency and preview.batch is not None:
        yield "packing" if preview.batch.packed else "not packed", preview.efficiency
    held_out = (
        f"{count(preview.num_validation_samples, 'row')}, {preview.num_validation_tokens:,} tokens"
        if preview.num_validation_samples
        else "none"
    )
    if preview.num_repeated:
        held_out += f", {preview.num_repeated:,} of them trained too (the same tokens)"
    elif preview.num_validation_samples:
        held_out += ", none of them trained"
    yield "validation", held_out
    length = f"data.max_length = {preview.max_length:,} tokens"
    if preview.num_truncated:
        yield "cut", f"{count(preview.num_truncated, 'row')} at {length}"
    if preview.num_split:
        yield "split", f"{count(preview.num_split, 'document')} into rows of {length}"
    if preview.num_dropped:
        yield "left out", f"{count(preview.num_dropped, 'row')} beyond max_samples"
    yield "refused", f"rows of {count(preview.num_refused, 'source')}, see below" if preview.refused else "none"


def describe_end(preview: Preview) -> str:
    """The last line where there are faults."""
    return f"A run refuses this data: mend {count(preview.num_refused, 'source')} first. Rows and counts are of what can be used of it."
