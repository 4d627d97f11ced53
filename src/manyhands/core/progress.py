"""Progress of long work: what takes long calls ``advance`` after each tensor, file or token.

One listener a process, as with logging, so that functions need not hand it down. In a rank it is the heartbeat; the
launcher's watch ends a rank that does not advance. Elsewhere there is none.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], object] | None = None
_num_advances = 0


def listen(listener: Callable[[], object] | None) -> None:
    """``listener`` is called at each ``advance`` from now on, in the thread of the caller; None removes it."""
    global _listener
    _listener = listener


def advance() -> None:
    """One unit of work is done; costs next to nothing."""
    global _num_advances
    _num_advances += 1
    if _listener is not None:
        _listener()


def num_advances() -> int:
    """Units of work done so far in this process, nearly: threads may count one for two."""
    return _num_advances
