"""What is done about a step whose loss or gradient is not finite, or whose loss is a spike; and replicas that differ.

Decided from the numbers that each step's one gather brings to all ranks, so all decide alike. Where a step may be
skipped, the update waits for that gather; otherwise it is launched before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from manyhands.config.section_schemas import GuardsSection
from manyhands.core.errors import EXIT_FAILED
from manyhands.core.holding import computed_part
from manyhands.training.guards import Diverged, explain_nonfinite
from manyhands.training.types import StepResult, TrainState

MIN_LOSSES = 16  # before a loss can be called a spike
MIN_RISE = 0.5  # nats above the median: less is noise of small batches
TO_SIGMA = 1.4826  # of a normal distribution's median absolute deviation
WORD_BYTES = 8

Fault = Literal["nonfinite", "spike"]


class RollBack(Exception):
    """The run is to go on from its newest checkpoint, without the ``left_out`` steps. Raised on all ranks at once."""

    def __init__(self, left_out: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.left_out, self.why = tuple(left_out), why


def is_spike(loss: float, before: Sequence[float], mads: float) -> bool:
    """Whether ``loss`` is far above the losses before it: by ``mads`` scaled median absolute deviations and by
    ``MIN_RISE``.
    """
    if len(before) < MIN_LOSSES:
        return False
    middle = statistics.median(before)
    deviation = TO_SIGMA * statistics.median(abs(one - middle) for one in before)
    return loss > middle + max(mads * deviation, MIN_RISE)


@dataclass
class StepGuard:
    """Judges each step. ``keep(result, fault, action)`` writes the step's samples down."""

    guards: GuardsSection
    log: Callable[[str], None] = print
    keep: Callable[[StepResult, Fault, str], str] = field(default=lambda result, fault, action: "")

    def decides_update(self, state: TrainState) -> bool:
        """Whether the next step's update waits for ``judge``."""
        return "skip" in (self.guards.nonfinite, self.guards.spike) or state.step in state.left_out

    def judge(self, state: TrainState, result: StepResult) -> bool:
        """Whether the step's update is left out. Raises Diverged or RollBack. ``state`` is of before the step."""
        if result.step - 1 in state.left_out:
            self.log(f"step {result.step} is left out (loss {result.loss:.4g})")
            return True
        fault = self._find(state, result)
        if fault is None:
            state.losses_before = [*state.losses_before, result.loss][-self.guards.spike_window :]
            state.skipped_in_a_row = 0
            return False
        action = self.guards.nonfinite if fault == "nonfinite" else self.guards.spike
        what = self._describe(state, result, fault)
        kept = self.keep(result, fault, action)
        if action == "skip":
            self._skip(state, result, what)
        elif action == "rollback":
            self._roll_back(state, result, what)
        elif action == "stop":
            raise explain_nonfinite(result, kept)
        shown = f"; its samples: {kept}" if kept else ""
        if action == "warn":
            state.losses_before = [*state.losses_before, result.loss][-self.guards.spike_window :]
            self.log(f"warning: {what}{shown}; training continues (guards.spike: warn)")
            return False
        self.log(f"warning: {what}; the update is skipped{shown}")
        return True

    def _find(self, state: TrainState, result: StepResult) -> Fault | None:
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return "nonfinite"
        if self.guards.spike != "off" and is_spike(result.loss, state.losses_before, self.guards.spike_mads):
            return "spike"
        return None

    def _describe(self, state: TrainState, result: StepResult, fault: Fault) -> str:
        if fault == "nonfinite":
            return f"step {result.step} gave loss {result.loss:.4g} and gradient norm {result.grad_norm:.4g}"
        middle = statistics.median(state.losses_before)
        num = len(state.losses_before)
        return (
            f"the loss jumped to {result.loss:.4g} at step {result.step}; the median of {num} before was {middle:.4g}"
        )

    def _skip(self, state: TrainState, result: StepResult, what: str) -> None:
        state.skipped_in_a_row += 1
        state.num_skipped += 1
        if state.skipped_in_a_row > self.guards.max_in_a_row:
            raise _give_up(what, f"{self.guards.max_in_a_row} steps in a row were skipped before", result)

    def _roll_back(self, state: TrainState, result: StepResult, what: str) -> None:
        if state.num_rollbacks >= self.guards.max_in_a_row:
            raise _give_up(what, f"the run was rolled back {state.num_rollbacks} times before", result)
        last = result.step - 1
        raise RollBack(range(max(0, last - self.guards.leave_out + 1), last + 1), what)


