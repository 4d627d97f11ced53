"""What the samples of a store add up to: all that a plan needs to know of them. Knows no model and no plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.order import SampleOrder
from manyhands.data.store import TokenStore

FIRST_SAMPLES = 65_536  # of the first epoch, whose lengths the plan is told
MAX_COUNTED_EPOCHS = 100_000


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
    # Filled when batch.loss_tokens is asked: steps of each epoch the run begins, as far as stop.max_steps lets it come.
    steps_of_epochs: tuple[int, ...]
    # (samples, weight) of each source: an epoch takes the samples of each as often as its weight says
    sources: tuple[tuple[int, float], ...]
    # of the samples that the first epoch begins with, in its order: all of it, or some ten thousands
    first_lengths: tuple[int, ...]
    first_labels: tuple[int, ...]  # loss tokens of the same; filled when batch.loss_tokens is asked


def summarize(config: RunConfig, store: TokenStore) -> PreparedData:
    """What the samples of a store add up to. Raises UserError where the weights leave none."""
    train, validation, meta = store.train, store.validation, store.meta
    try:
        order = store.order_samples(
            config.seed,
            batch_samples=None if config.batch.loss_tokens else 1,
            batch_loss_tokens=config.batch.loss_tokens,
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
        steps_of_epochs=_steps_of_epochs(config, order) if config.batch.loss_tokens is not None else (),
        sources=tuple((source["num_samples"], source["weight"]) for source in meta["sources"]),
        first_lengths=tuple(train.lengths[first].tolist()),
        first_labels=tuple(train.num_loss_tokens[first].tolist()) if config.batch.loss_tokens is not None else (),
    )


def _steps_of_epochs(config: RunConfig, order: SampleOrder) -> tuple[int, ...]:
    """Steps of each epoch that the run begins: each has its own, as its samples reach ``batch.loss_tokens`` in another
    order.
    """
    steps: list[int] = []
    left = config.stop.max_steps or math.inf
    while len(steps) < config.stop.epochs and left >= 0:
        if len(steps) == MAX_COUNTED_EPOCHS:
            raise UserError(
                f"stop.epochs: {config.stop.epochs:g} is more epochs than can be counted",
                where="stop.epochs",
                why=f"with batch.loss_tokens each epoch has its own number of steps; up to "
                f"{MAX_COUNTED_EPOCHS:,} epochs are counted",
                fix="set stop.max_steps, or fewer epochs",
            )
        steps.append(order.steps_per_epoch(len(steps)))
        left -= steps[-1]
    return tuple(steps)
