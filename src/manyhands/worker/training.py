"""The stage that trains: the loop with its hooks and its evaluation."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.errors import UserError
from manyhands.core.holding import local
from manyhands.data.batch.collate import BatchWorkers
from manyhands.data.store.store import TokenStore
from manyhands.infer.sample_prompts import SamplePrompts
from manyhands.metrics import open_sinks
from manyhands.metrics.report import write_report
from manyhands.metrics.sinks import Meter, Outcome, Sink
from manyhands.model.inputs import close_features
from manyhands.model.loss import LossModel
from manyhands.planner.efficiency import lay_out_evaluation, lay_out_values
from manyhands.planner.steps import schedule_of
from manyhands.training.guards import Diverged, DivergenceGuard, RollBack, StepGuard, StragglerHook
from manyhands.training.loop import Interrupted, Loop, evaluate, train
from manyhands.training.step import StepWork
from manyhands.training.types import Batch, Evaluate, Evaluation, Hook, StepResult, TrainState
from manyhands.worker.batches import iterate_layouts, iterate_steps, mark_values, open_workers
from manyhands.worker.checkpoints import CheckpointHook, follows
from manyhands.worker.guards import keep_samples, make_replicas, roll_back
from manyhands.worker.rank import BuiltModel, Data, Process, Rank, RunEngine

SAMPLED = 4096  # values of each parameter, to see whether any has changed
LOOK_S = 1.0  # between two looks for the file STOP, which may be on a network's file system


def train_model(
    rank: Rank, data: Data, built: BuiltModel, state: TrainState, hooks: Sequence[Hook], measured: dict[str, Any]
) -> TrainState:
    """Runs the loop, rolls back to checkpoints, and saves when stopped. ``measured`` gets figures for the report."""
    while True:
        try:
            _train_on(rank, data, built, state, hooks, measured)
            return state
        except RollBack as reason:
            state = roll_back(rank, built.engine, state, reason, measured)


def _train_on(
    rank: Rank, data: Data, built: BuiltModel, state: TrainState, hooks: Sequence[Hook], measured: dict[str, Any]
) -> None:
    config, plan, process, engine, loss_model = rank.config, rank.plan, rank.process, built.engine, built.loss_model
    sinks: list[Sink] = [hook for hook in hooks if isinstance(hook, Sink)]
    hooks = [hook for hook in hooks if hook not in sinks]
    if rank.world.is_first:
        written = open_sinks(rank.folder, plan, config, process.terminal, state.step, state.evaluated_step, process.log)
        sinks = [*written, *sinks]

    def show_progress(stage: str, done: int, total: int) -> None:
        """How far the work between two steps is."""
        for sink in sinks:
            sink.show_progress(stage, done, total)

    checkpoints = CheckpointHook(rank, engine, data.order, state, [*sinks, *hooks], show_progress, measured)
    workers = open_workers(rank, data)
    evaluate = make_evaluate(rank, data, built, workers, show_progress)
    loop = Loop(
        engine=engine,
        schedule=schedule_of(config.schedule, plan),
        works=record_step_starts(rank, iterate_steps(rank, data, loss_model, state.step, workers)),
        state=state,
        stop=config.stop,
        num_steps=plan.num_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.seed,
        terms=loss_model.terms,
        figures=loss_model.figures,
        rank=rank.world.rank,
        device=rank.world.device,
        hooks=[
            ProgressHook(rank, engine, sinks, measured),
            *sinks,
            *hooks,
            DivergenceGuard(config.stop, process.print),
            StragglerHook(process.print, measured.setdefault("slow", []).append),
            checkpoints,
        ],
        evaluate=evaluate,
        evaluate_after=functools.partial(follows, data.order, plan.evaluate_every, plan.evaluate_per_epoch),
        evaluate_at_start=config.evaluate.at_start,
        interrupted=functools.partial(is_asked_to_stop, rank),
        guard=StepGuard(config.guards, process.print, functools.partial(keep_samples, rank, data)),
        replicas=make_replicas(rank, built.model),
    )
    loss_model.train()
    outcome: Outcome = "failed"
    begin, first = sample_weights(built.model), state.step
    try:
        train(loop)
        outcome = "finished"
    except RollBack:  # on all ranks
        outcome = "interrupted"  # the sinks continue from the checkpoint
        checkpoints.finish()
        raise
    except Interrupted:
        outcome = "interrupted"
        checkpoints.save_and_wait(state)
        raise
    except Diverged as error:  # on all ranks
        state.stop_reason, state.divergence = "training has diverged", state.divergence or error.what
        with contextlib.suppress(UserError):  # the run ends with the first error
            checkpoints.finish()
        run_on_rank_0(lambda: write_report(rank.folder.path, plan, config, state, measured))
        raise
    finally:
        with contextlib.ExitStack() as closing:  # all of them, even where one cannot write any more
            if workers is not None:
                closing.callback(workers.close)
            closing.callback(_close_features, process, loss_model, measured)
            closing.callback(checkpoints.close)
            for sink in sinks:
                closing.callback(sink.close, outcome)
    process.print(f"trained: {state.stop_reason}")
    if state.step > first:
        _report_unmoved(process, built, begin, state.step - first, measured)


def sample_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """A copy of up to ``SAMPLED`` values of each trained parameter, as far as this rank holds it."""
    held = (local(parameter.detach()).reshape(-1) for parameter in model.parameters() if parameter.requires_grad)
    return [values[:: max(1, len(values) // SAMPLED)][:SAMPLED].to("cpu", copy=True) for values in held]


def _report_unmoved(
    process: Process, built: BuiltModel, begin: list[torch.Tensor], num_steps: int, measured: dict[str, Any]
) -> None:
    """A warning where training has changed no weight: a learning rate that rounds to nothing, updates all skipped."""
    moved = any(not torch.equal(old, new) for old, new in zip(begin, sample_weights(built.model), strict=True))
    counts = torch.tensor([float(moved), float(sum(len(values) for values in begin))], dtype=torch.float64)
    num_moved, num_sampled = built.engine.all_reduce_sum(counts).tolist()
    if num_sampled and not num_moved:  # DeepSpeed's engine may hold them elsewhere
        measured["unmoved"] = (
            f"no weight has moved in {num_steps} step{'s' * (num_steps != 1)}: what is saved is what was loaded"
            f" ({num_sampled:,.0f} values compared; see the learning rate and the skipped steps)"
        )
        process.print(f"warning: {measured['unmoved']}")


def _close_features(process: Process, loss_model: LossModel, measured: dict[str, Any]) -> None:
    found, line = close_features(loss_model)
    measured |= found
    if line:
        process.print(line)


def choose_evaluated(store: TokenStore, max_tokens: int | None) -> dict[str, np.ndarray]:
    """Numbers of the validation samples that an evaluation takes, by set."""
    return {name: store.validation.take_tokens(max_tokens, among) for name, among in store.divide_validation().items()}


def make_evaluate(
    rank: Rank,
    data: Data,
    built: BuiltModel,
    workers: BatchWorkers | None,
    show_progress: Callable[[str, int, int], None],
) -> Evaluate | None:
    """A function that evaluates on the held-out rows, or None where there are none."""
    store, loss_model, settings = data.store, built.loss_model, rank.config.evaluate
    sample_set = store.validation
    parts = choose_evaluated(store, settings.max_tokens)
    if not parts:
        return None
    rows = parts.get("", np.concatenate([*parts.values()]))
    for_values = {
        name: lay_out_values(rank.plan, sample_set, samples, loss_model.terms) for name, samples in parts.items()
    }
    layouts = {name: lay_out_evaluation(rank.plan, sample_set, samples) for name, samples in parts.items()}
    layouts = {
        name: replace(layout, micro_batches=(*for_values[name], *layout.micro_batches))
        for name, layout in layouts.items()
    }
    num_loss_tokens = {
        name: int(sample_set.num_loss_tokens[samples].sum()) for name, samples in {**parts, "": rows}.items()
    }
    prompts = SamplePrompts(rank.config, rank.plan, store, data.tokenizer, rows)

    def beat_by_batch(name: str, state: TrainState) -> Iterator[Batch]:
        stage, layout = f"evaluation of {name}" if name else "evaluation", layouts[name]
        for _, micro_batches in iterate_layouts(rank, data, loss_model, "validation", [layout], workers):
            for done, batch in enumerate(mark_values(micro_batches, len(for_values[name]))):
                rank.process.beat(state.step)  # a long evaluation is no standstill
                show_progress(stage, done, layout.num_micro_batches)
                stop_if_asked(rank, built.engine)
                yield batch
        show_progress(stage, layout.num_micro_batches, layout.num_micro_batches)

    def run(state: TrainState) -> Evaluation:
        return evaluate(
            built.engine,
            loss_model,
            beat_by_batch("", state) if "" in layouts else (),
            state,
            num_samples=len(rows),
            num_tokens=int(sample_set.lengths[rows].sum()),
            num_loss_tokens=num_loss_tokens,
            device=rank.world.device,
            terms=loss_model.terms,
            sample=functools.partial(prompts.answer, built.model, built.engine, rank.world, show_progress)
            if prompts.chosen
            else None,
            sets={name: beat_by_batch(name, state) for name in layouts if name},
        )

    return run


def is_asked_to_stop(rank: Rank) -> bool:
    """By a signal, or by the file STOP in the run's folder."""
    process = rank.process
    if rank.world.is_first and not process.stop_by_file and time.monotonic() >= process.look_again_at:
        process.look_again_at = time.monotonic() + LOOK_S
        with contextlib.suppress(OSError):  # a network's file system: the next look may succeed
            # What ends a run whose folder is gone is the checkpoint that follows, which cannot be saved.
            process.stop_by_file = rank.folder.stop_file.exists() or rank.folder.is_gone
    return process.stop() or process.stop_by_file


