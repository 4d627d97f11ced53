"""Ctrl-C and SIGTERM: finish the step, save, leave; and leave in bounded time even if the step never finishes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

GRACE_S = 20.0  # below the 30 s after which torch's agent kills, so that the last checkpoint is our own doing


class StopSignal:
    """Set by the first SIGINT or SIGTERM.

    Python runs signal handlers in the main thread only, and that thread may wait inside a collective for a peer that is
    gone. The interpreter's wake-up pipe is written by the C handler itself, so a thread reading it notices at once.
    """

    def __init__(
        self, give_up: Callable[[], bool] = lambda: False, before_exit: Callable[[], object] = lambda: None
    ) -> None:
        """``give_up()``: true when waiting is pointless, as another rank has failed; then ``before_exit()`` is
        called.
        """
        self.number = 0
        self._give_up, self._before_exit = give_up, before_exit
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    def __call__(self) -> bool:
        return bool(self.number)

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def _remember(self, number: int, frame: object) -> None:
        self.number = number

    def _watch(self) -> None:
        first = self._next()
        deadline = threading.Event()
        for _ in range(int(GRACE_S / 0.5)):
            if self._give_up():
                self._before_exit()
                break
            deadline.wait(0.5)
        os._exit(128 + first)

    def _next(self) -> int:
        while True:
            number = os.read(self._read, 1)[0]
            if number in (signal.SIGINT, signal.SIGTERM):
                return number
