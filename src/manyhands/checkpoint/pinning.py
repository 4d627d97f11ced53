"""Pinned host memory: registered with CUDA (page-locked), so that copies to and from a GPU run beside the training.

During cudaHostRegister no thread starts a kernel, some 0.25 s for each GB. So memory is registered piece by piece, with
pauses in which the training's kernels start. A copy must lie within one registration: ``cut`` divides tensors at the
pieces' boundaries, which count from the memory's begin.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

ALIGNMENT = 64  # bytes; of each tensor in pinned memory, for every dtype
PIECE = 128 * 2**20  # bytes, a multiple of a page: about 30 ms
PORTABLE = 1  # cudaHostRegisterPortable
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25  # Linux's
MAP_BYTES = 8 * 2**20  # mapped at once beside the training
HUGE_THREADS = 4  # one copies 2 GB/s into huge pages


def pin(memory: torch.Tensor, device: torch.device, hurry: threading.Event) -> int:
    """Registers ``memory`` of shape (bytes,). Returns CUDA's error, after which nothing of it is registered; 0 if there
    is none. After each piece there is a pause, as long as the piece took, until ``hurry`` is set.

    In a thread of its own: a failed call leaves CUDA's last error set in its thread, where the next kernel would seem
    to have failed. Pages are mapped before: CUDA would do so one by one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_register_pieces, memory, device, hurry).result()


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """What ``pin`` has registered, before its mapping goes."""
    for piece in memory.split(PIECE):
        _unregister(piece, device)


def _register_pieces(memory: torch.Tensor, device: torch.device, hurry: threading.Event) -> int:
    pieces = memory.split(PIECE)
    for index, piece in enumerate(pieces):
        map_beside(piece, hurry)
        begin = time.monotonic()
        status = _register(piece, device)
        if status:
            for registered in pieces[:index]:
                _unregister(registered, device)
            return status
        hurry.wait(time.monotonic() - begin)
    return 0


def _register(piece: torch.Tensor, device: torch.device) -> int:
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, PORTABLE))


def _unregister(piece: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def map_beside(memory: torch.Tensor, hurry: threading.Event) -> None:
    """Maps all pages beside the training, a little at a time and with pauses until ``hurry`` is set; then in huge
    pages, where the kernel has them (from Linux 6.1 on). Of 8 GiB of these a killed process takes 0.16 s to give back,
    in pages of 4 KiB 0.66 s; and they are registered in half of the time (an H100's host).

    Until a call returns, whatever else in the process maps or frees memory waits, a launch of a kernel among it:
    8 s for 6 GiB mapped by two threads at once, 55 ms in parts of 16 MiB (two CPU cores). Huge pages are no such call.
    """
    first = min(-memory.data_ptr() % MAP_BYTES, memory.nbytes)  # parts end where huge pages do
    parts = [memory[:first], *memory[first:].split(MAP_BYTES)]
    for part in parts:
        begin = time.monotonic()
        _advise(part)
        hurry.wait(time.monotonic() - begin)
    if not hurry.is_set():
        with ThreadPoolExecutor(HUGE_THREADS) as threads:
            for part in parts:
                threads.submit(_advise, part, MADV_COLLAPSE)


def _advise(memory: torch.Tensor, advice: int = MADV_POPULATE_WRITE) -> None:
    madvise = ctypes.CDLL(None).madvise  # without the interpreter's lock, which mmap.madvise keeps
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(memory.data_ptr(), memory.nbytes, advice)


def align(size: int) -> int:
    """The next multiple of ``ALIGNMENT`` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lengths_in_pieces(begin: int, tensor: torch.Tensor) -> list[int]:
    """Elements of the parts of ``tensor`` that lie in one piece each, if it begins at byte ``begin`` (aligned)."""
    end = begin + tensor.nbytes
    boundaries = range((begin // PIECE + 1) * PIECE, end, PIECE)
    return [(stop - start) // tensor.element_size() for start, stop in itertools.pairwise((begin, *boundaries, end))]


def cut(tensor: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """``tensor`` itself where there is one length, else its elements in flat parts of these lengths: views, but of a
    copy that is made on the current stream where it is not contiguous.
    """
    return (tensor,) if len(lengths) == 1 else tensor.reshape(-1).split(lengths)
