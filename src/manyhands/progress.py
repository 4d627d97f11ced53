"""Work that goes on says so, wherever it stands: what takes long calls ``advance`` at each tensor, file or token it is done with.

One listener a process, as with logging, so that functions need not hand it down. In a rank it is the heartbeat, whose watch
ends what does not advance; elsewhere nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], object] | None = None


def listen(listener: Callable[[], object] | None) -> None:
    """``listener`` is called at each ``advance`` from now on, from whichever thread that is in; None: nobody is."""
    global _listener
    _listener = listener


def advance() -> None:
    """Something has been done; costs next to nothing."""
    if _listener is not None:
        _listener()
