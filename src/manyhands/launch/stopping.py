"""Ctrl-C and SIGTERM in the process that prepares and launches: an exception that no handler of errors catches, and a
message.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from manyhands.core.errors import UserError


class StopRequested(BaseException):
    """This process was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


class Stopped(UserError):
    """The run was stopped before any rank had started: not an error, so it is not printed as one."""

    def __init__(self, asked: StopRequested) -> None:
        what = f"{asked.signal.name}: stopped while data and plan were being prepared, no rank has started"
        super().__init__(what, fix="the same command starts it again", exit_code=128 + asked.signal)

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


@contextlib.contextmanager
def raise_when_asked(*numbers: int) -> Iterator[None]:
    """Within, these signals raise ``StopRequested``; afterwards their handlers are those of before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        raise StopRequested(number)

    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def raise_when_stopped() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM raise ``Stopped``."""
    try:
        with raise_when_asked(signal.SIGINT, signal.SIGTERM):
            yield
    except StopRequested as asked:
        raise Stopped(asked) from None
