"""Requests that wait together share a batch: one thread has the model. Knows no protocol."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.infer.decode import Completion, complete
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.worker import measure_capacity

if TYPE_CHECKING:
    from manyhands.infer.load import Answerer


@dataclass(eq=False)
class AnswerRequest:
    """A prompt; ``number`` seeds it with the settings. ``on_text``: called by the scheduler. ``abandoned``: unread."""

    ids: tuple[int, ...]
    settings: GenerationSettings
    number: int = 0
    on_text: Callable[[str], object] | None = None
    abandoned: bool = False
    done: Any = field(default=None, repr=False)  # called with (completion, error) in the scheduler's thread


MAX_WAITING = 1024  # requests


class _AllAbandoned(Exception):
    """Nobody waits for any answer of the batch."""


class Scheduler:
    """The queue of requests and the thread that answers them, the oldest first."""

    def __init__(self, answerer: Answerer, max_rows: int | None = None) -> None:
        self._answerer = answerer
        self._capacity = measure_capacity(answerer.model, max_rows)
        self._new: queue.Queue[AnswerRequest | None] = queue.Queue()
        self._waiting: list[AnswerRequest] = []
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self.batches: list[int] = []  # sizes so far

    def start(self) -> None:
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so many requests wait that the next one should come later."""
        return self._new.qsize() + len(self._waiting) >= MAX_WAITING

    def stop(self) -> None:
        """Returns when the batch in work is done."""
        self._new.put(None)
        self._thread.join()

    async def answer(self, request: AnswerRequest) -> Completion:
        """Waits for the answer. Raises what the model raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def finish(completion: Completion | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif completion is not None:
                future.set_result(completion)

        request.done = lambda *outcome: loop.call_soon_threadsafe(finish, *outcome)
        self._new.put(request)
        try:
            return await future
        except asyncio.CancelledError:
            request.abandoned = True
            raise

    def _work(self) -> None:
        while True:
            while not self._waiting or not self._new.empty():
                request = self._new.get()
                if request is None:
                    return
                self._waiting.append(request)
            self._waiting = [request for request in self._waiting if not request.abandoned]
            if self._waiting:
                self._run(self._take())

    def _take(self) -> list[AnswerRequest]:
        """The oldest request and those with the same settings, as many as fit."""
        first = self._waiting[0]
        alike = [request for request in self._waiting if request.settings == first.settings]
        if not self._capacity.pads:
            alike = [request for request in alike if len(request.ids) == len(first.ids)]
        batch: list[AnswerRequest] = []
        longest = 0
        for request in alike:
            longest = max(longest, len(request.ids))
            if batch and len(batch) + 1 > self._capacity.count_rows(longest, first.settings.max_new_tokens):
                break
            batch.append(request)
        self._waiting = [request for request in self._waiting if request not in batch]
        return batch

    def _run(self, batch: list[AnswerRequest]) -> None:
        self.batches.append(len(batch))

        def look() -> None:
            if all(request.abandoned for request in batch):
                raise _AllAbandoned

        def show(position: int, text: str) -> None:
            on_text = batch[position].on_text
            if on_text is not None and not batch[position].abandoned:
                on_text(text)

        try:
            answers = complete(
                self._answerer.model,
                self._answerer.tokenizer,
                [request.ids for request in batch],
                batch[0].settings,
                self._answerer.end_ids,
                [request.number for request in batch],
                show,
                None,
                look,
            )
        except Exception as error:
            for request in batch:
                request.done(None, error)
            return
        for request, answer in zip(batch, answers, strict=True):
            request.done(answer, None)
