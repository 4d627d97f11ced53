"""From layouts to tensors on a device, prepared ahead. The only file of this room that knows torch; knows no model.

One thread asks for the batches (of this process or of others, see collate.py), pins them and copies them on a stream of
its own, so that the device receives micro-batch k + 1 while it computes micro-batch k. For names and shapes see
collate.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from manyhands.data.batch.collate import Arrays, BatchShape, Samples, collate_samples
from manyhands.data.batch.pack import StepLayout
from manyhands.data.images.batch import KEPT, PIXEL_REPEATS, PIXEL_TABLE
from manyhands.data.images.places import HOST_ENTRIES

Item = TypeVar("Item")
THREAD_NAME = "manyhands-batches"


class Prefetcher(Generic[Item]):
    """At most ``num_items`` ahead. ``waited_s``: seconds that ``get`` has waited, from the start."""

    def __init__(self, source: Generator[Item, None, None], num_items: int) -> None:
        self.waited_s = 0.0
        self._source = source
        self._items: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=num_items)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def get(self) -> Item | None:
        """The next item, None at the end; an exception of the generator is raised here."""
        begin = time.monotonic()
        item = self._items.get()
        self.waited_s += time.monotonic() - begin
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Ends the thread, and with it the generator."""
        self._stopped.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    break
            else:
                self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)
        finally:
            self._source.close()  # here, in the thread that ran it

    def _put(self, item: Item | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


NUM_PREFETCHED = 2  # double buffers: one is copied while the other is computed

Batch = dict[str, Any]  # name -> tensor, or int
Collate = Callable[[Iterable[np.ndarray]], Generator[Arrays, None, None]]  # units of samples -> their batches, in order


def collate(sample_set: Samples, numbers: np.ndarray, shape: BatchShape) -> Batch:
    """One micro-batch as tensors on the CPU; see ``collate_samples``."""
    batch = scale_pixels(to_tensors(collate_samples(sample_set, numbers, shape)))
    if shape.images is None:
        return batch
    return batch | {"has_images": len(batch["pixel_values"]) > 0 or KEPT in batch}


def collate_here(sample_set: Samples, shape: BatchShape) -> Collate:
    """Collation in the thread that reads ahead."""
    return lambda units: (collate_samples(sample_set, numbers, shape) for numbers in units)


def iterate(
    layouts: Iterable[StepLayout],
    rank: int,
    device: torch.device,
    collate_units: Collate,
    *,
    num_prefetched: int = NUM_PREFETCHED,
) -> Generator[tuple[StepLayout, MicroBatches], None, None]:
    """For each layout, (layout, the micro-batches of one rank on ``device``); what is left of a layout is skipped.

    ``layouts`` may be lazy: the thread reads it ahead, ``num_prefetched`` micro-batches and across layouts. What fails
    there is raised here. Closing the generator, or dropping it, ends the thread.
    """
    ahead = Prefetcher(_load(layouts, rank, device, collate_units), num_prefetched)
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


_Loaded = tuple[StepLayout, Batch, Any]  # the event after which the batch has arrived on its device; None on the CPU


class MicroBatches(Iterator[Batch]):
    """The micro-batches of one layout; ``first`` has already been taken."""

    def __init__(self, first: _Loaded, ahead: Prefetcher[_Loaded], device: torch.device, waited_before: float) -> None:
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
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(stream)
        return scale_pixels(batch)


def _load(
    layouts: Iterable[StepLayout], rank: int, device: torch.device, collate_units: Collate
) -> Generator[_Loaded, None, None]:
    coming: deque[StepLayout] = deque()  # one entry a micro-batch that has been asked for

    def units() -> Iterator[np.ndarray]:
        for layout in layouts:
            for numbers in layout.of_rank(rank):
                coming.append(layout)
                yield numbers

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # of this thread; pinning would use the first device otherwise
    stream = torch.cuda.Stream(device) if on_gpu else None
    batches = collate_units(units())
    try:
        for arrays in batches:
            batch = to_tensors(arrays)
            if coming[0].has_images is not None:
                batch["has_images"] = coming[0].has_images
            yield coming.popleft(), *(_send(batch, device, stream) if stream is not None else (batch, None))
    finally:
        batches.close()


def _send(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """Copies from pinned memory on ``stream``, but for what the host reads. torch reuses a pinned buffer only after
    the copy from it is done."""
    with torch.cuda.stream(stream):
        sent = {
            name: value.pin_memory().to(device, non_blocking=True)
            if isinstance(value, torch.Tensor) and name not in HOST_ENTRIES
            else value
            for name, value in batch.items()
        }
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return sent, arrived


def scale_pixels(batch: Batch) -> Batch:
    """The batch with ``pixel_values`` float32 in place of bytes. Where the batch is used, not where it waits: a
    quarter of the bytes is copied and kept."""
    if PIXEL_TABLE not in batch:
        return batch
    batch = dict(batch)
    pixels, table, repeats = (batch.pop(name) for name in ("pixel_values", PIXEL_TABLE, PIXEL_REPEATS))
    # an index of 32 bits, in the table of all channels end to end: value v of channel c is entry 256 c + v
    channels = 256 * torch.arange(table.shape[0], dtype=torch.int32, device=pixels.device).reshape(1, -1, 1, 1)
    places = (pixels.to(torch.int32) + channels).flatten()
    scaled = table.flatten().index_select(0, places).reshape(pixels.shape)
    if repeats:
        count, (num_channels, height, width) = pixels.shape[0], pixels.shape[1:]
        scaled = scaled.unsqueeze(2).expand(-1, -1, repeats, -1, -1)
        scaled = scaled.reshape(count, num_channels * repeats * height * width)
    return batch | {"pixel_values": scaled}


def to_tensors(arrays: Arrays, device: torch.device | str = "cpu") -> Batch:
    """The arrays as tensors on ``device``; other values as they are."""
    return {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on ``device``."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
