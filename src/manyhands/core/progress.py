"""Progress of long work, which calls ``advance`` after each tensor, file or token.

One listener per process, as in logging, so that functions need not pass it on. In a rank it is the heartbeat: the
launcher ends ranks that make no progress. Elsewhere there is none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_listener: Callable[[], object] | None = None
_num_advances = 0
_muted = threading.local()


def listen(listener: Callable[[], object] | None) -> None:
    """Sets the function that each ``advance`` calls, in the caller's thread; None removes it."""
    global _listener
    _listener = listener


def advance() -> None:
    """Reports one unit of work; costs next to nothing."""
    global _num_advances
    if getattr(_muted, "is_on", False):
        return
    _num_advances += 1
    if _listener is not None:
        _listener()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Inside, this thread's work does not count as progress: background work must not hide that training hangs."""
    _muted.is_on = True
    try:
        yield
    finally:
        _muted.is_on = False


def num_advances() -> int:
    """Units of work so far in this process, approximately: two threads may count one."""
    return _num_advances
