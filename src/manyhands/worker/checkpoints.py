"""When the run is saved, and how: beside the training where the plan says so, else while it waits."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.background import BackgroundSave, BackgroundSaver, Status
from manyhands.checkpoint.manifest import checkpoint_folder, copy_checkpoint, prune, prune_copies
from manyhands.core.collective_errors import run_on_all_ranks, run_on_rank_0
from manyhands.core.progress import advance
from manyhands.core.remote import RemoteError
from manyhands.data.batch.order import SampleOrder
from manyhands.launch.run.resume import describe_run, remote_of
from manyhands.training.types import Hook, TrainState
from manyhands.worker.rank import Rank, RunEngine, StagesCheckpoints

NOTABLE_WAIT_S = 1.0  # of a save for the one before it
SETTLE_S = 5.0  # that a failed rank waits for the save under way


@dataclass
class Pending:
    """A save under way, of the state as it was."""

    save: BackgroundSave
    state: TrainState


class CheckpointHook(Hook):
    """Saves every so many steps or minutes, at a new best if asked, and at the end; then removes what is no longer
    kept.

    Beside the training one save is under way at most. Every rank reports how far it is with the step's gather, so that
    all of them learn in the same step that the checkpoint exists, or that a rank has failed.
    """

    num_local_values = 1

    def __init__(
        self,
        rank: Rank,
        engine: RunEngine,
        order: SampleOrder,
        state: TrainState,
        hooks: Sequence[Hook],
        show_progress: Callable[[str, int, int], None],
        measured: dict[str, Any],
    ) -> None:
        """``hooks`` learn of each complete checkpoint; ``measured``: what a save took goes there."""
        self.rank, self.engine, self.order, self.hooks = rank, engine, order, hooks
        self.show_progress, self.measured = show_progress, measured
        self.saved_at = state.step if state.step else -1
        self.saved_elapsed_s = state.elapsed_s
        self.pending: Pending | None = None
        self.saver: BackgroundSaver | None = None
        if isinstance(engine, StagesCheckpoints) and rank.plan.async_checkpoints:
            self.saver = BackgroundSaver(rank.world.rank, rank.world.world_size, rank.world.device)
        self.warnings: list[str] = []  # about the newest checkpoint, on rank 0
        self.num_staged = 0  # tensors for which every rank has room

    # With each step.

    def local_values(self) -> Sequence[float]:
        return (float(self.pending.save.status if self.pending is not None else Status.NONE),)

    def on_gathered(self, values: Sequence[Sequence[float]]) -> None:
        if self.pending is None:
            return
        statuses = [Status(int(status)) for (status,) in values]
        if Status.FAILED in statuses:
            self.finish()  # raises on every rank
        elif statuses[0] == Status.COMMITTED:
            self._complete(self.pending)
        elif min(statuses) >= Status.WRITTEN:
            self.pending.save.know_all_written()

    def between_steps(self, state: TrainState) -> None:
        if self._is_due(state):
            self.save(state)
        elif self.saver is not None and not self.saver.has_asked:
            assert isinstance(self.engine, StagesCheckpoints)
            self.saver.make_room(self.engine.checkpoint_tensors())  # the optimizer's states are there now

    def after_training(self, state: TrainState) -> None:
        self.save_and_wait(state)

    def _is_due(self, state: TrainState) -> bool:
        plan, section = self.rank.plan, self.rank.config.checkpoint
        minutes = section.every_minutes
        return (
            follows(self.order, plan.checkpoint_every, plan.checkpoint_per_epoch, state.step)
            or (section.keep_best and state.best_step == state.step)
            or (minutes is not None and state.elapsed_s - self.saved_elapsed_s >= 60 * minutes)  # alike on all ranks
        )

    # Saving. Collective, except for background writes.

    def save(self, state: TrainState) -> None:
        """Saves ``state``, or begins to, unless it is saved already."""
        if self.saved_at == state.step:
            return
        rank, begin = self.rank, time.monotonic()
        run_on_rank_0(rank.folder.refuse_gone)
        rank.process.stage = "checkpoint"
        rank.process.beat(state.step)
        self.finish(next_step=state.step)
        folder = checkpoint_folder(rank.folder.checkpoints, state.step)
        tensors = self._tensors_to_stage()
        if tensors is None:
            self._save_now(folder, state)
        else:
            self._begin(folder, tensors, copy.deepcopy(state))
        self.saved_at, self.saved_elapsed_s = state.step, state.elapsed_s
        self.measured.setdefault("checkpoint_stalls_s", []).append(time.monotonic() - begin)
        rank.process.stage = "train"

    def save_and_wait(self, state: TrainState) -> None:
        """The run ends with this checkpoint; before the first step there is nothing to lose."""
        run_on_rank_0(self.rank.folder.refuse_gone)
        if state.step:
            self.save(state)
        self.finish()

    def _tensors_to_stage(self) -> dict[str, torch.Tensor] | None:
        """What is saved beside the training; None where that cannot be, on this rank or another."""
        saver = self.saver
        if saver is None:
            return None
        assert isinstance(self.engine, StagesCheckpoints)
        tensors = self.engine.checkpoint_tensors()
        if len(tensors) == self.num_staged:  # the same on every rank
            return tensors
        reasons = run_on_all_ranks(lambda: saver.reserve(tensors))
        rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
        if rank is None:
            self.num_staged = len(tensors)
            return tensors
        self.rank.process.print(f"checkpoints are written while training waits: rank {rank}: {reasons[rank]}")
        saver.close()
        self.saver = None
        return None

    def _begin(self, folder: Path, tensors: dict[str, torch.Tensor], state: TrainState) -> None:
        assert self.saver is not None and isinstance(self.engine, StagesCheckpoints)
        save, before_update = self.saver.save(
            folder,
            tensors,
            asdict(state),
            manifest_extra=self._manifest_extra(),
            after_commit=functools.partial(self._after_commit, folder, self._kept_best(state)),
        )
        self.engine.before_update(functools.partial(self._await_copies, before_update))
        self.pending = Pending(save, state)

    def _await_copies(self, before_update: Callable[[], None]) -> None:
        """Before the tensors change. What the host waits for copies out of its own memory counts as a stall."""
        begin = time.monotonic()
        before_update()
        if stalls := self.measured.get("checkpoint_stalls_s"):
            stalls[-1] += time.monotonic() - begin

    def _save_now(self, folder: Path, state: TrainState) -> None:
        begin = time.monotonic()
        self.engine.save(
            folder,
            asdict(state),
            progress=lambda done, total: self.show_progress(f"checkpoint {state.step}", done, total),
            manifest_extra=self._manifest_extra(),
        )
        run_on_rank_0(lambda: self._after_commit(folder, self._kept_best(state), lambda _: advance()))
        self._announce(folder, state, time.monotonic() - begin)

    def finish(self, next_step: int | None = None) -> None:
        """Waits for the save under way, if there is one. Raises on every rank where one of them has failed."""
        if self.pending is None:
            return
        pending, begin = self.pending, time.monotonic()
        save = pending.save
        try:
            run_on_all_ranks(save.wait_written)
            save.know_all_written()
            run_on_rank_0(save.wait_ended)
        except BaseException:
            self.pending = None
            save.abandon()
            raise
        waited = time.monotonic() - begin
        if next_step is not None and waited > NOTABLE_WAIT_S:
            self.rank.process.print(
                f"the checkpoint of step {next_step} waited {waited:.1f} s for that of step {pending.state.step}"
            )
        self._complete(pending)

    def _complete(self, pending: Pending) -> None:
        self.pending = None
        self._announce(pending.save.folder, pending.state, pending.save.seconds)

    def _announce(self, folder: Path, state: TrainState, seconds: float) -> None:
        self.measured["checkpoint_s"] = seconds
        for warning in self.warnings:
            self.rank.process.print(f"warning: {warning}")
        for hook in self.hooks:
            hook.after_checkpoint(state, folder)

    def _after_commit(self, folder: Path, keep: Collection[int], moved: Callable[[int], object]) -> None:
        """Rank 0 copies the checkpoint and removes old ones. Failures do not end the run: the checkpoint is sound."""
        run, config = self.rank.folder, self.rank.config
        self.warnings = []
        try:
            remote = remote_of(config)
            if remote is not None:
                beside = [run.run_json, run.plan_json, *sorted(run.plans.glob("*.json")), run.metrics]
                copy_checkpoint(remote, folder, [path for path in beside if path.exists()], run.path, moved)
                kept = {checkpoint_folder(run.checkpoints, step).name for step in keep}
                prune_copies(remote, config.checkpoint.keep_last, kept)
        except (RemoteError, OSError) as error:
            self.warnings.append(f"{folder.name} is not copied (checkpoint.copy_to): {error}")
        try:
            prune(run.checkpoints, config.checkpoint.keep_last, keep)
        except OSError as error:
            self.warnings.append(f"older checkpoints are not removed (checkpoint.keep_last): {error}")

    def _kept_best(self, state: TrainState) -> set[int]:
        return {state.best_step} if self.rank.config.checkpoint.keep_best and state.best_step else set()

    def _manifest_extra(self) -> dict[str, Any]:
        rank = self.rank
        return {
            **describe_run(rank.config, rank.plan),
            "plan": rank.plan.number,
            "world_size": rank.world.world_size,
        }

    def close(self) -> None:
        """Frees what background saving holds. After an error a nearly complete save is finished without other ranks."""
        if self.pending is not None:
            with contextlib.suppress(Exception):
                self.pending.save.wait_ended(SETTLE_S)
            self.pending = None
        if self.saver is not None:
            self.saver.close()
            self.saver = None


def follows(order: SampleOrder, every: int, per_epoch: int, num_steps: int) -> bool:
    """Whether an evaluation or a checkpoint follows the first ``num_steps`` steps, as the plan spaces them."""
    if per_epoch:
        return order.ends_part(num_steps - 1, per_epoch)
    return bool(every) and num_steps % every == 0
