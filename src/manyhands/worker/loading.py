"""Who collates this rank's batches: the thread that reads ahead, or processes; and in which shape."""

from __future__ import annotations

import functools
import os
import time
from typing import Literal

import numpy as np
import torch

from manyhands.data.batches import Collate, collate_here
from manyhands.data.collate import BatchShape, BatchWorkers, collate_samples, open_store_samples
from manyhands.plan.efficiency import pack_tile
from manyhands.worker.rank import Rank

SetName = Literal["train", "validation"]

# The fastest rank measured, a model of 135 million parameters on an H200, trains some 0.3 million tokens/s.
ENOUGH_TOKENS_PER_S = 4_000_000  # so many leave the thread idle nine tenths of the time
TRIAL_ROWS = 256
MAX_AUTO_WORKERS = 8


def open_workers(rank: Rank) -> None:
    """Starts the processes that the run asks for, once; they serve training and every evaluation until they are closed.

    ``data.workers: auto`` tries how fast this process collates the first rows in their order: at
    ``ENOUGH_TOKENS_PER_S`` or faster one thread does it, below that as many processes as make up for it, at most the
    rank's share of the cores. On a CPU, where processes would take cores from the training itself, auto is always the
    thread.
    """
    asked = rank.config.data.workers
    num_workers = count_workers(measure_collation(rank), _spare_cores(rank)) if asked == "auto" else asked
    if num_workers:
        rank.workers = BatchWorkers(functools.partial(open_store_samples, rank.store.folder), num_workers)
        rank.say(f"batches: {num_workers} processes a rank collate ahead")


def close_workers(rank: Rank) -> None:
    if rank.workers is not None:
        rank.workers.close()
        rank.workers = None


def count_workers(tokens_per_s: float, spare_cores: int) -> int:
    """0 where one thread is fast enough."""
    if tokens_per_s >= ENOUGH_TOKENS_PER_S:
        return 0
    return min(MAX_AUTO_WORKERS, max(0, spare_cores), int(np.ceil(ENOUGH_TOKENS_PER_S / max(tokens_per_s, 1.0))))


def measure_collation(rank: Rank) -> float:
    """Tokens/s at which this process collates the first rows of the run."""
    rows = rank.order.rows(0, 0)[:TRIAL_ROWS]
    begin = time.perf_counter()
    collate_samples(rank.store.train, rows, shape_of(rank))
    return float(rank.store.train.lengths[rows].sum()) / (time.perf_counter() - begin)


def collation(rank: Rank, name: SetName) -> Collate:
    """How the batches of a set are made."""
    if rank.workers is not None:
        return functools.partial(rank.workers.collate, name, shape_of(rank, name))
    sample_set = rank.store.train if name == "train" else rank.store.validation
    return collate_here(sample_set, shape_of(rank, name))


def shape_of(rank: Rank, name: SetName = "train") -> BatchShape:
    """Packs are padded to whole tiles on a GPU and where blocks are compiled; nothing is on a CPU otherwise.

    Compiled blocks get batches that differ in as little as possible: in the number of tokens, and not even in that
    where all rows have one length.
    """
    plan = rank.plan
    if not plan.packing:
        return BatchShape(packed=False)
    tile = pack_tile(plan)
    if not plan.layout.compile:
        return BatchShape(packed=True, tile=tile)
    sets = (rank.store.train.lengths, rank.store.validation.lengths)
    longest = max(int(lengths.max()) for lengths in sets if len(lengths))
    if plan.layout.pack_tokens is None:
        return BatchShape(packed=True, tile=tile, longest=longest)
    return BatchShape(
        packed=True,
        tokens=plan.layout.pack_tokens,
        longest=longest,
        documents=plan.layout.pack_tokens // longest,
        row_length=longest,
    )


def _spare_cores(rank: Rank) -> int:
    """Cores of this machine for each of its GPUs, less the rank's own two threads; none on a CPU."""
    if rank.plan.layout.device == "cpu":
        return 0
    return len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()) - 2
