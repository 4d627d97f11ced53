"""From row ids to tensors, prepared ahead by one background thread. The only file of this room that knows torch; knows no model.

Names in a batch (T: tokens of all rows laid end to end; B x L: rows x longest row):

| name | packed | not packed |
|---|---|---|
| input_ids | (1, T) int64 | (B, L) int64, padded on the right with 0 |
| position_ids | (1, T) int64, from 0 in every row | (B, L) int64 |
| targets | (1, T) int64: the next token of the same row where that is trained, else -100 | (B, L) int64 |
| target_rows | (m) int64: flat positions that have a target; known here, they spare the GPU a wait | likewise |
| cu_seq_lens | (rows + 1) int32: where rows begin, and T | absent |
| max_length | int: longest row | absent |

Not packed needs no attention mask: attention is causal and the padding stands behind every row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from manyhands.data.pack import Layout
from manyhands.data.store import RowSet

IGNORED = -100
PAD_ID = 0
NUM_PREFETCHED = 2


def collate(
    row_set: RowSet, rows: Sequence[int] | np.ndarray, *, packed: bool, pad_to: int | None = None, pad_documents: int | None = None
) -> dict[str, Any]:
    """One micro-batch on the CPU; no rows at all give one row of two padding tokens without targets.

    ``pad_to`` gives every batch the same shape, as torch.compile wants it: packed, T becomes ``pad_to`` by one more
    document that is ignored, ``cu_seq_lens`` is lengthened by repeating T (to ``pad_documents + 2`` entries, or to the
    next power of two above its own length, at least 16), and ``max_length`` is ``pad_to``; not packed, L becomes
    ``pad_to``. Raises ValueError where the rows do not fit.
    """
    parts = [row_set.row(int(row)) for row in rows]
    if pad_to is not None and pad_to < 2:
        raise ValueError("pad_to must be at least 2")
    return _collate_packed(parts, pad_to, pad_documents) if packed else _collate_padded(parts, pad_to)


def _collate_packed(parts: list[tuple[np.ndarray, np.ndarray]], pad_to: int | None, pad_documents: int | None) -> dict[str, Any]:
    lengths = [len(ids) for ids, _ in parts]
    num_tokens = sum(lengths)
    total = pad_to if pad_to is not None else num_tokens or 2
    if num_tokens > total:
        raise ValueError(f"{num_tokens} tokens do not fit into {total}")
    input_ids, positions, targets = _blank(1, total)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    for start, (ids, trained) in zip(starts, parts, strict=False):
        _put_row(input_ids[0], positions[0], targets[0], int(start), ids, trained)
    # Padding keeps position 0: positions beyond the longest row could outgrow a table, or change a dynamic rotary scale.
    bounds = starts if num_tokens == total else np.append(starts, np.int32(total))
    max_length = max([*lengths, total - num_tokens])
    if pad_to is not None:
        max_length = pad_to
        num_bounds = pad_documents + 2 if pad_documents is not None else max(16, 1 << len(bounds).bit_length())
        if len(bounds) > num_bounds:
            raise ValueError(f"{len(parts)} rows, but pad_documents is {pad_documents}")
        bounds = np.concatenate([bounds, np.full(num_bounds - len(bounds), total, dtype=np.int32)])
    batch = _to_tensors(input_ids, positions, targets)
    return {**batch, "cu_seq_lens": torch.from_numpy(bounds), "max_length": max_length}


def _collate_padded(parts: list[tuple[np.ndarray, np.ndarray]], pad_to: int | None) -> dict[str, Any]:
    longest = max((len(ids) for ids, _ in parts), default=2)
    width = longest if pad_to is None else pad_to
    if longest > width:
        raise ValueError(f"a row of {longest} tokens does not fit into {width}")
    input_ids, positions, targets = _blank(max(1, len(parts)), width)
    positions[:] = np.arange(width)
    for index, (ids, trained) in enumerate(parts):
        _put_row(input_ids[index], positions[index], targets[index], 0, ids, trained)
    return _to_tensors(input_ids, positions, targets)


def _blank(num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (num_rows, width)
    return np.full(shape, PAD_ID, dtype=np.int64), np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)


def _put_row(input_ids: np.ndarray, positions: np.ndarray, targets: np.ndarray, start: int, ids: np.ndarray, trained: np.ndarray) -> None:
    end = start + len(ids)
    input_ids[start:end] = ids
    positions[start:end] = np.arange(len(ids))
    targets[start : end - 1] = np.where(trained[1:], ids[1:], IGNORED)


def _to_tensors(input_ids: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(positions),
        "targets": torch.from_numpy(targets),
        "target_rows": torch.from_numpy(np.flatnonzero(targets != IGNORED)),
    }


def iterate(
    row_set: RowSet,
    layouts: Iterable[Layout],
    rank: int,
    device: torch.device,
    packed: bool,
    *,
    pad_to: int | None = None,
    pad_documents: int | None = None,
    num_prefetched: int = NUM_PREFETCHED,
) -> Generator[tuple[Layout, Iterator[dict[str, Any]]], None, None]:
    """For each layout, (layout, the micro-batches of one rank on ``device``); what is left of a layout is skipped.

    One thread lays out and collates ahead (``layouts`` may be lazy), ``num_prefetched`` micro-batches and across
    layouts, into pinned memory where the device is a GPU; the copy to the device does not block. An exception in the
    thread is raised here. Closing the generator, or dropping it, ends the thread.
    """

    def produce() -> Iterator[tuple[Layout, dict[str, Any]]]:
        for layout in layouts:
            for rows in layout.of_rank(rank):
                batch = collate(row_set, rows, packed=packed, pad_to=pad_to, pad_documents=pad_documents)
                yield layout, _map_tensors(batch, torch.Tensor.pin_memory) if device.type == "cuda" else batch

    ahead = _Ahead(produce(), num_prefetched)
    try:
        while (item := ahead.get()) is not None:
            micro_batches = _MicroBatches(item, ahead, device)
            yield item[0], micro_batches
            for _ in micro_batches:
                pass
    finally:
        ahead.close()


class _MicroBatches(Iterator[dict[str, Any]]):
    """The micro-batches of one layout; ``first`` has already been taken."""

    def __init__(self, first: tuple[Layout, dict[str, Any]], ahead: _Ahead, device: torch.device) -> None:
        self._next: tuple[Layout, dict[str, Any]] | None = first
        self._ahead, self._device = ahead, device
        self._left = first[0].num_micro_batches

    def __next__(self) -> dict[str, Any]:
        if self._left == 0:
            raise StopIteration
        item = self._next if self._next is not None else self._ahead.get()
        assert item is not None, "a layout brings all its micro-batches"
        self._next = None
        self._left -= 1
        if self._device.type == "cpu":
            return item[1]
        return _map_tensors(item[1], lambda tensor: tensor.to(self._device, non_blocking=True))


class _Ahead:
    """Runs an iterator in a daemon thread, at most ``num_items`` items ahead; its exception is raised by ``get``."""

    def __init__(self, source: Iterator[tuple[Layout, dict[str, Any]]], num_items: int) -> None:
        self._source = source
        self._items: queue.Queue[tuple[Layout, dict[str, Any]] | BaseException | None] = queue.Queue(maxsize=num_items)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-batches", daemon=True)
        self._thread.start()

    def get(self) -> tuple[Layout, dict[str, Any]] | None:
        """The next item, None at the end."""
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)

    def _put(self, item: tuple[Layout, dict[str, Any]] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def _map_tensors(batch: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
