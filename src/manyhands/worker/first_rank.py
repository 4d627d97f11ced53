"""What rank 0 makes and every rank gets, over the store, before there is a process group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from manyhands.core.errors import EXIT_FAILED, PeerError, UserError
from manyhands.launch.environment import Launcher

POLL_S = 0.2


def from_first_rank(store: dist.Store, rank: int, key: str, make: Callable[[], str], timeout_s: float) -> str:
    """``make()`` runs on rank 0 alone; every rank gets its text. A failure of rank 0 reaches all ranks at once."""
    if rank == 0:
        try:
            text = make()
        except BaseException as error:
            code = (
                error.exit_code
                if isinstance(error, UserError)
                else error.code
                if isinstance(error, SystemExit)
                else EXIT_FAILED
            )
            store.set(key, f"error {code} {error}")
            raise
        store.set(key, "value " + text)
        return text
    deadline = time.monotonic() + timeout_s
    while not is_there(store, key):
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {rank} waited {timeout_s:g} s for rank 0's {key}",
                why="rank 0 prepares data and plan for all; it is still busy, or it ended",
                exit_code=EXIT_FAILED,
            )
        time.sleep(POLL_S)
    kind, _, text = store.get(key).decode().partition(" ")
    if kind == "error":
        code_text, _, message = text.partition(" ")
        raise FirstRankFailed(int(code_text), message)
    return text


class FirstRankFailed(PeerError):
    """Rank 0 has failed and reports it; this rank only ends, with the same exit code."""

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(f"rank 0 failed (exit code {exit_code})")
        self.exit_code, self.text = exit_code, text


def is_there(store: dist.Store, key: str) -> bool:
    """UserError where rank 0, which serves the store, has ended."""
    with served_by_first_rank():
        return store.check([key])


@contextlib.contextmanager
def served_by_first_rank() -> Iterator[None]:
    """Within, an error of the store is a UserError: rank 0, which serves it, has ended."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            "rank 0 ended before it had a plan for all",
            why=str(error).splitlines()[0],
            fix="read rank 0's output; the machine it runs on may have run out of memory",
            exit_code=EXIT_FAILED,
        ) from error


def leave_together(store: dist.Store, launcher: Launcher, timeout_s: float) -> None:
    """For an end before the process group forms: rank 0, which may serve the store, stays until the others have had its
    answer.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(
        dist.DistError, RuntimeError
    ):  # the store has ended, and with it all that is to be waited for
        if launcher.rank != 0:
            store.add("left", 1)
            return
        while store.add("left", 0) < launcher.world_size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)
