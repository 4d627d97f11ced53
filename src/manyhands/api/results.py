"""What transformers' trainer returns and reports, from a run's rows; calls its callbacks. Imports no torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from manyhands.api.callbacks import Callback, Row
from manyhands.api.trained import TrainedRun
from manyhands.core.errors import UserError
from manyhands.core.limits import GIB

# Of a transformers callback, by the kind of row; what runs in the ranks, or would change the run, has no row.
EVENTS: Mapping[str, Sequence[str]] = {
    "step": ("on_step_end", "on_log"),
    "evaluation": ("on_evaluate", "on_log"),
    "checkpoint": ("on_save",),
}
ASIDE = ("loss", "seconds", "time")
OUTER = ("on_train_begin", "on_train_end")
CONTROLS = {
    "should_training_stop": "early_stopping_patience of EarlyStoppingCallback, or stop.loss_above; an exception ends "
    "the run, with its state saved",
    "should_save": "TrainingArguments(save_steps=...)",
    "should_evaluate": "TrainingArguments(eval_strategy='steps', eval_steps=...)",
    "should_log": "TrainingArguments(logging_steps=...)",
}


def as_log(row: Row, epoch: float | None) -> dict[str, Any]:
    """A row of metrics.jsonl by transformers' names; ``epoch``: of the step that an evaluation follows."""
    if row["kind"] == "step":
        return {name: row[name] for name in ("loss", "grad_norm", "learning_rate", "epoch", "step")}
    figures = {name: value for name, value in row.items() if isinstance(value, float) and name not in ASIDE}
    figures = {"loss": row["loss"], **figures, **row.get("metrics", {}), "runtime": row["seconds"]}
    return {**{f"eval_{name}": value for name, value in figures.items()}, "epoch": epoch, "step": row["step"]}


@dataclass
class TrainerState:
    """Where a run is, by the names of transformers' ``TrainerState``."""

    rows: list[Row] = field(default_factory=list)
    max_steps: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """Logged steps (loss, grad_norm, learning_rate, epoch, step) and evaluations (eval_loss, ...), in order."""
        found, epoch = [], 0.0
        for row in self.rows:
            if row["kind"] == "checkpoint":
                continue
            epoch = row.get("epoch", epoch)
            found.append(as_log(row, epoch))
        return found

    @property
    def global_step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def epoch(self) -> float:
        return next((row["epoch"] for row in reversed(self.rows) if row["kind"] == "step"), 0.0)

    @property
    def best_metric(self) -> float | None:
        """The lowest validation loss."""
        losses = [row["loss"] for row in self.rows if row["kind"] == "evaluation" and row["loss"] is not None]
        return min(losses, default=None)


class TrainOutput(TrainedRun):
    """A run that ``Trainer.train`` has trained: a ``TrainedRun`` whose ``metrics`` are those of transformers'."""

    @property
    def global_step(self) -> int:
        return TrainerState(self.rows).global_step

    @property
    def training_loss(self) -> float:
        """The mean of the logged steps' losses."""
        losses = [loss for loss in self.losses if loss is not None]
        return sum(losses) / max(1, len(losses))

    @cached_property
    def metrics(self) -> dict[str, float]:  # type: ignore[override]
        """``train_runtime`` (seconds of the logged steps, of all starts), ``train_loss``, ``epoch``, rates a second,
        and ``train_peak_memory_gib``: of the GPU that held most, which torch.cuda in this process knows nothing of.
        """
        steps = [row for row in self.rows if row["kind"] == "step"]
        seconds = sum(row["seconds"] for row in steps)
        peaks = [device["peak_bytes"] or 0 for row in steps for device in row["devices"]]
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(sum(row["num_samples"] for row in steps) / max(seconds, 1e-9), 3),
            "train_steps_per_second": round(len(steps) / max(seconds, 1e-9), 3),
            "train_loss": self.training_loss,
            "train_peak_memory_gib": round(max(peaks, default=0) / GIB, 3),
            "epoch": TrainerState(steps).epoch,
        }


@dataclass
class TransformersCallbacks:
    """Callbacks of transformers, called in this process with the rows of the run."""

    args: Any
    callbacks: list[Any] = field(default_factory=list)
    state: TrainerState = field(default_factory=TrainerState)

    def add(self, callback: Any) -> None:
        """A callback or its class. UserError for one with events that no row has."""
        callback = callback() if isinstance(callback, type) else callback
        events = {
            name
            for kind in type(callback).__mro__
            if (kind.__module__, kind.__name__) != ("transformers.trainer_callback", "TrainerCallback")
            for name in vars(kind)
            if name.startswith("on_")
        }
        known = {*OUTER, *(event for events in EVENTS.values() for event in events)}
        unknown = sorted(events - known)
        if unknown or not events:
            raise UserError(
                f"the callback {type(callback).__name__} is not available",
                where="Trainer",
                why=f"there is no {unknown[0]} outside of the ranks" if unknown else "it has no event",
                fix=f"give one with {', '.join(sorted(known))}; on_step, on_evaluate or on_checkpoint, functions of a "
                "row of metrics.jsonl; or hooks, which run in the ranks. Trackers are named in report_to",
            )
        self.callbacks.append(callback)

    def function(self, kind: str, own: Callback | None) -> Callback | None:
        """What gets the rows of this kind: ``own``, the caller's function, and then the callbacks."""
        if not self.callbacks:
            return own

        def call(row: Row) -> None:
            if own is not None:
                own(row)
            self.state.rows.append(row)
            for event in EVENTS[kind]:
                self.call(event, row)

        return call

    def call(self, event: str, row: Row | None = None) -> None:
        logs = self.state.log_history[-1] if row is not None and event in ("on_log", "on_evaluate") else {}
        given = {"on_log": {"logs": logs}, "on_evaluate": {"metrics": logs}}.get(event, {})
        control = SimpleNamespace(should_epoch_stop=False, **dict.fromkeys(CONTROLS, False))
        for callback in self.callbacks:
            function = getattr(callback, event, None)
            answer = function(self.args, self.state, control, **given) if function is not None else None
            for name, instead in CONTROLS.items():
                if getattr(answer or control, name, False):
                    raise UserError(
                        f"{type(callback).__name__} has set control.{name}",
                        where=event,
                        why="a callback sees the run and does not steer it",
                        fix=f"use {instead}",
                    )


def early_stopping(callback: Any) -> int | None:
    """``stop.patience`` of transformers' ``EarlyStoppingCallback``; None for any other callback."""
    if type(callback).__name__ != "EarlyStoppingCallback":
        return None
    if getattr(callback, "early_stopping_threshold", 0):
        raise UserError(
            "early_stopping_threshold is not available",
            where="EarlyStoppingCallback",
            why="any lower validation loss counts as better",
            fix="leave it out",
        )
    return int(callback.early_stopping_patience)


def repository_of(args: Any) -> str:
    """``hub_model_id``. UserError where the arguments have none."""
    found = args.get("hub_model_id") if isinstance(args, Mapping) else getattr(args, "hub_model_id", None)
    if not found:
        raise UserError(
            "there is no name for the model on the hub",
            where="Trainer.push_to_hub",
            fix='give TrainingArguments(hub_model_id="OWNER/NAME"), or call model.push_to_hub("OWNER/NAME")',
        )
    return os.fspath(found)
