"""A rank's guards: which weights are compared, which samples were in a batch, how a run is rolled back."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.core.errors import EXIT_FAILED
from manyhands.core.files import write_json
from manyhands.planner.efficiency import lay_out_training
from manyhands.planner.layout import Layout
from manyhands.planner.types import Plan
from manyhands.training.guards import Diverged, Fault, Replicas, RollBack
from manyhands.training.types import StepResult, TrainState
from manyhands.worker.rank import Data, Rank, RunEngine
from manyhands.worker.stages import find_checkpoint

MAX_FILES = 100  # of samples: a run that skips for ever must not fill the disk


def make_replicas(rank: Rank, model: torch.nn.Module) -> Replicas | None:
    """None where no two ranks hold the same weights, or comparing is switched off."""
    groups = replica_groups(rank.plan.layout)
    if groups is None or not rank.config.guards.replicas_every:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Replicas(trained, groups, rank.config.guards.replicas_every)


def replica_groups(layout: Layout) -> list[int] | None:
    """For each rank the part of the trained weights that it holds; None where no two ranks hold the same."""
    if layout.weight_shards == layout.world_size:
        return None
    return [rank % layout.weight_shards for rank in range(layout.world_size)]


def keep_samples(rank: Rank, data: Data, result: StepResult, fault: Fault, action: str) -> str:
    """Writes the step's samples to ``logs/batch-N.json`` on rank 0; returns its name for messages, or ""."""
    path = rank.folder.logs / f"batch-{result.step:06d}.json"
    if len(list(rank.folder.logs.glob("batch-*.json"))) >= MAX_FILES:
        return ""
    if rank.world.is_first:
        found = {
            "step": result.step,
            "epoch": data.order.locate(result.step - 1)[0],
            "fault": fault,
            "action": action,
            "loss": repr(result.loss),
            "grad_norm": repr(result.grad_norm),
            "rank_losses": [repr(loss) for loss in result.rank_losses],
            "samples": list_samples(rank.plan, data, result.step - 1),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found)
        except OSError as error:  # a full disk
            rank.process.print(f"note: {path} cannot be written: {error.strerror or error}")
    return str(path)


def list_samples(plan: Plan, data: Data, step: int) -> list[dict[str, Any]]:
    """Each sample of ``step``, counted from 0, by its number among the training samples, with source, line and rank."""
    store, train = data.store, data.store.train
    numbers = data.order.samples(*data.order.locate(step))
    layout = lay_out_training(plan, train, numbers)
    names = [str(source.get("path") or source.get("name")) for source in store.meta["sources"]]
    lines = store.lines
    return [
        {
            "sample": int(number),
            "source": names[int(train.sources[number])],
            "file": store.file_number(int(number)),  # of a source of several, counted from 0
            "line": int(lines[train.places[number]]),
            "tokens": int(train.lengths[number]),
            "rank": owner * plan.layout.mesh.context,  # or the first of those that divide it
        }
        for owner in range(plan.layout.data_parallel_degree)
        for number in layout.samples_of_rank(owner)
    ]


def roll_back(
    rank: Rank, engine: RunEngine, before: TrainState, reason: RollBack, measured: dict[str, Any]
) -> TrainState:
    """Loads the newest checkpoint into the living engine and returns its state; of the steps to leave out those that
    follow it are. At least one does: no checkpoint has the step that gave the reason. Diverged where there is no
    checkpoint. Every rank calls it.
    """
    checkpoint = find_checkpoint(rank)
    if checkpoint is None:
        raise Diverged(
            reason.why,
            where=str(rank.folder.checkpoints),
            why="there is no checkpoint to roll back to yet (guards: rollback)",
            fix="set checkpoint.every_steps so that one exists by then, or guards.nonfinite=skip",
            exit_code=EXIT_FAILED,
        )
    engine.drop_gradients()
    state = TrainState(**engine.load(checkpoint, is_checked=True, report=rank.process.print))
    state.num_rollbacks = before.num_rollbacks + 1
    left_out = [step for step in reason.left_out if step >= state.step]
    state.left_out = sorted({*before.left_out, *left_out})
    rank.process.step = state.step
    evaluations = measured.get("evaluations", [])  # those that come after the checkpoint are made again
    measured["evaluations"] = [one for one in evaluations if one["step"] <= state.evaluated_step]
    steps = f"step{'s' * (len(left_out) != 1)} {', '.join(str(step + 1) for step in left_out)}"
    rank.process.print(f"warning: {reason.why}; rolled back to {checkpoint.name}, {steps} will be left out")
    return state
