"""What a plan needs to know of a store's samples, and what became of a part's rows. Knows no model or plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter

from manyhands.config.schema import BatchSection, DataSection, StopSection
from manyhands.config.tasks import TASKS
from manyhands.core.errors import UserError
from manyhands.data.batch.order import SampleOrder
from manyhands.data.read.files import Findings
from manyhands.data.read.formats import NO_FIELD
from manyhands.data.read.sources import ResolvedSource, explain_unreadable
from manyhands.data.store.store import TokenStore

FIRST_SAMPLES = 65_536  # of the first epoch, whose lengths the plan is told
COUNTED_EPOCHS = 64  # of which each has its own number of steps


@dataclass(frozen=True)
class PreparedData:
    """What the samples of a store add up to. Lengths are in tokens."""

    folder: str  # the token cache on this machine
    digest: str  # names what the samples were made of
    content: str  # names the samples themselves: equal content, equal tokens
    num_samples: int
    samples_per_epoch: int  # of the first epoch
    num_tokens: int  # of all samples, each once
    num_loss_tokens: int  # of all samples, each once
    max_length: int  # longest sample
    mean_length: float  # of an epoch
    num_validation_samples: int
    num_validation_tokens: int
    num_repeated: int  # validation samples with the very tokens of a training sample
    unread: dict[str, tuple[str, ...]]  # columns that hold something and are not read, by source
    num_dropped: int
    num_truncated: int
    num_split: int
    # Samples that data.too_long, data.min_length and data.deduplicate left out, by key and source
    left_out: dict[str, dict[str, int]]
    # Filled when batch.loss_tokens or batch.packs is asked: steps of each epoch that the run begins, as far as
    # stop.max_steps lets it come.
    steps_of_epochs: tuple[int, ...]
    # (samples, weight) of each source: an epoch takes the samples of each as often as its weight says
    sources: tuple[tuple[int, float], ...]
    # of the samples that the first epoch begins with, in its order: all of it, or some ten thousands
    first_lengths: tuple[int, ...]
    first_labels: tuple[int, ...]  # loss tokens of the same; filled when batch.loss_tokens is asked
    as_given: bool  # samples keep their order, also in packs
    num_documents: int = 1  # of a sample
    shared: dict[str, Any] | None = None  # fields of this class as they are where each prompt is computed once
    num_images: int = 0  # of the training samples, each once
    num_validation_images: int = 0
    max_image_units: int = 0  # of one sample
    max_units_per_token: float = 0.0  # of one sample
    mean_image_units: float = 0.0  # of a sample of an epoch
    max_image_tokens: int = 0  # of one sample
    largest_id: int = -1  # of all tokens but the placeholders of images


def summarize(store: TokenStore, seed: int, batch: BatchSection, pack_tokens: int, stop: StopSection) -> PreparedData:
    """What the samples of a store add up to. Raises UserError where the weights leave none."""
    train, validation, meta = store.train, store.validation, store.meta
    varies = batch.loss_tokens is not None or batch.packs is not None
    try:
        order = store.order_samples(
            seed,
            batch_samples=None if varies else 1,
            batch_loss_tokens=batch.loss_tokens,
            batch_packs=batch.packs,
            pack_tokens=pack_tokens,
        )
    except ValueError as error:
        raise UserError(
            "no sample would be trained",
            where="data.train",
            why=str(error),
            fix="raise the weights, or give more samples",
        ) from error
    first = order.samples_of_epoch(0)[:FIRST_SAMPLES]
    weighted = [
        (source["weight"] * source["num_tokens"], source["weight"] * source["num_samples"])
        for source in meta["sources"]
    ]
    num_tokens, num_samples = (sum(column) for column in zip(*weighted, strict=True))
    return PreparedData(
        folder=str(store.folder),
        digest=store.digest,
        content=store.content,
        num_samples=train.num_samples,
        samples_per_epoch=order.samples_in_epoch(0),
        num_tokens=int(train.lengths.sum(dtype=np.int64)),
        num_loss_tokens=int(train.num_loss_tokens.sum(dtype=np.int64)),
        max_length=int(max(train.lengths.max(), validation.lengths.max(initial=0))),
        mean_length=num_tokens / num_samples,
        num_validation_samples=validation.num_samples,
        num_validation_tokens=int(validation.lengths.sum(dtype=np.int64)),
        num_repeated=meta["num_repeated"],
        unread={source["name"]: tuple(source["unread"]) for source in meta["sources"] if source["unread"]},
        num_dropped=meta["num_dropped"],
        num_truncated=meta["num_truncated"],
        num_split=meta["num_split"],
        left_out=count_left_out(meta["sources"]),
        steps_of_epochs=_steps_of_epochs(stop, order) if varies else (),
        sources=tuple((source["num_samples"], source["weight"]) for source in meta["sources"]),
        as_given=order.as_given,
        first_lengths=tuple(train.lengths[first].tolist()),
        first_labels=tuple(train.num_loss_tokens[first].tolist()) if batch.loss_tokens is not None else (),
        largest_id=meta["largest_id"],
        num_documents=TASKS[meta["task"]].num_documents,
        shared=_measure_shared(store, first),
        **_sum_images(store),
    )


def _measure_shared(store: TokenStore, first: np.ndarray) -> dict[str, Any] | None:
    """None for a store of single documents."""
    if store.train.num_shared is None:
        return None
    shared = store.share_prompts()
    train, validation = shared.train.lengths, shared.validation.lengths
    return {
        "num_tokens": int(train.sum(dtype=np.int64)),
        "max_length": int(max(train.max(), validation.max(initial=0))),
        "mean_length": float(np.average(train, weights=np.array(store.source_weights)[shared.train.sources])),
        "num_validation_tokens": int(validation.sum(dtype=np.int64)),
        "first_lengths": tuple(train[first].tolist()),
    }


def _sum_images(store: TokenStore) -> dict[str, Any]:
    """What a plan needs to know of images; {} for a store without."""
    train, validation = store.train, store.validation
    if train.num_images is None or train.image_units is None or train.image_tokens is None:
        return {}
    weights = np.array(store.source_weights)[train.sources]
    sets = [train] + [validation] * bool(validation.num_samples)
    return {
        "num_images": int(train.num_images.sum()),
        "num_validation_images": sum(int(each.num_images.sum()) for each in sets[1:] if each.num_images is not None),
        "max_image_units": max(int(each.image_units.max()) for each in sets if each.image_units is not None),
        "max_units_per_token": max(
            float((each.image_units / each.lengths).max()) for each in sets if each.image_units is not None
        ),
        "mean_image_units": float((train.image_units * weights).sum() / weights.sum()),
        "max_image_tokens": max(int(each.image_tokens.max()) for each in sets if each.image_tokens is not None),
    }


LEFT_OUT = {
    "num_too_long": "data.too_long",
    "num_too_short": "data.min_length",
    "num_duplicates": "data.deduplicate",
    "num_bad_images": "data.bad_images",
}


def count_left_out(sources: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """{key: {source: samples that the key has left out}} of ``meta["sources"]``, without zeros."""
    found = {
        key: {source["name"]: source[name] for source in sources if source.get(name)} for name, key in LEFT_OUT.items()
    }
    return {key: counts for key, counts in found.items() if counts}


def _steps_of_epochs(stop: StopSection, order: SampleOrder) -> tuple[int, ...]:
    """Steps of the epochs that the run begins, each of which has its own, as its samples come in another order; of the
    first ``COUNTED_EPOCHS`` alone if there are more: to lay out thousands of epochs takes minutes.
    """
    steps: list[int] = []
    left = stop.max_steps or math.inf
    while len(steps) < min(stop.epochs, COUNTED_EPOCHS) and left >= 0:
        steps.append(order.steps_per_epoch(len(steps)))
        left -= steps[-1]
    return tuple(steps)


@dataclass
class Outcome:
    """What became of the rows of one part; travels between processes as JSON."""

    num_samples: int = 0
    num_tokens: int = 0
    num_truncated: int = 0  # rows cut at max_length
    num_split: int = 0  # documents that became several rows
    num_straddling_tokens: int = 0  # tokens across the border of a trained span
    num_rows_with_markers: int = 0  # rows whose content spells an added token
    num_rows_with_placeholders: int = (
        0  # rows whose images, videos or audio are left out, but not the marks of where they stood
    )
    num_bad_images: int = 0  # rows left out for an image
    num_too_long: int = 0  # rows dropped for more tokens than max_length
    num_too_short: int = 0  # rows dropped for fewer tokens than min_length
    longest: int = 0  # tokens of the longest row that was too long
    largest_id: int = -1  # of the tokens of all samples, but for placeholders of images
    formats: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # columns that hold something and are not read
    left_out: list[str] = field(default_factory=list)  # those of data.ignore
    unreadable: Findings = field(default_factory=Findings)
    refused: Findings = field(default_factory=Findings)
    too_long: Findings = field(default_factory=Findings)
    bad_images: Findings = field(default_factory=Findings)

    COUNTS: ClassVar = (
        "num_truncated",
        "num_split",
        "num_straddling_tokens",
        "num_rows_with_markers",
        "num_rows_with_placeholders",
        "num_too_long",
        "num_too_short",
        "num_bad_images",
    )  # what the store's description holds

    def to_meta(self) -> dict[str, Any]:
        """What a store remembers of it, once there are no faults."""
        return {
            name: getattr(self, name)
            for name in (
                *("num_samples", "num_tokens", "largest_id", *self.COUNTS),
                *("formats", "notes", "unread", "left_out"),
            )
        }

    def write(self, path: Path) -> None:
        path.write_bytes(TypeAdapter(Outcome).dump_json(self))

    @staticmethod
    def read(path: Path) -> Outcome:
        return TypeAdapter(Outcome).validate_json(path.read_bytes())

    def add(self, other: Outcome) -> None:
        """Takes in the part that follows."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Findings):
                mine.extend(value)
            elif isinstance(mine, list):
                mine += [entry for entry in value if entry not in mine]
            else:
                setattr(self, name, max(mine, value) if name in ("longest", "largest_id") else mine + value)

    def explain_faults(self, source: ResolvedSource, task: str, data: DataSection) -> list[UserError]:
        """One error with up to 20 faults of the rows for each kind, what cannot be read at all before what cannot be
        trained; where there are none and no sample is left either, why."""
        where, max_length, trains = source.path, data.max_length, TASKS[task]
        divides = ", split to divide texts" if trains.mixes else ", split to make several samples of each"
        divides *= trains.takes_text
        name_columns = "name the columns in data.fields, choose another data.format, or "
        lacks_fields = any(reason.startswith(NO_FIELD) for reason in self.refused.faults)
        faults = [
            explain_unreadable(self.unreadable, where),
            self.refused.make_error(
                "{n} rows cannot be trained",
                where=where,
                fix=f"{name_columns * lacks_fields}correct or remove these rows",
            ),
            self.bad_images.make_error(
                "images of {n} rows cannot be used",
                where=where,
                fix="correct or remove these rows, or set data.bad_images: skip to leave them out",
            )
            if data.bad_images == "refuse"
            else None,
            self.too_long.make_error(
                "{n} rows are longer than data.max_length",
                where=where,
                why=f"data.max_length is {max_length:,} tokens and data.too_long is {source.too_long}"
                f"{', which cannot divide conversations' * (source.too_long == 'split')}; the longest row has "
                f"{self.longest:,} tokens",
                fix=f"set data.too_long to truncate to cut them, drop to leave them out"
                f"{divides * (source.too_long == 'error')}, or raise data.max_length",
            ),
        ]
        errors = [fault for fault in faults if fault is not None]
        if errors or self.num_samples:
            return errors
        if self.num_bad_images:
            return [
                UserError(
                    "no row is left",
                    where=where,
                    why=f"{self.num_bad_images:,} rows have images that cannot be used",
                    fix="correct these rows",
                    details=self.bad_images.shown,
                )
            ]
        if self.num_too_long or self.num_too_short:
            return [
                UserError(
                    "no row is left",
                    where=where,
                    why=f"{self.num_too_long:,} rows are longer than data.max_length = {max_length:,} tokens and "
                    f"{self.num_too_short:,} are shorter than data.min_length = {data.min_length:,}",
                    fix="change these limits, or set data.too_long: truncate",
                )
            ]
        return [UserError("the data holds no rows", where=where, fix="give a file with at least one row")]
