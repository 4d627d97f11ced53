"""``manyhands.train``, and what a run has left in its folder. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.api.callbacks import Callback, Callbacks, check_functions
from manyhands.api.model import LanguageModel, load
from manyhands.api.runs import Run, open_run
from manyhands.api.start import start
from manyhands.config.schema import RunConfig
from manyhands.core.files import read_rows
from manyhands.importers.load import LoadedRun
from manyhands.launch.run.folder import RunFolder

if TYPE_CHECKING:
    from manyhands.planner.types import Plan


def train(
    run: Run,
    overrides: Mapping[str, Any] | None = None,
    *,
    gpus: int | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    fresh: bool = False,
    on_step: Callback | None = None,
    on_evaluate: Callback | None = None,
    on_checkpoint: Callback | None = None,
    hooks: Sequence[Any] = (),
    metrics: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Plans, trains, saves and verifies; the same call resumes a run that was interrupted.

    In a script or a notebook it starts one process per GPU and waits for them; in a process that torchrun, accelerate
    or SLURM has started, it is one of the ranks, and every rank must call it. ``run``, ``overrides``: as for ``plan``.
    ``train_data``, ``validation_data``: a list of dicts, a ``datasets.Dataset``, a pandas ``DataFrame`` or an iterable
    of dicts, written once to a file named by its content. ``fresh``: a new folder where a run of this name exists.

    ``on_step``, ``on_evaluate`` and ``on_checkpoint`` get each logged row as a dict, as it is in metrics.jsonl, in this
    process (of ranks: on rank 0); one that raises ends the run at its next step, with its state saved.
    ``hooks``: functions of the rank's context that return a ``training.types.Hook``; ``metrics``: by name, functions
    of an ``Evaluation`` that return a number. Both run in the ranks, so they come from a module or a script file, given
    themselves or as ``"module:name"``.
    Raises ``UserError``, and ``KeyboardInterrupt`` after Ctrl-C, when the state is saved.
    """

    def read() -> LoadedRun:
        return open_run(run, overrides, gpus=gpus, train_data=train_data, validation_data=validation_data)

    callbacks = Callbacks({"step": on_step, "evaluation": on_evaluate, "checkpoint": on_checkpoint})
    check_functions(callbacks.functions, hooks, metrics)
    return TrainedRun(start(read, fresh=fresh, callbacks=callbacks, hooks=hooks, metrics=metrics))


class TrainedRun:
    """What a run has left in its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files = RunFolder(self.folder)

    def __repr__(self) -> str:
        losses = [loss for loss in self.losses if loss is not None]
        course = f", {len(self.losses)} logged steps, loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
        return f"TrainedRun({str(self.folder)!r}, {self.state}{course})"

    @property
    def state(self) -> str:
        """finished, interrupted, failed or running."""
        return str(self._files.read_status().get("state", "not started"))

    @property
    def config(self) -> RunConfig:
        """What was asked for."""
        return self._files.read_config()

    @property
    def plan(self) -> Plan:
        """The decisions of the newest launch."""
        return self._files.read_plan()

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: ``kind`` is step, evaluation or checkpoint. Losses are in nats a loss token."""
        return [row for row in read_rows(self._files.metrics) if isinstance(row.get("kind"), str)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The same as ``rows``."""
        return self.rows

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each logged step; None where it was not finite."""
        return [row["loss"] for row in self.rows if row["kind"] == "step"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Each pass over the validation samples: loss, perplexity, accuracy, answered prompts."""
        return [row for row in self.rows if row["kind"] == "evaluation"]

    @cached_property
    def report(self) -> dict[str, Any]:
        """report.json of a finished run."""
        return self._files.read_report()

    @property
    def outputs(self) -> dict[str, Path]:
        """The folders that were written: ``adapter``, ``model``."""
        return {path.name: path for name in ("adapter", "model") if (path := self.folder / name).is_dir()}

    def load(self, **options: Any) -> LanguageModel:
        """The trained model, ready to answer: ``manyhands.load`` of this folder."""
        return load(self.folder, **options)
