"""One rank's error is everyone's: work that every rank does at once, and whose failure all ranks learn of.

Works the same in one process without a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from manyhands.errors import EXIT_FAILED, PeerError, UserError
from manyhands.files import explain_full_disk, is_disk_full

T = TypeVar("T")


def this_rank() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_together(work: Callable[[], T]) -> list[T]:
    """Calls ``work`` on every rank; returns all results in rank order. Collective.

    If it fails on any rank, every rank raises the first one's error: a UserError or OSError as a UserError, anything
    else (a bug) as itself where it happened and as a PeerError elsewhere.
    """
    rank, world_size = this_rank()
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # told to the others, then raised
        error = caught
    if world_size == 1:
        if error is not None:
            raise _for_user(error, rank) or error
        return [result]  # type: ignore[list-item]
    told = None if error is None else (_for_user(error, rank), f"rank {rank}: {error!r}")
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (result, told))
    failures = [failure for _, failure in gathered if failure is not None]
    if failures:
        shown, text = failures[0]
        if shown is None and error is not None:
            raise error
        raise (shown or PeerError(text)) from error
    return [one for one, _ in gathered]


def run_on_first(work: Callable[[], T]) -> T | None:
    """Calls ``work`` on rank 0 alone while the others wait; its result on rank 0, None elsewhere. Collective."""
    rank, _ = this_rank()
    mine: list[T] = []

    def only_first() -> None:
        if rank == 0:
            mine.append(work())

    run_together(only_first)
    return mine[0] if mine else None


def _for_user(error: Exception, rank: int) -> UserError | None:
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and is_disk_full(error):
        return explain_full_disk(error, Path(error.filename or "."))
    if isinstance(error, OSError):
        return UserError(
            "a file cannot be read or written",
            where=str(error.filename or f"rank {rank}"),
            why=error.strerror or str(error),
            fix="check free space, permissions and that every rank sees the same folder",
            exit_code=EXIT_FAILED,
        )
    return None
