"""Which samples form a step, of steps spread over the first epoch, as far as the facts know it. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from manyhands.data.order import MAX_OPEN_PACKS, bound_by_packs, bound_by_tokens, lay_packs
from manyhands.facts.types import DataFacts


def sample_steps(
    data: DataFacts,
    *,
    batch_samples: int | None,
    batch_loss_tokens: int | None,
    batch_packs: int | None,
    pack_tokens: int | None,
    max_steps: int,
    max_samples: int,
    num_steps: int | None = None,
) -> Iterator[np.ndarray]:
    """Samples, counted from 0 in the order of the first epoch, of at most ``max_steps`` steps with ``max_samples``
    together, one step in any case; of the first ``num_steps`` alone, where that is given.
    """
    num_samples = len(data.first_lengths)
    order = np.arange(num_samples)
    if batch_packs is not None:
        assert pack_tokens is not None
        max_open = 1 if data.as_given else MAX_OPEN_PACKS  # as data/order.py has it
        order, packs = lay_packs(np.array(data.first_lengths, dtype=np.int64), pack_tokens, max_open)
        if num_samples < data.samples_per_epoch:
            packs = packs[: max(1, len(packs) - max_open)]  # others would still take samples
        bounds = bound_by_packs(packs, batch_packs)
    elif batch_loss_tokens is not None:
        bounds = bound_by_tokens(np.array(data.first_labels, dtype=np.int64), batch_loss_tokens)
    else:
        assert batch_samples is not None
        bounds = np.append(np.arange(0, num_samples, batch_samples), num_samples)
    if num_samples < data.samples_per_epoch:
        bounds = bounds[:-1]  # the last step continues beyond the known samples
    known = len(bounds) - 1 if num_steps is None else min(len(bounds) - 1, num_steps)
    if known < 1:
        return
    wanted = max(1, min(max_steps, max_samples * known // max(1, int(bounds[known]))))
    for step in np.unique(np.linspace(0, known - 1, wanted).astype(np.int64)).tolist():
        yield order[bounds[step] : bounds[step + 1]]
