"""Snapshots in host memory after every step: taken by a hook, and found again by ranks that our launcher has started
again after a fault.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from manyhands.checkpoint.in_memory import PendingSnapshot, Snapshot, SnapshotWriter, states_in
from manyhands.checkpoint.manifest import list_checkpoints, step_of
from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.segments import COPIED, SEGMENTS, Segment
from manyhands.training.types import Hook, TrainState
from manyhands.worker.context import RankContext, StagesCheckpoints


class SnapshotHook(Hook):
    """One after every step, last of all hooks. On GPUs its memory is made and pinned beside the first steps, and those
    have none: the first one is taken when every rank has reported with a step's gather that its memory is ready.
    """

    num_local_values = 1
    is_part_of_step = True  # there is one after every step

    def __init__(self, rank: RankContext) -> None:
        self.rank = rank
        self.engine = rank.engine if isinstance(rank.engine, StagesCheckpoints) else None
        reasons = run_on_all_ranks(lambda: why_none(rank)) if rank.config.checkpoint.every_step_in_memory else [""]
        self.is_on = rank.config.checkpoint.every_step_in_memory and not any(reasons)
        if any(reasons):
            rank.print(f"no snapshots in memory: {next(filter(None, reasons))}")
        keeps = self.is_on and _keeps(rank)
        if keeps and rank.snapshots is None and (segment := open_segment(rank)) is not None:
            rank.snapshots = SnapshotWriter(segment, rank.world.device)
        self.writer = rank.snapshots if keeps else None
        self.are_copied = COPIED in os.environ  # to another node
        self.are_ready = rank.world.device.type != "cuda"  # all ranks
        self.has_waited = False
        self.has_room = False  # on every rank

    def local_values(self) -> Sequence[float]:
        return (float(self.writer is None or self.writer.is_ready),)

    def on_gathered(self, values: Sequence[Sequence[float]]) -> None:
        self.are_ready = all(is_ready for (is_ready,) in values)

    def before_training(self, state: TrainState) -> None:
        """Forgets those of steps that are to be done again: they are not of this course any more."""
        if self.writer is not None:
            self.writer.forget_after(state.step)

    def between_steps(self, state: TrainState) -> None:
        if not self.is_on or self.engine is None:
            return
        if not self.are_ready:
            self.has_waited = True
            if self.writer is not None and not self.writer.has_asked:
                self.writer.pin_ahead(self.engine.checkpoint_tensors())  # the optimizer's states are there now
            return
        rank, begin = self.rank, time.monotonic()
        if self.are_copied and self._left_out():
            return
        if rank.world.device.type == "cuda":  # all have completed theirs of the step before: two slots are enough
            rank.engine.all_reduce_sum(torch.zeros(()))
        reason = ""
        pending: PendingSnapshot | None = None
        if self.writer is not None:
            try:
                pending = self.writer.begin(state.step, self.engine.checkpoint_tensors(), asdict(state), key_of(rank))
            except OSError as error:
                reason = f"rank {rank.world.rank}: {error.strerror or error}"
        if not self.has_room:  # the first one makes it
            reason = next(filter(None, run_on_all_ranks(lambda: reason)), "")
            self.is_on = not reason
            self.has_room = True
            if self.has_waited and self.is_on:
                rank.print(f"snapshots in memory from step {state.step} on: before it their memory was pinned")
        if reason:  # a later one that has outgrown its slot
            rank.print(f"no snapshots in memory: {reason}")
            if self.writer is not None:
                self.writer.close()
            self.writer = rank.snapshots = None
            return
        rank.measured.setdefault("snapshot_stalls_s", []).append(time.monotonic() - begin)
        if pending is None:
            return
        if rank.world.device.type == "cuda":
            self.engine.before_backward(pending.start)
            self.engine.before_update(partial(self._complete, pending))
        else:
            self._complete(pending)

    def _left_out(self) -> bool:
        """Whether some rank's last snapshot is not copied yet. It is not to be overwritten, nor the one before it that
        all nodes have copies of.
        """
        rank = self.rank
        waits = self.writer is not None and not self.writer.is_copied
        if not rank.engine.all_reduce_sum(torch.tensor(float(waits))):
            return False
        left_out = rank.measured["snapshots_left_out"] = rank.measured.get("snapshots_left_out", 0) + 1
        if left_out == 1:
            rank.print("note: snapshots are taken as fast as the next node gets its copies, which is not every step")
        return True

    def _complete(self, pending: PendingSnapshot) -> None:
        """The wait for its copies counts too."""
        begin = time.monotonic()
        pending.complete()
        self.rank.measured["snapshot_stalls_s"][-1] += time.monotonic() - begin


def why_none(rank: RankContext) -> str:
    """Why this rank can keep no snapshots; an empty text where it can."""
    if not rank.config.launch.restarts:
        return "launch.restarts is 0, so no rank would resume from them"
    if os.environ.get(SEGMENTS) is None:
        return "the launcher keeps none (`manyhands train` does, on Linux)"
    return "" if isinstance(rank.engine, StagesCheckpoints) else "DeepSpeed's engine has none"


def open_segment(rank: RankContext) -> Segment | None:
    """Of this rank, or of the one of this machine that keeps the copy for all; None where there is none."""
    paths = [path for path in os.environ.get(SEGMENTS, "").split(":") if path]
    index = rank.world.local_rank if _is_sharded(rank) else 0
    return Segment(paths[index]) if index < len(paths) else None


def find_snapshot(rank: RankContext) -> None:
    """Sets ``rank.snapshot`` to the newest one that every rank has, if it is of a later step than the newest
    checkpoint. One whose best step is neither its own nor on the disk is passed over: the best model would be lost.
    Collective.
    """
    rank.snapshot = None
    if not rank.config.checkpoint.every_step_in_memory:
        return
    with contextlib.ExitStack() as closing:
        segment = open_segment(rank)
        if segment is not None:
            closing.callback(segment.close)
        found = run_on_all_ranks(lambda: _look(rank, segment))
        on_disk = found[0][1]  # as rank 0 sees it: the others may see another machine's files later
        saved = step_of(rank.checkpoint) if rank.checkpoint is not None else 0
        # Of one course: a copy may be of a step that the others have done again since.
        for step, _ in sorted(set.intersection(*(set(bests) for bests, _ in found)), reverse=True):
            best = next(best for (its_step, _), best in found[0][0].items() if its_step == step)
            if step <= saved or segment is None:
                return
            if not rank.config.checkpoint.keep_best or not best or best == step or best in on_disk:
                rank.snapshot = Snapshot.read(segment, step)
                return
            rank.print(f"the snapshot of step {step} is not used: step {best}, the best, had not been saved")


def _look(rank: RankContext, segment: Segment | None) -> tuple[dict[tuple[int, str], int | None], list[int]]:
    """The best step of each of this rank's snapshots, by step and digest of the state, which is alike on all ranks;
    and the steps of the checkpoints.
    """
    states = states_in(segment, key_of(rank)) if segment is not None else {}
    on_disk = [step for step, _ in list_checkpoints(rank.folder.checkpoints)]
    digests = {step: hashlib.sha256(json.dumps(state).encode()).hexdigest() for step, state in states.items()}
    return {(step, digests[step]): state.get("best_step") for step, state in states.items()}, on_disk


def key_of(rank: RankContext) -> str:
    """What must agree for a snapshot to fit."""
    layout = rank.plan.layout
    if layout.holds_copies:  # any number of ranks can read it
        return f"{rank.config.digest} copies"
    return f"{rank.config.digest} {layout.strategy} {layout.world_size} {layout.mesh} rank {rank.world.rank}"


def _keeps(rank: RankContext) -> bool:
    """Ranks that hold the same keep one copy a machine."""
    return _is_sharded(rank) or rank.world.local_rank == 0


def _is_sharded(rank: RankContext) -> bool:
    return not rank.plan.layout.holds_copies
