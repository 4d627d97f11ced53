"""Runs a generator in a thread, some items ahead of whoever takes them. Knows nothing of what the items are."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from typing import Generic, TypeVar

Item = TypeVar("Item")
THREAD_NAME = "manyhands-batches"


class Ahead(Generic[Item]):
    """At most ``num_items`` ahead. ``waited_s``: seconds that ``get`` has waited, from the start."""

    def __init__(self, source: Generator[Item, None, None], num_items: int) -> None:
        self.waited_s = 0.0
        self._source = source
        self._items: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=num_items)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def get(self) -> Item | None:
        """The next item, None at the end; an exception of the generator is raised here."""
        begin = time.monotonic()
        item = self._items.get()
        self.waited_s += time.monotonic() - begin
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Ends the thread, and with it the generator."""
        self._stopped.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    break
            else:
                self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)
        finally:
            self._source.close()  # here, in the thread that ran it

    def _put(self, item: Item | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
