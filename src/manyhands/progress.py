"""Progress of long work: what takes long calls ``advance`` after each tensor, file or token.

One listener a process, as with logging, so that functions need not hand it down. In a rank it is the heartbeat; the
launcher's watch ends a rank that does not advance. Elsewhere there is none.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], object] | None = None


def listen(listener: Callable[[], object] | None) -> None:
    """``listener`` is called at each ``advance`` from now on, in the thread of the caller; None removes it."""
    global _listener
    _listener = listener


def advance() -> None:
    """One unit of work is done; costs next to nothing."""
    if _listener is not None:
        _listener()
