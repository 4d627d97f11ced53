"""Ranks that are slower than the others, step after step, from times that each step's gather has brought along.

The time of a rank counts until its own work of a step is done and only the last backward pass is left, which waits for
the others' gradients. What that sees: a slow processor, slow data, a hook, a launch of kernels that is held up; on CPUs
the computation too. Work of a GPU is not waited for, so a slow GPU shows in the check before the first step
(``worker/health.py``). Under fsdp on CPUs the forward pass waits for other ranks, and evens the times out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from manyhands.train.types import Hook, StepResult, TrainState

WINDOW = 50  # steps
SHARE = 0.1  # of the step's time, over the median of all ranks
FIRST_STEPS = 5  # of a launch: compilation, caches


class StragglerHook(Hook):
    """Names each slow rank once, in the log and by ``note``, for the report."""

    def __init__(self, log: Callable[[str], None], note: Callable[[str], None], window: int = WINDOW) -> None:
        self.log, self.note = log, note
        self.named: set[int] = set()
        self._left_out = FIRST_STEPS
        self._excess: deque[list[float]] = deque(maxlen=window)  # by step and rank, as shares of the step
        self._seconds: deque[float] = deque(maxlen=window)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if len(result.rank_seconds) < 2 or result.seconds <= 0:
            return
        if self._left_out:
            self._left_out -= 1
            return
        # Of two, the faster one is what the other is compared with.
        usual = statistics.median_low(result.rank_seconds)
        self._excess.append([(own - usual) / result.seconds for own in result.rank_seconds])
        self._seconds.append(result.seconds)
        if len(self._excess) == self._excess.maxlen and result.step % 10 == 0:
            self._judge(result.step)

    def _judge(self, step: int) -> None:
        for rank, shares in enumerate(zip(*self._excess, strict=True)):
            share = statistics.median(shares)
            if share > SHARE and rank not in self.named:
                self.named.add(rank)
                lost_s = share * statistics.median(self._seconds)
                text = (
                    f"rank {rank} is slower than the others: by {lost_s:.3g} s a step ({share:.0%}) in the"
                    f" {len(self._excess)} steps before step {step}; every step waits for it"
                )
                self.log(f"warning: {text}")
                self.note(text)
