"""Host memory pinned piece by piece: what is registered, when there are pauses, and that no copy crosses pieces. CUDA's
calls are written down instead of made.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.checkpoint import pinning
from manyhands.checkpoint.pinning import cut, lengths_in_pieces, pin, unpin
from manyhands.checkpoint.shards import own_files
from manyhands.checkpoint.staging import NoRoom, Staging, count_staged_bytes, map_shared, place
from manyhands.checkpoint.tensors import checkpoint_tensors

GPU = torch.device("cuda")
PIECE = 256  # bytes
MAP = pinning.MADV_POPULATE_WRITE


@dataclass
class Registrations:
    """Of pieces of memory, as CUDA would know them."""

    held: dict[int, int] = field(default_factory=dict)  # bytes, by address
    threads: set[threading.Thread] = field(default_factory=set)
    fails_at: int = -1  # the number of a call

    def register(self, piece: torch.Tensor, device: torch.device) -> int:
        self.threads.add(threading.current_thread())
        begin, end = piece.data_ptr(), piece.data_ptr() + piece.nbytes
        assert all(other + size <= begin or end <= other for other, size in self.held.items()), "registered twice"
        if len(self.held) == self.fails_at:
            return 2
        self.held[begin] = piece.nbytes
        return 0

    def unregister(self, piece: torch.Tensor, device: torch.device) -> None:
        assert self.held.pop(piece.data_ptr()) == piece.nbytes


class CopyWatch(TorchDispatchMode):
    """Writes down between which bytes memory is written to by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default):
            for to in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                self.spans.append((to.data_ptr(), to.data_ptr() + to.nbytes))
        return func(*args, **(kwargs or {}))

    def inside(self, begin: int, num_bytes: int) -> list[tuple[int, int]]:
        """Of this memory, from its begin."""
        return [(b - begin, e - begin) for b, e in self.spans if begin <= b <= e <= begin + num_bytes]


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Registrations:
    made = Registrations()
    monkeypatch.setattr(pinning, "PIECE", PIECE)
    monkeypatch.setattr(pinning, "_register", made.register)
    monkeypatch.setattr(pinning, "_unregister", made.unregister)
    return made


