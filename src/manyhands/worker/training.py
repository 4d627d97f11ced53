"""The stage that trains: the loop with its hooks and its evaluation."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.errors import UserError
from manyhands.core.holding import local
from manyhands.metrics import open_sinks
from manyhands.metrics.report import write_report
from manyhands.metrics.sinks import Meter, Outcome, Sink
from manyhands.planner.steps import schedule_of
from manyhands.training.guards import Diverged, DivergenceGuard, RollBack, StragglerHook
from manyhands.training.loop import Interrupted, Loop, evaluate, train
from manyhands.training.step import StepWork
from manyhands.training.types import Batch, Evaluate, Evaluation, Hook, StepResult, TrainState
from manyhands.worker.batches import close_workers, iterate_layouts, iterate_steps, lay_out_evaluation, open_workers
from manyhands.worker.checkpoints import CheckpointHook, follows
from manyhands.worker.context import RankContext
from manyhands.worker.guards import make_guard, make_replicas, roll_back
from manyhands.worker.prompts import answer_prompts, choose_prompts

SAMPLED = 4096  # values of each parameter, to see whether any has changed
LOOK_S = 1.0  # between two looks for the file STOP, which may be on a network's file system


def train_model(rank: RankContext) -> None:
    """Runs the loop to its end, or until the run is asked to stop; then the state is saved. A rollback goes on from the
    newest checkpoint.
    """
    rank.hooks = (*rank.hooks, *(make(rank) for make in rank.make_hooks))
    while True:
        try:
            return _train_on(rank)
        except RollBack as asked:
            roll_back(rank, asked)


def _train_on(rank: RankContext) -> None:
    checkpoints, state = CheckpointHook(rank), rank.state
    sinks = rank.sinks = _open_sinks(rank)
    loop = _make_loop(rank, sinks, checkpoints)
    open_workers(rank)
    rank.loss_model.train()
    outcome: Outcome = "failed"
    begin, first = sample_weights(rank), state.step
    try:
        train(loop)
        outcome = "finished"
    except RollBack:  # on all ranks
        outcome = "interrupted"  # the sinks go on from the checkpoint
        checkpoints.finish()
        raise
    except Interrupted:
        outcome = "interrupted"
        checkpoints.save_and_wait(state)
        raise
    except Diverged as error:  # on all ranks
        _report_divergence(rank, checkpoints, error)
        raise
    finally:
        with contextlib.ExitStack() as closing:  # all of them, even where one cannot write any more
            closing.callback(close_workers, rank)
            closing.callback(close_features, rank)
            closing.callback(checkpoints.close)
            for sink in sinks:
                closing.callback(sink.close, outcome)
        rank.sinks = ()
    rank.print(f"trained: {state.stop_reason}")
    if state.step > first:
        _report_unmoved(rank, begin, state.step - first)


def sample_weights(rank: RankContext) -> list[torch.Tensor]:
    """A copy of up to ``SAMPLED`` values of each trained parameter, as far as this rank holds it."""
    held = (local(parameter.detach()).reshape(-1) for parameter in rank.model.parameters() if parameter.requires_grad)
    return [values[:: max(1, len(values) // SAMPLED)][:SAMPLED].to("cpu", copy=True) for values in held]


def _report_unmoved(rank: RankContext, begin: list[torch.Tensor], num_steps: int) -> None:
    """A warning where training has changed no weight: a learning rate that rounds to nothing, updates all skipped."""
    moved = any(not torch.equal(old, new) for old, new in zip(begin, sample_weights(rank), strict=True))
    counts = torch.tensor([float(moved), float(sum(len(values) for values in begin))], dtype=torch.float64)
    num_moved, num_sampled = rank.engine.all_reduce_sum(counts).tolist()
    if num_sampled and not num_moved:  # DeepSpeed's engine may hold them elsewhere
        rank.measured["unmoved"] = (
            f"no weight has moved in {num_steps} step{'s' * (num_steps != 1)}: what is saved is what was loaded"
            f" ({num_sampled:,.0f} values compared; see the learning rate and the skipped steps)"
        )
        rank.print(f"warning: {rank.measured['unmoved']}")


def close_features(rank: RankContext) -> None:
    """Waits until features that were computed are written; says how many were."""
    images = rank.loss_model.images
    if images is None or images.kept is None:
        return
    kept = images.kept
    kept.close()
    rank.measured["features"] = {"computed_images": kept.num_computed, "read_micro_batches": kept.num_read}
    rank.print(
        f"features of images: {kept.num_computed:,} computed on this rank, {kept.num_read:,} micro-batches read them"
    )


def _make_loop(rank: RankContext, sinks: Sequence[Sink], checkpoints: CheckpointHook) -> Loop:
    config, plan = rank.config, rank.plan
    return Loop(
        engine=rank.engine,
        schedule=schedule_of(config.schedule, plan),
        works=record_step_starts(rank, iterate_steps(rank)),
        state=rank.state,
        stop=config.stop,
        num_steps=plan.num_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.seed,
        terms=rank.loss_model.terms,
        rank=rank.world.rank,
        device=rank.world.device,
        hooks=[
            BeatHook(rank),
            DeviceHook(rank, sinks),
            *sinks,
            *(hook for hook in rank.hooks if hook not in sinks),
            DivergenceGuard(config.stop, rank.print),
            StragglerHook(rank.print, rank.measured.setdefault("slow", []).append),
            checkpoints,
        ],
        evaluate=make_evaluate(rank),
        evaluate_after=functools.partial(follows, rank, plan.evaluate_every, plan.evaluate_per_epoch),
        evaluate_at_start=config.evaluate.at_start,
        interrupted=functools.partial(is_asked_to_stop, rank),
        guard=make_guard(rank),
        replicas=make_replicas(rank),
    )


def _report_divergence(rank: RankContext, checkpoints: CheckpointHook, error: Diverged) -> None:
    state = rank.state
    state.stop_reason, state.divergence = "training has diverged", state.divergence or error.what
    with contextlib.suppress(UserError):  # the run ends with the first error
        checkpoints.finish()
    run_on_rank_0(lambda: write_report(rank.folder.path, rank.plan, rank.config, state, rank.measured))


def _open_sinks(rank: RankContext) -> list[Sink]:
    """Those of the run, which rank 0 writes, and those of whoever runs the stages."""
    state, others = rank.state, [hook for hook in rank.hooks if isinstance(hook, Sink)]
    if not rank.is_first:
        return others
    writers = open_sinks(rank.folder, rank.plan, rank.config, rank.terminal, state.step, state.evaluated_step, rank.log)
    return [*writers, *others]


def make_evaluate(rank: RankContext) -> Evaluate | None:
    """A function that evaluates on the held-out rows, or None where there are none."""
    sample_set, max_tokens = rank.store.validation, rank.config.evaluate.max_tokens
    parts = {name: sample_set.take_tokens(max_tokens, among) for name, among in rank.store.divide_validation().items()}
    if not parts:
        return None
    rows = parts.get("", np.concatenate([*parts.values()]))
    layouts = {name: lay_out_evaluation(rank, sample_set, samples) for name, samples in parts.items()}
    num_loss_tokens = {
        name: int(sample_set.num_loss_tokens[samples].sum()) for name, samples in {**parts, "": rows}.items()
    }
    prompts = choose_prompts(rank, rows)

    def beat_by_batch(name: str, state: TrainState) -> Iterator[Batch]:
        stage, layout = f"evaluation of {name}" if name else "evaluation", layouts[name]
        for _, micro_batches in iterate_layouts(rank, "validation", [layout]):
            for done, batch in enumerate(micro_batches):
                rank.beat(state.step)  # a long evaluation is no standstill
                rank.show_progress(stage, done, layout.num_micro_batches)
                stop_if_asked(rank)
                yield batch
        rank.show_progress(stage, layout.num_micro_batches, layout.num_micro_batches)

    def run(state: TrainState) -> Evaluation:
        return evaluate(
            rank.engine,
            rank.loss_model,
            beat_by_batch("", state) if "" in layouts else (),
            state,
            num_samples=len(rows),
            num_tokens=int(sample_set.lengths[rows].sum()),
            num_loss_tokens=num_loss_tokens,
            device=rank.world.device,
            terms=rank.loss_model.terms,
            sample=functools.partial(answer_prompts, rank, prompts) if prompts else None,
            sets={name: beat_by_batch(name, state) for name in layouts if name},
        )

    return run


def is_asked_to_stop(rank: RankContext) -> bool:
    """By a signal, or by the file STOP in the run's folder."""
    if rank.is_first and not rank.stop_by_file and time.monotonic() >= rank.look_again_at:
        rank.look_again_at = time.monotonic() + LOOK_S
        with contextlib.suppress(OSError):  # a network's file system: the next look may succeed
            # What ends a run whose folder is gone is the checkpoint that follows, which cannot be saved.
            rank.stop_by_file = rank.folder.stop_file.exists() or rank.folder.is_gone
    return rank.stop() or rank.stop_by_file


