"""From layouts to tensors on a device, prepared ahead. The only file of this room that knows torch; knows no model.

One thread asks for the batches (of this process or of others, see workers.py), pins them and copies them on a stream of
its own, so that the device receives micro-batch k + 1 while it computes micro-batch k. For names and shapes see
collate.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from manyhands.data.collate import Arrays, Samples, Shape, collate_samples
from manyhands.data.pack import Layout
from manyhands.data.prefetch import Ahead

NUM_PREFETCHED = 2  # double buffers: one is copied while the other is computed

Batch = dict[str, Any]  # name -> tensor, or int
Collate = Callable[[Iterable[np.ndarray]], Generator[Arrays, None, None]]  # units of samples -> their batches, in order


def collate(sample_set: Samples, numbers: np.ndarray, shape: Shape) -> Batch:
    """One micro-batch as tensors on the CPU; see ``collate_samples``."""
    return _to_tensors(collate_samples(sample_set, numbers, shape))


def collate_here(sample_set: Samples, shape: Shape) -> Collate:
    """Collation in the thread that reads ahead."""
    return lambda units: (collate_samples(sample_set, rows, shape) for rows in units)


def iterate(
    layouts: Iterable[Layout],
    rank: int,
    device: torch.device,
    collate_units: Collate,
    *,
    num_prefetched: int = NUM_PREFETCHED,
) -> Generator[tuple[Layout, MicroBatches], None, None]:
    """For each layout, (layout, the micro-batches of one rank on ``device``); what is left of a layout is skipped.

    ``layouts`` may be lazy: the thread reads it ahead, ``num_prefetched`` micro-batches and across layouts. What fails
    there is raised here. Closing the generator, or dropping it, ends the thread.
    """
    ahead = Ahead(_load(layouts, rank, device, collate_units), num_prefetched)
    try:
        while True:
            waited_before = ahead.waited_s
            if (item := ahead.get()) is None:
                return
            micro_batches = MicroBatches(item, ahead, device, waited_before)
            yield item[0], micro_batches
            for _ in micro_batches:
                pass
    finally:
        ahead.close()


_Loaded = tuple[Layout, Batch, Any]  # the event after which the batch has arrived on its device; None on the CPU


class MicroBatches(Iterator[Batch]):
    """The micro-batches of one layout; ``first`` has already been taken."""

    def __init__(self, first: _Loaded, ahead: Ahead[_Loaded], device: torch.device, waited_before: float) -> None:
        self._next: _Loaded | None = first
        self._ahead, self._device, self._waited_before = ahead, device, waited_before
        self._left = first[0].num_micro_batches

    def waited_s(self) -> float:
        """Seconds that were spent waiting for these micro-batches so far."""
        return self._ahead.waited_s - self._waited_before

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        item = self._next if self._next is not None else self._ahead.get()
        assert item is not None, "a layout brings all its micro-batches"
        self._next = None
        self._left -= 1
        _, batch, arrived = item
        if arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)  # the device waits, not the host
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(stream)
        return batch


def _load(
    layouts: Iterable[Layout], rank: int, device: torch.device, collate_units: Collate
) -> Generator[_Loaded, None, None]:
    """Runs in the thread."""
    coming: deque[Layout] = deque()  # one entry a micro-batch that has been asked for

    def units() -> Iterator[np.ndarray]:
        for layout in layouts:
            for rows in layout.of_rank(rank):
                coming.append(layout)
                yield rows

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # of this thread; pinning would use the first device otherwise
    stream = torch.cuda.Stream(device) if on_gpu else None
    batches = collate_units(units())
    try:
        for arrays in batches:
            batch = _to_tensors(arrays)
            yield coming.popleft(), *(_send(batch, device, stream) if stream is not None else (batch, None))
    finally:
        batches.close()


def _send(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """Copies from pinned memory on ``stream``. torch reuses a pinned buffer only after the copy from it is done."""
    with torch.cuda.stream(stream):
        sent = {
            name: value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return sent, arrived


def _to_tensors(arrays: Arrays) -> Batch:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()}