class Pauses(threading.Event):
    """Written down; is set after ``until`` of them."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.until = until

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self.seconds.append(timeout)
        if len(self.seconds) == self.until:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("num_bytes", [1, PIECE, PIECE + 1, 7 * PIECE, 7 * PIECE + 100])
def test_pieces_are_all_of_the_memory_and_each_is_registered_once(registrations: Registrations, num_bytes: int) -> None:
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    assert pin(memory, GPU, Pauses(until=1)) == 0
    at = memory.data_ptr()
    for begin, size in sorted(registrations.held.items()):
        assert begin == at and size <= PIECE
        at += size
    assert at == memory.data_ptr() + num_bytes
    unpin(memory, GPU)
    assert not registrations.held
    assert threading.main_thread() not in registrations.threads, "CUDA's last error is a thread's own"


def test_pauses_are_as_long_as_pieces_took_and_end_when_somebody_waits(
    registrations: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, clock = torch.zeros(6 * PIECE, dtype=torch.uint8), iter(range(10**6))
    monkeypatch.setattr(pinning.time, "monotonic", lambda: float(next(clock)))
    hurry = Pauses(until=8)
    assert pin(memory, GPU, hurry) == 0 and len(registrations.held) == 6
    assert hurry.seconds == [1.0] * 8, "one after mapping a piece's pages, one after registering it"
    unpin(memory, GPU)
    assert pin(memory, GPU, hurry) == 0 and len(hurry.seconds) == 8


def test_beside_the_training_pages_are_mapped_a_little_at_a_time(
    registrations: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else maps memory waits for each call. Huge pages are made of each part, unless somebody waits."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        pinning, "_advise", lambda part, advice=MAP: calls.append((part.data_ptr(), part.nbytes, advice))
    )
    monkeypatch.setattr(pinning, "MAP_BYTES", PIECE // 4)
    memory = torch.zeros(4 * PIECE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PIECE + PIECE // 8 :][: 3 * PIECE]
    assert pin(memory, GPU, threading.Event()) == 0
    mapped = [call[:2] for call in calls if call[2] == MAP]
    assert mapped == sorted(call[:2] for call in calls if call[2] == pinning.MADV_COLLAPSE)
    assert sum(size for _, size in mapped) == memory.nbytes and max(size for _, size in mapped) == PIECE // 4
    assert all(begin % (PIECE // 4) == 0 for begin, _ in mapped if (begin - memory.data_ptr()) % PIECE)
    unpin(memory, GPU)
    calls.clear()
    assert pin(memory, GPU, Pauses(until=1)) == 0
    assert [advice for *_, advice in calls].count(pinning.MADV_COLLAPSE) == 0


def test_staged_memory_is_made_of_huge_pages_where_the_kernel_has_them() -> None:
    size = 32 * 2**20
    fd = os.memfd_create("manyhands-test")
    os.ftruncate(fd, size)
    memory = torch.frombuffer(map_shared(fd, size), dtype=torch.uint8)
    os.close(fd)
    pinning.map_beside(memory, threading.Event())
    [mapped] = [
        int(line.split()[1])
        for block in Path("/proc/self/smaps").read_text().split("VmFlags")
        if "manyhands-test" in block
        for line in block.splitlines()
        if line.startswith("ShmemPmdMapped")
    ]
    if not mapped:
        pytest.skip("this kernel makes no huge pages of shared memory on request")
    assert mapped == size // 2**10


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_undoes_what_was_registered(registrations: Registrations, fails_at: int) -> None:
    registrations.fails_at = fails_at
    assert pin(torch.zeros(5 * PIECE, dtype=torch.uint8), GPU, Pauses(until=1)) == 2 and not registrations.held


@pytest.mark.parametrize(
    ("begin", "num_elements", "expected"),
    [
        (64, 16, [16]),
        (192, 16, [16]),  # ends at a boundary
        (192, 80, [16, 64]),
        (192, 17, [16, 1]),
        (256, 64, [64]),  # a whole piece
        (256, 65, [64, 1]),
        (0, 200, [64, 64, 64, 8]),
        (256, 0, [0]),
        (192, 0, [0]),
    ],
)
def test_lengths_in_pieces(registrations: Registrations, begin: int, num_elements: int, expected: list[int]) -> None:
    tensor = torch.arange(num_elements, dtype=torch.float32)
    lengths = lengths_in_pieces(begin, tensor)
    assert lengths == expected
    assert torch.equal(torch.cat(list(cut(tensor, lengths))), tensor)


def awkward_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "small": torch.randn(3),
        "of several pieces": torch.randn(7, 50),
        "double": torch.randn(40, dtype=torch.float64),
        "up to a boundary": torch.randn(5, 64),
        "empty": torch.zeros(0, 9),
        "transposed": torch.randn(13, 11).T,
        "strided": torch.randn(40, 40)[:, ::2],
        "half": torch.randn(333).bfloat16(),
        "bytes": torch.arange(200, dtype=torch.uint8),
    }


def test_no_copy_of_a_checkpoint_crosses_pieces(registrations: Registrations) -> None:
    tensors = awkward_tensors()
    files = own_files(tensors, 0)
    num_bytes, spans = count_staged_bytes(files), place(files)
    staging = Staging(num_bytes, GPU)
    try:
        staging.hurry.set()
        staging.make_room()
        buffer = staging._buffer
        assert buffer is not None and sum(registrations.held.values()) == num_bytes
        with CopyWatch() as watch:
            staging.copy(files, spans, on_host=True)
        check_spans(watch.inside(buffer.data_ptr(), num_bytes))
        for file in files:
            for piece, (begin, size) in zip(file.pieces, spans[file.name], strict=True):
                held = buffer[begin : begin + size].view(piece.tensor.dtype).view(piece.tensor.shape)
                assert torch.equal(held, piece.tensor)
        del held, buffer
    finally:
        staging.close()
    assert not registrations.held


def test_staging_that_cannot_be_pinned_holds_no_memory(registrations: Registrations) -> None:
    registrations.fails_at = 2
    staging = Staging(100 * PIECE, GPU)
    try:
        staging.hurry.set()
        with pytest.raises(NoRoom, match="CUDA error 2"):
            staging.make_room()
        assert os.fstat(staging._fd).st_blocks == 0 and not registrations.held
    finally:
        staging.close()


def check_spans(spans: list[tuple[int, int]]) -> None:
    assert len(spans) > 9, "some are cut"
    assert all(begin // PIECE == max(begin, end - 1) // PIECE for begin, end in spans)


@pytest.mark.gpu
def test_on_a_gpu_copies_to_memory_in_pieces_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a piece, one of them not contiguous."""
    monkeypatch.setattr(pinning, "PIECE", 2**20)
    device = torch.device("cuda")
    model = nn.Linear(1500, 700, device=device)
    model.weight = nn.Parameter(torch.randn(1500, 700, device=device).T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 1500, device=device)).square().sum().backward()
    optimizer.step()
    files = own_files(checkpoint_tensors(model, optimizer), 0)
    staging, spans = Staging(count_staged_bytes(files), device), place(files)
    try:
        staging.make_room()
        for on_host in (False, True):
            staging.copy(files, spans, on_host=on_host)
        torch.cuda.synchronize()
        for file in files:
            for piece, (begin, size) in zip(file.pieces, spans[file.name], strict=True):
                assert staging._buffer is not None
                held = staging._buffer[begin : begin + size].view(piece.tensor.dtype).view(piece.tensor.shape)
                assert torch.equal(held, piece.tensor.cpu())
        del held
    finally:
        staging.close()
