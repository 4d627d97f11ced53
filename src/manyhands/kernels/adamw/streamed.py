"""The update of parts in host memory: a slice at a time is copied to the device, updated there and copied back, while
the next one comes in and the one before leaves.

The arithmetic is that of the update it is given, and so are the random bits: each slice has a key of its own that says
where in the parameter it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from manyhands.core.limits import UPDATE_SLICE, UPDATE_SLICES_ON_DEVICE
from manyhands.kernels.adamw.reference import WORD, AdamWTensors, Rates, Update

READ, WRITTEN = ("weight", "gradient", "exp_avg", "exp_avg_sq"), ("weight", "exp_avg", "exp_avg_sq")


@dataclass
class Slot:
    """Memory on the device for one slice; ``stored`` is recorded when the last one that was in it is back on the
    host.
    """

    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    stored: torch.cuda.Event | None = None


class StreamedUpdate:
    """An ``Update`` whose ``row`` and ``factor`` are on ``device``; of the other tensors those in host memory are
    streamed, which is asynchronous if they are pinned. ``finish`` comes before the host reads them.

    With a CPU as ``device`` slices are copied as well, which gains nothing: so are they tested.
    """

    def __init__(
        self,
        update: Update,
        device: torch.device,
        slice_elements: int = UPDATE_SLICE,
        num_slots: int = UPDATE_SLICES_ON_DEVICE,
    ) -> None:
        self._update, self._device, self._size = update, device, slice_elements
        self._slots = [Slot() for _ in range(num_slots)]
        self._next = 0
        self._keys: dict[torch.Tensor, torch.Tensor] = {}
        on_gpu = device.type == "cuda"
        self._in: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self._out: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None

    def __call__(self, part: AdamWTensors, rates: Rates, factor: torch.Tensor | None) -> None:
        num_elements = part.weight.numel()
        for number, start in enumerate(range(0, num_elements, self._size)):
            some = slice(start, min(start + self._size, num_elements))
            held = {name: getattr(part, name)[some] for name in READ}
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            moved = self._fetch(slot, {name: tensor for name, tensor in held.items() if not tensor.is_cuda})
            key = None if part.key is None else self._keys_of(part.key, num_elements)[number]
            copy = None if part.copy is None else part.copy[some]
            self._update(replace(part, **{**held, **moved}, copy=copy, key=key), rates, factor)
            self._store(slot, {held[name]: moved[name] for name in WRITTEN if name in moved})

    def finish(self) -> None:
        """Waits until everything is back in host memory, and frees what the slots held."""
        if self._out is not None:
            self._out.synchronize()
        for slot in self._slots:
            slot.buffers.clear()
            slot.stored = None

    def _fetch(self, slot: Slot, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        targets = {name: self._buffer(slot, name, tensor) for name, tensor in tensors.items()}
        if self._in is not None and slot.stored is not None:
            self._in.wait_event(slot.stored)
        with torch.cuda.stream(self._in):  # type: ignore[arg-type]  # none is the current one
            for name, tensor in tensors.items():
                targets[name].copy_(tensor, non_blocking=True)
        if self._in is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._in)
        return targets

    def _store(self, slot: Slot, tensors: dict[torch.Tensor, torch.Tensor]) -> None:
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):  # type: ignore[arg-type]
            for host, updated in tensors.items():
                host.copy_(updated, non_blocking=True)
        if self._out is not None:
            slot.stored = torch.cuda.Event()
            slot.stored.record(self._out)

    def _buffer(self, slot: Slot, name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = slot.buffers.get((name, tensor.dtype))
        if found is None:
            found = torch.empty(self._size, dtype=tensor.dtype, device=self._device)
            slot.buffers[name, tensor.dtype] = found
            if self._in is not None:  # what is queued may still use this memory
                self._in.wait_stream(torch.cuda.current_stream(self._device))
        return found[: tensor.numel()]

    def _keys_of(self, key: torch.Tensor, num_elements: int) -> torch.Tensor:
        """One row a slice on the device, made once: ``AdamWTensors.key`` with the index of the slice's first
        element.
        """
        if key not in self._keys:
            low, high, first_low, first_high = key.cpu().long().unbind(0)
            first = (first_low & WORD) + (first_high << 32) + torch.arange(0, num_elements, self._size)
            rows = torch.stack([low.expand_as(first), high.expand_as(first), first & WORD, first >> 32], 1)
            self._keys[key] = rows.to(torch.int32).to(self._device)  # the low word wraps, as in ``make_key``
        return self._keys[key]
