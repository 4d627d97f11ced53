"""A snapshot after every step in host memory that outlives the rank (``core/segments.py``): what a checkpoint holds, as
this rank has it, for the same rank of a launch that is started again in the same layout. No files, no other ranks.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.manifest import TensorEntry
from manyhands.checkpoint.staging import pin, unpin
from manyhands.checkpoint.tensors import checkpoint_tensors, create_optimizer_state, describe, trained_parameters
from manyhands.core.holding import local
from manyhands.core.segments import Segment

ALIGNMENT = 64  # bytes; of each tensor, for every dtype
META_BYTES = 2**20  # beside the names and shapes of the tensors
_LENGTH = struct.Struct("<Q")


class SnapshotWriter:
    """Copies the state into the older slot. On a GPU the copies run beside the training, from pinned memory; whoever
    changes the tensors calls what ``begin`` returns first.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self._segment, self._device = segment, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: torch.Tensor | None = None
        self._pinning: Future[None] | None = None
        self._layout: _Layout | None = None
        self._slots: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # the memory of each, and its tensors

    @property
    def is_copied(self) -> bool:
        """Whether the newest snapshot has been copied to another node, or none is copied any more."""
        return self._segment.is_copied()

    def begin(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], key: str) -> Callable[[], None]:
        """Starts a snapshot; the function returned completes it. OSError where there is no room for one."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        signature = _sign(tensors, parts)
        if self._layout is None or self._layout.signature != signature:
            self._layout, self._slots = _Layout.of(signature, parts), {}
        meta = self._layout.describe(state, key)
        if len(meta) > self._layout.begin:
            self._layout, self._slots = _Layout.of(signature, parts, len(meta)), {}
            meta = self._layout.describe(state, key)
        if self._segment.slot_bytes < self._layout.end:
            self._unpin()
            self._slots = {}
            self._segment.make_room(self._layout.end)
        self.pin()
        slot = self._segment.oldest()
        memory = torch.frombuffer(self._segment.clear(slot), dtype=torch.uint8)
        if slot not in self._slots:
            self._slots[slot] = memory, self._layout.place(memory, parts)
        memory[: len(meta)].numpy()[:] = memoryview(meta)
        arrived, end = self._copy(self._slots[slot][1], [*parts.values()]), self._layout.end

        def commit() -> None:
            if arrived is not None:
                arrived.synchronize()
            self._segment.commit(slot, step, end)

        return commit

    def forget_after(self, step: int) -> None:
        """Clears snapshots of later steps."""
        for later, slot in self._segment.committed().items():
            if later > step:
                self._segment.clear(slot).release()

    def pin_ahead(self) -> None:
        """Begins to pin what there is already, beside whatever comes before the first snapshot."""
        if self._stream is not None and self._segment.slot_bytes:
            thread = ThreadPoolExecutor(1)
            self._pinning = thread.submit(self._pin)
            thread.shutdown(wait=False)

    def pin(self) -> None:
        """Both slots, once. OSError where that cannot be: from other memory copies would hold up the training."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.result()
        elif self._stream is not None and self._pinned is None:
            self._pin()

    def _copy(self, to: list[torch.Tensor], parts: list[torch.Tensor]) -> torch.cuda.Event | None:
        if self._stream is None:
            torch._foreach_copy_(to, parts)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(to, parts, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def _pin(self) -> None:
        memory = torch.frombuffer(self._segment.slots(), dtype=torch.uint8)
        if status := pin(memory, self._device):
            raise OSError(0, f"the memory cannot be pinned (CUDA error {status})")
        self._pinned = memory

    def _unpin(self) -> None:
        """Before the slots are made anew: their mapping must not go while it is registered."""
        if self._pinning is not None:
            self.pin()
        if self._pinned is not None:
            unpin(self._pinned, self._device)
            self._pinned = None


@dataclass(frozen=True)
class _Layout:
    """Where in a slot the tensors lie, which stays from one snapshot to the next: they begin after room for the JSON,
    whose state grows a little.
    """

    signature: list[Any]
    spans: list[int]
    begin: int
    end: int
    fixed: str  # of the JSON

    @staticmethod
    def of(signature: list[Any], parts: dict[str, torch.Tensor], meta_bytes: int = 0) -> _Layout:
        entries = {name: {"shape": shape, "dtype": dtype} for name, shape, _, dtype in signature}
        # No offset has more digits.
        least = len(json.dumps({"entries": entries, "parts": [(name, 2**62, *rest) for name, *rest in signature]}))
        begin = end = _align(_LENGTH.size + max(least, meta_bytes) + META_BYTES)
        spans = []
        for part in parts.values():
            spans.append(end)
            end += _align(part.numel() * part.element_size())
        shapes = {name: (span, shape, dtype) for (name, _, shape, dtype), span in zip(signature, spans, strict=True)}
        return _Layout(signature, spans, begin, end, json.dumps({"entries": entries, "parts": shapes})[1:])

    def describe(self, state: dict[str, Any], key: str) -> bytes:
        """The JSON in front of the tensors, after its length."""
        text = f"{json.dumps({'key': key, 'state': state})[:-1]}, {self.fixed}".encode()
        return _LENGTH.pack(len(text)) + text

    def place(self, memory: torch.Tensor, parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in the memory of a slot, in the order of ``parts``."""
        return [_view(memory, span, part) for span, part in zip(self.spans, parts.values(), strict=True)]


def _sign(tensors: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> list[Any]:
    """What tells one layout from another: names, full shapes, this rank's shapes, dtypes."""
    found = zip(tensors.items(), parts.values(), strict=True)
    return [
        (name, tuple(full.shape), tuple(part.shape), str(part.dtype).removeprefix("torch."))
        for (name, full), part in found
    ]


@dataclass(frozen=True)
class Snapshot:
    """One that was found; its tensors share the segment's memory."""

    step: int
    state: dict[str, Any]
    entries: dict[str, TensorEntry]  # of the full tensors
    parts: dict[str, torch.Tensor]  # this rank's

    @staticmethod
    def read(segment: Segment, step: int) -> Snapshot:
        """KeyError where the segment has none of this step."""
        data = segment.read(segment.committed()[step])
        meta = _meta(data)
        memory = torch.frombuffer(data, dtype=torch.uint8)
        parts = {}
        for name, (begin, shape, dtype) in meta["parts"].items():
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            parts[name] = _view(memory, begin, like)
        entries = {name: TensorEntry(**entry) for name, entry in meta["entries"].items()}
        return Snapshot(step, meta["state"], entries, parts)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Loads parameters and optimizer states in place, bit for bit; returns the state."""
        create_optimizer_state(optimizer, trained_parameters(model), self.entries)
        tensors = checkpoint_tensors(model, optimizer)
        if describe(tensors) != self.entries:
            raise ValueError("the snapshot is of another model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(tensor).copy_(self.parts[name])
        return self.state


def states_in(segment: Segment, key: str) -> dict[int, dict[str, Any]]:
    """States of the segment's whole snapshots that were taken under the same ``key``, by step."""
    found = {}
    for step, slot in segment.committed().items():
        with contextlib.suppress(ValueError, KeyError, struct.error):  # what cannot be read is no snapshot
            meta = _meta(segment.read(slot))
            if meta["key"] == key:
                found[step] = meta["state"]
    return found


def _view(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _meta(data: memoryview) -> dict[str, Any]:
    (length,) = _LENGTH.unpack_from(data)
    meta: dict[str, Any] = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    return meta


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
