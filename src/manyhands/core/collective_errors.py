"""Collective calls with error exchange: what fails on one rank is raised on all. Also without a process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from manyhands.core.errors import EXIT_FAILED, PeerError, UserError
from manyhands.core.files import explain_full_disk, is_disk_full
from manyhands.core.progress import num_advances

T = TypeVar("T")
EXCHANGE_S = 2.0  # far below any timeout of a group


def this_rank() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Calls ``work`` on every rank; returns all results in rank order. Collective.

    If it fails on any rank, every rank raises the first one's error: a UserError or OSError as a UserError, anything
    else (a bug) as itself where it happened and as a PeerError elsewhere.
    """
    rank, world_size = this_rank()
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # sent to the others, then raised
        error = caught
    if world_size == 1:
        if error is not None:
            raise _for_user(error, rank) or error
        return [result]  # type: ignore[list-item]
    failure = None if error is None else (_for_user(error, rank), f"rank {rank}: {error!r}")
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (result, failure))
    failures = [other for _, other in gathered if other is not None]
    if failures:
        shown, text = failures[0]
        if shown is None and error is not None:
            raise error
        raise (shown or PeerError(text)) from error
    return [one for one, _ in gathered]


@contextlib.contextmanager
def user_errors_on_all_ranks() -> Iterator[None]:
    """Raises a UserError of any rank on every rank, the first one's, which names the ranks that have one where others
    have none. Collective: every rank comes here, and calls no collective within.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    errors = run_on_all_ranks(lambda: error)
    failed = [rank for rank, each in enumerate(errors) if each is not None]
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        if len(failed) < len(errors):
            first.details = (*first.details, f"only on rank {', '.join(map(str, failed))} of {len(errors)}")
        raise first from error


def run_on_rank_0(work: Callable[[], T]) -> T | None:
    """Calls ``work`` on rank 0, for as long as it advances (``progress.py``); None on the others. Collective."""
    rank, world_size = this_rank()
    mine: list[T] = []
    outcome: Callable[[], T] = work
    if world_size > 1 and "cpu:" in dist.get_backend_config():
        if rank == 0:
            with _Advancing():
                outcome = _call(work).result
        else:
            while not _exchange(0.0):
                pass

    def only_first() -> None:
        if rank == 0:
            mine.append(outcome())

    run_on_all_ranks(only_first)
    return mine[0] if mine else None


def _call(work: Callable[[], T]) -> Future[T]:
    """The result or the exception, for the exchange that follows."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _exchange(done: float) -> bool:
    """Whether rank 0 is done; on the host, one small collective."""
    flag = torch.tensor(done)
    dist.all_reduce(flag)
    return bool(flag)


class _Advancing:
    """A thread that sends waiting ranks into a new collective whenever rank 0's work advances: the timeout restarts."""

    def __enter__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="advancing", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        _exchange(1.0)

    def _run(self) -> None:
        seen = num_advances()
        with contextlib.suppress(RuntimeError):  # a rank has ended: the next collective of the main thread will say so
            while not self._done.wait(EXCHANGE_S):
                if (now := num_advances()) != seen:
                    seen = now
                    _exchange(0.0)


def _for_user(error: Exception, rank: int) -> UserError | None:
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and is_disk_full(error):
        # A failed write to an open file does not name it: the caller, who knows the run's folder, explains it.
        return explain_full_disk(error, Path(error.filename)) if error.filename else None
    if isinstance(error, OSError):
        return UserError(
            "a file cannot be read or written",
            where=str(error.filename or f"rank {rank}"),
            why=error.strerror or str(error),
            fix="check free space, permissions and that every rank sees the same folder",
            exit_code=EXIT_FAILED,
        )
    return None
