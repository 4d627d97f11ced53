"""Which rows form a step: a function of (seed, epoch, step) alone. Pure numpy; nothing is stored, no rank is known."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

# Streams of one seed that are not epochs.
HELD_OUT_STREAM = 2**64 - 1
EVALUATION_STREAM = 2**64 - 2


def permute(num_rows: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of ``range(num_rows)``, int64, keyed by (seed, stream).

    Sorts the raw output of Philox 4x64: numpy promises that the bit stream stays the same between its versions, which
    it does not promise for ``Generator.permutation``.
    """
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), stream], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


class RowOrder:
    """The rows of every step of a run, each row exactly once an epoch, steps never crossing epochs.

    A step is ``batch_rows`` rows, or as many rows as it takes to reach ``batch_tokens`` trained tokens (the row that
    reaches it is the last); then ``num_targets`` gives the trained tokens of each row. The last step of an epoch may
    be short.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        batch_rows: int | None = None,
        batch_tokens: int | None = None,
        num_targets: np.ndarray | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError("an order needs at least one row")
        if (batch_rows is None) == (batch_tokens is None):
            raise ValueError("give batch_rows or batch_tokens, not both")
        if batch_tokens is not None and (num_targets is None or len(num_targets) != num_rows):
            raise ValueError("batch_tokens needs num_targets, one for each row")
        if (batch_rows if batch_rows is not None else batch_tokens or 0) < 1:
            raise ValueError("a step needs at least one row or token")
        self.num_rows, self.seed = num_rows, seed
        self.batch_rows, self.batch_tokens, self._num_targets = batch_rows, batch_tokens, num_targets
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the two epochs used last
        self._first_steps = [0]  # of every epoch whose length is known, over the whole run

    def steps_per_epoch(self, epoch: int) -> int:
        """Steps of one epoch; with ``batch_tokens`` epochs may differ by a few."""
        if self.batch_rows is not None:
            return -(-self.num_rows // self.batch_rows)
        return len(self._lay_out(epoch)[1]) - 1

    def rows(self, epoch: int, index: int) -> np.ndarray:
        """Row ids of step ``index`` of an epoch, int64, in seeded order."""
        permutation, bounds = self._lay_out(epoch)
        if not 0 <= index < len(bounds) - 1:
            raise IndexError(f"epoch {epoch} has {len(bounds) - 1} steps, not {index + 1}")
        return permutation[bounds[index] : bounds[index + 1]]

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, index in it) of a step counted from 0 over the whole run."""
        if step < 0:
            raise IndexError("steps count from 0")
        if self.batch_rows is not None:
            return divmod(step, self.steps_per_epoch(0))
        while self._first_steps[-1] <= step:
            self._first_steps.append(self._first_steps[-1] + self.steps_per_epoch(len(self._first_steps) - 1))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(permutation, bounds): step i holds ``permutation[bounds[i]:bounds[i + 1]]``."""
        if epoch not in self._epochs:
            permutation = permute(self.num_rows, self.seed, epoch)
            if self.batch_rows is not None:
                bounds = np.append(np.arange(0, self.num_rows, self.batch_rows), self.num_rows)
            else:
                bounds = self._bound_by_tokens(permutation)
            while len(self._epochs) >= 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = (permutation, bounds)
        return self._epochs[epoch]

    def _bound_by_tokens(self, permutation: np.ndarray) -> np.ndarray:
        assert self.batch_tokens is not None and self._num_targets is not None
        sums = np.cumsum(self._num_targets[permutation], dtype=np.int64)
        bounds = [0]
        while bounds[-1] < self.num_rows:
            before = int(sums[bounds[-1] - 1]) if bounds[-1] else 0
            bounds.append(min(int(np.searchsorted(sums, before + self.batch_tokens)) + 1, self.num_rows))
        return np.array(bounds, dtype=np.int64)
