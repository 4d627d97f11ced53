"""Measurements for experiment trackers: Weights & Biases, MLflow and Trackio, by their own libraries.

A tracker is told what TensorBoard is told, under the same names. One that fails while a run trains is left, once, with
a line on the terminal: metrics.jsonl has everything. What a launch continues in the tracker is kept in trackers.json.
Accounts, servers and offline modes are the libraries' own settings, in their own variables, and never written here.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import read_object, write_json
from manyhands.metrics.sinks import Devices, Outcome, Sink, device_values, evaluation_values, step_values
from manyhands.training.types import Evaluation, StepResult, TrainState

NAMES = ("wandb", "mlflow", "trackio")
FILE = "trackers.json"
UNNAMEABLE = re.compile(r"[^\w\-. :/]")  # in names of MLflow's metrics


class Tracker(Protocol):
    """One run within a tracker."""

    identity: str  # by which a later launch continues it

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, outcome: Outcome) -> None: ...


class TrackerSink(Sink):
    """Sends the finite ones of a step's and an evaluation's values to a tracker."""

    def __init__(
        self, name: str, tracker: Tracker, terminal: TextIO, *, every_steps: int = 1, log: TextIO | None = None
    ) -> None:
        self.name, self.every_steps = name, every_steps
        self._tracker: Tracker | None = tracker
        self._terminal, self._log_file, self._devices = terminal, log, dict[str, float]()

    def record_devices(self, step: int, devices: Devices) -> None:
        self._devices = device_values(devices)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if result.step % self.every_steps == 0:
            self._log(step_values(result) | self._devices, result.step)

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        self._log(evaluation_values(evaluation), evaluation.step)

    def close(self, outcome: Outcome = "finished") -> None:
        if self._tracker is not None:
            with self._left_if_it_fails():
                self._tracker.close(outcome)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._tracker is not None:
            with self._left_if_it_fails():
                self._tracker.log({name: value for name, value in values.items() if math.isfinite(value)}, step)

    @contextlib.contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker's library raises whatever its network does
            self._tracker = None
            what = f"{self.name} takes no more measurements ({_first_line(error)})"
            told = f"warning: {what}; training continues, and metrics.jsonl has them all"
            print(told, file=self._terminal, flush=True)
            if self._log_file is not None:
                with contextlib.suppress(OSError):  # a full disk
                    print(told, file=self._log_file, flush=True)


def open_trackers(
    folder: Path,
    config: RunConfig,
    settings: Mapping[str, Any],
    terminal: TextIO,
    *,
    resumes: bool,
    log: TextIO | None = None,
) -> list[Sink]:
    """A sink for each tracker that ``config.log`` names; ``settings`` are shown there as the run's. ``log`` keeps what
    ``terminal`` shows.

    ``resumes``: continue in the trackers what an earlier launch began. UserError where a tracker cannot be opened.
    """
    path = folder / FILE
    known = read_object(path) if resumes else {}
    sinks: list[Sink] = []
    for name in NAMES:
        project = getattr(config.log, name)
        if project is None:
            continue
        run = TrackerRun(folder, project, config.name, settings, known.get(name))
        try:
            tracker = OPENERS[name](run)
        except Exception as error:  # as above
            raise UserError(
                f"log.{name}: the run cannot be opened there",
                where=f"log.{name}: {project}",
                why=_first_line(error),
                fix=f"{FIXES[name]}, or remove log.{name}",
            ) from error
        known[name] = tracker.identity
        sinks.append(TrackerSink(name, tracker, terminal, every_steps=config.log.every_steps, log=log))
    if sinks:
        write_json(path, known)
    return sinks


FIXES = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server or a folder",
    "trackio": "run `hf auth login` where the project is a Space",
}


@dataclass(frozen=True)
class TrackerRun:
    """What a tracker is told of a run; ``identity`` of an earlier launch."""

    folder: Path
    project: str
    name: str
    settings: Mapping[str, Any]
    identity: str | None


class _Wandb:
    def __init__(self, run: TrackerRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            id=run.identity,
            resume="allow" if run.identity else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.identity = str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome != "finished"))


class _Mlflow:
    def __init__(self, run: TrackerRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if run.identity:
            self.identity = run.identity
            self._client.update_run(self.identity, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self.identity = str(self._client.create_run(number, run_name=run.name).info.run_id)
        for key, value in run.settings.items():
            self._client.log_param(self.identity, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = _milliseconds()
        metrics = [Metric(_name_in_mlflow(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self.identity, status=status)


def _name_in_mlflow(name: str) -> str:
    """One level of folders at most, as in a folder of MLflow a metric is a file: no other can lie below it."""
    group, slash, rest = name.partition("/")
    return UNNAMEABLE.sub("_", group + slash + rest.replace("/", "_"))


class _Trackio:
    def __init__(self, run: TrackerRun) -> None:
        import trackio

        self._library = trackio
        self.identity = run.identity or f"{run.name}-{_milliseconds()}"
        trackio.init(
            project=run.project,
            name=self.identity,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:  # which Trackio does not record
        self._library.finish()


OPENERS: dict[str, Callable[[TrackerRun], Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
