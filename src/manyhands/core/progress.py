"""Progress of long work, which calls ``advance`` after each tensor, file or token.

One listener per process, as in logging, so that functions need not pass it on. In a rank it is the heartbeat: the
launcher ends ranks that make no progress. Elsewhere there is none.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], object] | None = None
_num_advances = 0


def listen(listener: Callable[[], object] | None) -> None:
    """Sets the function that each ``advance`` calls, in the caller's thread; None removes it."""
    global _listener
    _listener = listener


def advance() -> None:
    """Reports one unit of work; costs next to nothing."""
    global _num_advances
    _num_advances += 1
    if _listener is not None:
        _listener()


def num_advances() -> int:
    """Units of work so far in this process, approximately: two threads may count one."""
    return _num_advances