def stop_if_asked(rank: RankContext) -> None:
    """Raises Interrupted on all ranks if any of them was asked to stop: whoever asks waits seconds before it kills."""
    asked = torch.tensor(float(is_asked_to_stop(rank)))  # on the host: devices go on meanwhile
    if rank.engine.all_reduce_sum(asked).item():
        raise Interrupted


def record_step_starts(rank: RankContext, works: Iterable[StepWork]) -> Iterator[StepWork]:
    """Yields the same works; records each as begun."""
    for work in works:
        rank.on_step(work.step + 1)
        yield work


class BeatHook(Hook):
    """Tells the launcher's watch that this rank goes forward."""

    def __init__(self, rank: RankContext) -> None:
        self.rank = rank

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.rank.beat(state.step)


class DeviceHook(Hook):
    """Memory and utilization of every rank's device, gathered for the sinks of rank 0 at each logged step."""

    def __init__(self, rank: RankContext, sinks: Sequence[Sink]) -> None:
        self.rank, self.sinks, self.meter = rank, sinks, Meter(rank.world.device)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if state.step % self.rank.config.log.every_steps == 0:
            reading = self.meter.read()
            values = torch.tensor(
                list(reading.values()), dtype=torch.float64
            )  # on the host: the device is at work on the update
            rows = self.rank.engine.all_gather(values)
            devices = [dict(zip(reading, row.tolist(), strict=True)) for row in rows]
            self.rank.measured["devices"] = devices
            for sink in self.sinks:
                sink.record_devices(state.step, devices)
        self.rank.measured.setdefault("seconds_by_step", []).append(result.seconds)
        self.rank.measured.setdefault("losses", []).append(result.loss)
        self.rank.measured.setdefault("tokens_by_step", []).append(result.num_tokens)
        self.rank.measured.setdefault("input_wait_by_step", []).append(result.input_wait_s)

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        self.rank.measured.setdefault("evaluations", []).append(evaluation.to_row())