def stop_if_asked(rank: Rank, engine: RunEngine) -> None:
    """Raises Interrupted on all ranks if any of them was asked to stop: whoever asks waits seconds before it kills."""
    asked = torch.tensor(float(is_asked_to_stop(rank)))  # on the host, while devices work
    if engine.all_reduce_sum(asked).item():
        raise Interrupted


def record_step_starts(rank: Rank, works: Iterable[StepWork]) -> Iterator[StepWork]:
    """Yields the same works; records each as begun."""
    for work in works:
        rank.process.begin_step(work.step + 1)
        yield work


class ProgressHook(Hook):
    """Reports progress, and gathers each device's memory and utilization for rank 0's sinks at logged steps."""

    def __init__(self, rank: Rank, engine: RunEngine, sinks: Sequence[Sink], measured: dict[str, Any]) -> None:
        self.rank, self.engine, self.sinks, self.measured = rank, engine, sinks, measured
        self.meter = Meter(rank.world.device)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.rank.process.beat(state.step)
        if state.step % self.rank.config.log.every_steps == 0:
            reading = self.meter.read()
            values = torch.tensor(list(reading.values()), dtype=torch.float64)  # on the host: the device is updating
            rows = self.engine.all_gather(values)
            devices = [dict(zip(reading, row.tolist(), strict=True)) for row in rows]
            self.measured["devices"] = devices
            for sink in self.sinks:
                sink.record_devices(state.step, devices)
        for name, value in (
            ("seconds_by_step", result.seconds),
            ("losses", result.loss),
            ("tokens_by_step", result.num_tokens),
            ("input_wait_by_step", result.input_wait_s),
        ):
            self.measured.setdefault(name, []).append(value)
        self.measured["figures"] = result.figures

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        self.measured.setdefault("evaluations", []).append(evaluation.to_row())
        self.measured["metrics"] = evaluation.declared