def _give_up(what: str, why: str, result: StepResult) -> Diverged:
    return Diverged(
        what,
        where=f"step {result.step}, learning rate {result.learning_rate:.3g}",
        why=f"{why} (guards.max_in_a_row)",
        fix="start again with a lower optimizer.learning_rate (--fresh), or look at the samples in logs/batch-*.json;"
        " the last checkpoint is unaffected",
        exit_code=EXIT_FAILED,
    )


# Replicas.


def fingerprint(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Two float64 numbers on ``device``, exact integers below 2^32, that any changed bit of this rank's part of the
    parameters changes: its bytes summed as 64-bit integers, each parameter's times an odd factor of its own, modulo
    2^64. Reads each byte once and holds no copy.
    """
    # Not of masters: of DeepSpeed's no two ranks hold the same part.
    parts = (computed_part(parameter) for parameter in parameters)
    sums = [_sum_words(part).to(device) for part in parts]
    if not sums:
        return torch.zeros(2, dtype=torch.float64, device=device)
    factors = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1
    total = (torch.stack(sums) * factors).sum()
    return torch.stack([total & 0xFFFFFFFF, (total >> 32) & 0xFFFFFFFF]).double()


def _sum_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = len(flat) - len(flat) % WORD_BYTES
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == len(flat) else total + 257 * flat[whole:].sum(dtype=torch.int64)


def find_deviating(prints: Sequence[tuple[float, ...]], groups: Sequence[int]) -> list[int]:
    """Ranks that hold other weights than most of their group, which should hold the same; where no majority is right,
    all of the group.
    """
    deviating: list[int] = []
    for group in sorted(set(groups)):
        ranks = [rank for rank, one in enumerate(groups) if one == group]
        found = [prints[rank] for rank in ranks]
        usual = max(set(found), key=found.count)
        if found.count(usual) == len(ranks):
            continue
        is_clear = 2 * found.count(usual) > len(ranks)
        deviating += [rank for rank in ranks if not is_clear or prints[rank] != usual]
    return deviating


@dataclass
class Replicas:
    """Compares the trained weights of ranks that should hold the same. ``groups``: for each rank, the part it holds."""

    parameters: Sequence[torch.Tensor]
    groups: Sequence[int]
    every: int  # steps

    def is_due(self, step: int) -> bool:
        """Whether weights are compared in a step counted from 0, as they are before its update."""
        return step % self.every == 0

    def fingerprint(self, device: torch.device) -> torch.Tensor:
        return fingerprint(self.parameters, device)

    def compare(self, state: TrainState, prints: Sequence[tuple[float, ...]]) -> None:
        """``prints`` of all ranks, empty where none were due. Raises Diverged where replicas differ. ``state`` is of
        before the step.
        """
        if not prints[0]:
            return
        if ranks := find_deviating(prints, self.groups):
            raise explain_deviating(ranks, state.step, state.replicas_equal_at)
        state.replicas_equal_at = state.step


def explain_deviating(ranks: Sequence[int], num_steps: int, equal_at: int | None) -> Diverged:
    names = ", ".join(map(str, ranks))
    since = "" if equal_at is None else f"; they were equal after step {equal_at}"
    several = len(ranks) > 1
    older = f"of step {equal_at} or before" if equal_at else "that is older"
    return Diverged(
        f"rank{'s' * several} {names} hold{'s' * (not several)} other trained weights than the ranks that should hold"
        " the same",
        where=f"after step {num_steps}{since}",
        why="equal updates gave other numbers: mostly a GPU or memory with errors, or a hook that changes weights on"
        " some ranks only",
        fix=f"check those GPUs (manyhands doctor; nvidia-smi -q -d ECC) and leave them out; resume from a checkpoint"
        f" {older}, later ones may hold either (remove them). guards.replicas_every=0 compares nothing",
        exit_code=EXIT_FAILED,
    )
