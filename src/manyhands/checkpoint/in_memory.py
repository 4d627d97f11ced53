"""A snapshot after every step in host memory that outlives the rank (``core/segments.py``): what a checkpoint holds, as
this rank has it, for the same rank of a launch that is started again in the same layout. No files, no other ranks.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
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
META_BYTES = 2**20  # beside the names and shapes of the tensors: the state grows a little
_LENGTH = struct.Struct("<Q")


class SnapshotWriter:
    """Copies the state into the older slot. On a GPU the copies run beside the training, from pinned memory; whoever
    changes the tensors calls what ``begin`` returns first.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self._segment, self._device = segment, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the newest snapshot has been copied to another node, or none is copied any more."""
        return self._segment.is_copied()

    def begin(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], key: str) -> Callable[[], None]:
        """Starts a snapshot; the function returned completes it. OSError where there is no room for one."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        meta, end = _describe(tensors, parts, state, key)
        if self._segment.slot_bytes < end:
            self._unpin()
            self._segment.make_room(end + META_BYTES)
        self._pin()
        slot = self._segment.oldest()
        memory = torch.frombuffer(self._segment.clear(slot), dtype=torch.uint8)
        memory[: _LENGTH.size + len(meta)].numpy()[:] = memoryview(_LENGTH.pack(len(meta)) + meta)
        arrived = self._copy(memory, parts, end)

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

    def _copy(self, memory: torch.Tensor, parts: dict[str, torch.Tensor], end: int) -> torch.cuda.Event | None:
        spans = _spans(parts, end)
        if self._stream is None:
            for name, part in parts.items():
                _view(memory, spans[name], part).copy_(part)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, part in parts.items():
                _view(memory, spans[name], part).copy_(part, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def _pin(self) -> None:
        """Both slots, once. OSError where that cannot be: from other memory copies would hold up the training."""
        if self._stream is None or self._pinned is not None:
            return
        memory = torch.frombuffer(self._segment.slots(), dtype=torch.uint8)
        if status := pin(memory, self._device):
            raise OSError(0, f"the memory cannot be pinned (CUDA error {status})")
        self._pinned = memory

    def _unpin(self) -> None:
        """Before the slots are made anew: their mapping must not go while it is registered."""
        if self._pinned is not None:
            unpin(self._pinned, self._device)
            self._pinned = None


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


def _describe(
    tensors: dict[str, torch.Tensor], parts: dict[str, torch.Tensor], state: dict[str, Any], key: str
) -> tuple[bytes, int]:
    """The JSON in front, and where the last tensor ends; offsets count from the end, as the front grows."""
    size = sum(_align(part.numel() * part.element_size()) for part in parts.values())
    entries = {name: entry.model_dump(mode="json") for name, entry in describe(tensors).items()}

    def front(end: int) -> bytes:
        spans = _spans(parts, end)
        shapes = {n: (spans[n], tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in parts.items()}
        return json.dumps({"key": key, "state": state, "entries": entries, "parts": shapes}).encode()

    room = _align(_LENGTH.size + len(front(2**62)))  # no offset has more digits
    return front(room + size), room + size


def _spans(parts: dict[str, torch.Tensor], end: int) -> dict[str, int]:
    """Where each part begins, the last one ending at ``end``."""
    begin = end - sum(_align(part.numel() * part.element_size()) for part in parts.values())
    spans = {}
    for name, part in parts.items():
        spans[name] = begin
        begin += _align(part.numel() * part.element_size())
    return spans


def _view(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _meta(data: memoryview) -> dict[str, Any]:
    (length,) = _LENGTH.unpack_from(data)
    meta: dict[str, Any] = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    return meta


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
