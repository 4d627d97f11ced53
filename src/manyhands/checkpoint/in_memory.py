"""A snapshot after every step in host memory that outlives the rank (``core/segments.py``): what a checkpoint holds, as
this rank has it, for the same rank of a launch that is started again in the same layout. No files, no other ranks.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.manifest import TensorEntry
from manyhands.checkpoint.pinning import BounceBuffers, align, cut, lengths_in_pieces, pin, unpin
from manyhands.checkpoint.tensors import (
    StateTensors,
    checkpoint_tensors,
    create_optimizer_state,
    describe,
    trained_parameters,
)
from manyhands.core.holding import local
from manyhands.core.segments import Segment

META_BYTES = 2**20  # beside the names and shapes of the tensors
COPIES_QUEUED = 128
_LENGTH = struct.Struct("<Q")


class PendingSnapshot:
    """A snapshot that was begun: of the state as it was then, which nobody changes before ``complete``."""

    def __init__(self, start: Callable[[], Callable[[], None]]) -> None:
        self._start: Callable[[], Callable[[], None]] | None = start  # until it is called: it keeps the state
        self._wait: Callable[[], None] | None = None
        self.is_complete = False

    def start(self) -> None:
        """Starts the copies, on a GPU beside what it computes."""
        if self._start is not None:
            start, self._start = self._start, None
            self._wait = start()

    def complete(self) -> None:
        """Returns once the snapshot can be read. Starts the copies where nobody has."""
        self.start()
        assert self._wait is not None
        self._wait()
        self.is_complete = True


class SnapshotWriter:
    """Copies the state into the older slot. On a GPU the copies run beside the training, from pinned memory, and a
    thread commits them as soon as they have arrived: the host may have a step to launch before it looks again.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self._segment, self._device = segment, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: list[torch.Tensor] = []  # both slots
        self._pinning: Future[None] | None = None
        self._pending: PendingSnapshot | None = None
        self._committing: Future[None] | None = None
        self._hurry = threading.Event()  # of what is being pinned
        self._layout = _Layout.of([], {})
        self._laid_out: Callable[[], StateTensors | None] = lambda: None  # for which the layout is known to be
        self._slots: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # the memory of each, and its tensors

    @property
    def is_copied(self) -> bool:
        """Whether the newest snapshot has been copied to another node, or none is copied any more."""
        return self._segment.is_copied()

    @property
    def has_asked(self) -> bool:
        """Whether memory is pinned, or being pinned."""
        return bool(self._pinned) or self._pinning is not None

    @property
    def is_ready(self) -> bool:
        """Whether ``begin`` has no memory to wait for, or fails at once."""
        return self._pinning.done() if self._pinning is not None else self._stream is None or bool(self._pinned)

    def pin_ahead(self, tensors: StateTensors) -> None:
        """Begins to make room for ``tensors`` and to pin it, beside the training. Errors are those of the next
        ``begin``.
        """
        self._lay_out(tensors)
        self._hurry = threading.Event()
        self._pinning = _in_a_thread(partial(self._make_room, self._hurry))

    def begin(self, step: int, tensors: StateTensors, state: dict[str, Any], key: str) -> PendingSnapshot:
        """Begins a snapshot. Whoever changes the tensors calls ``complete`` first. OSError where there is no room for
        one, or where it cannot be pinned: from other memory copies would hold up the training.
        """
        if self._pinning is not None:
            pinning, self._pinning = self._pinning, None
            self._hurry.set()
            pinning.result()
        if self._pending is not None and not self._pending.is_complete:  # of a step whose update was skipped
            self._pending.complete()
        parts = self._lay_out(tensors)
        meta = self._layout.describe(state, key)
        if len(meta) > self._layout.begin:
            self._layout, self._slots = _Layout.of(self._layout.signature, parts, len(meta)), {}
            meta = self._layout.describe(state, key)
        self._make_room()
        slot = self._segment.oldest()
        memory = torch.frombuffer(self._segment.clear(slot), dtype=torch.uint8)
        if slot not in self._slots:
            self._slots[slot] = memory, self._layout.place(memory, parts)
        memory[: len(meta)].numpy()[:] = memoryview(meta)
        if self._stream is not None:  # the copies wait for what was queued so far, whenever they are started
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._pending = PendingSnapshot(partial(self._start, slot, step, [*parts.values()]))
        return self._pending

    def _start(self, slot: int, step: int, parts: list[torch.Tensor]) -> Callable[[], None]:
        """Starts the copies; the function returned waits until they are committed. On a GPU a thread launches them, as
        there are hundreds, and the step has kernels to launch.
        """
        to, commit = self._slots[slot][1], partial(self._segment.commit, slot, step, self._layout.end)
        if self._stream is None:
            torch._foreach_copy_(to, self._layout.cut(parts))
            return commit

        def copy_and_commit() -> None:
            self._copy(to, parts)
            commit()

        self._committing = _in_a_thread(copy_and_commit)
        return self._committing.result

    def close(self) -> None:
        """Unpins the memory, waiting for a pinning under way, and frees the segment if it holds no complete snapshot.
        The next ``begin`` pins again.
        """
        if self._pinning is not None:
            pinning, self._pinning = self._pinning, None
            self._hurry.set()
            pinning.exception()
        if self._committing is not None:
            self._committing.exception()
        self._pending = None
        if self._stream is not None:
            self._stream.synchronize()
        self._unpin()
        self._segment.free_if_empty()

    def forget_after(self, step: int) -> None:
        """Clears snapshots of later steps."""
        if self._pinning is not None:  # the slots may be made anew
            self._hurry.set()
            self._pinning.exception()
        for later, slot in self._segment.committed().items():
            if later > step:
                self._segment.clear(slot).release()

    def _lay_out(self, tensors: StateTensors) -> dict[str, torch.Tensor]:
        """This rank's parts, for which the layout is."""
        if self._laid_out() is not tensors:
            signature = _sign(tensors)
            if self._layout.signature != signature:
                self._layout, self._slots = _Layout.of(signature, tensors.parts), {}
            self._laid_out = weakref.ref(tensors)
        return tensors.parts

    @torch.no_grad()
    def _copy(self, to: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        """Copies to the host on the stream for that, and waits for it. A few at a time: with a thousand of them queued,
        whoever launches a kernel would wait until there is room again.
        """
        parts = self._layout.cut(parts)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            for first in range(0, len(parts), COPIES_QUEUED):
                few = slice(first, first + COPIES_QUEUED)
                torch._foreach_copy_(to[few], parts[few], non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)  # waiting for it takes no core
                arrived.record()
                arrived.synchronize()

    def _unpin(self) -> None:
        """Before the mapping goes: CUDA would take what is mapped at its address later for registered."""
        while self._pinned:
            unpin(self._pinned.pop(), self._device)
        self._slots = {}

    def _make_room(self, hurry: threading.Event | None = None) -> None:
        """Two slots for the layout, pinned where a GPU is: each by itself, so that pieces lie alike in both."""
        if self._segment.slot_bytes < self._layout.end:
            self._unpin()
            self._segment.make_room(self._layout.end)
        if self._stream is None or self._pinned:
            return
        first, second = torch.frombuffer(self._segment.slots(), dtype=torch.uint8).split(self._segment.slot_bytes)
        if not (status := pin(first, self._device, hurry)) and (status := pin(second, self._device, hurry)):
            unpin(first, self._device)
        if status:
            raise OSError(0, f"the memory cannot be pinned (CUDA error {status})")
        self._pinned = [first, second]


def _in_a_thread(call: Callable[[], None]) -> Future[None]:
    thread = ThreadPoolExecutor(1)
    future = thread.submit(call)
    thread.shutdown(wait=False)
    return future


@dataclass(frozen=True)
class _Layout:
    """Where in a slot the tensors lie, which stays from one snapshot to the next: they begin after room for the JSON,
    whose state grows a little.
    """

    signature: list[Any]
    spans: list[int]
    lengths: list[list[int]]  # of each tensor's parts in pieces of pinned memory
    begin: int
    end: int
    fixed: str  # of the JSON

    @staticmethod
    def of(signature: list[Any], parts: dict[str, torch.Tensor], meta_bytes: int = 0) -> _Layout:
        entries = {name: {"shape": shape, "dtype": dtype} for name, shape, _, dtype in signature}
        # No offset has more digits.
        least = len(json.dumps({"entries": entries, "parts": [(name, 2**62, *rest) for name, *rest in signature]}))
        begin = end = align(_LENGTH.size + max(least, meta_bytes) + META_BYTES)
        spans, lengths = [], []
        for part in parts.values():
            spans.append(end)
            lengths.append(lengths_in_pieces(end, part))
            end += align(part.numel() * part.element_size())
        shapes = {name: (span, shape, dtype) for (name, _, shape, dtype), span in zip(signature, spans, strict=True)}
        return _Layout(signature, spans, lengths, begin, end, json.dumps({"entries": entries, "parts": shapes})[1:])

    def describe(self, state: dict[str, Any], key: str) -> bytes:
        """The JSON in front of the tensors, after its length."""
        text = f"{json.dumps({'key': key, 'state': state})[:-1]}, {self.fixed}".encode()
        return _LENGTH.pack(len(text)) + text

    def place(self, memory: torch.Tensor, parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in the memory of a slot, in the order of ``parts``, cut as those are."""
        return self.cut([_view(memory, span, part) for span, part in zip(self.spans, parts.values(), strict=True)])

    def cut(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """None of them crosses pieces of pinned memory."""
        return [each for part, lengths in zip(parts, self.lengths, strict=True) for each in cut(part, lengths)]


def _sign(tensors: StateTensors) -> list[Any]:
    """What tells one layout from another: names, full shapes, this rank's shapes, dtypes."""
    found = zip(tensors.items(), tensors.parts.values(), strict=True)
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
        bounce: BounceBuffers | None = None  # pinning all of it takes longer
        with torch.no_grad():
            for name, tensor in tensors.items():
                to, part = local(tensor), self.parts[name]
                if to.is_cuda:
                    bounce = bounce or BounceBuffers()
                    bounce.copy(to, part)
                else:
                    to.copy_(part)
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
