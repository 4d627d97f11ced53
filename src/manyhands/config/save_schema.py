"""The keys of a run file about what a run writes while it trains: checkpoints and metrics.

Part of the schema (``schema.py``), under its rules: no torch, no file, no side effect; every key has a description.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from manyhands.config.data_schema import Auto, NonNegativeInt, PositiveFloat, PositiveInt, Section

PartOfRun = Annotated[float, Field(gt=0, lt=1)]


class CheckpointSection(Section):
    """Checkpoints of the run."""

    every_steps: NonNegativeInt | PartOfRun | Auto = Field(
        "auto",
        description="Steps between checkpoints, or below 1 a share of all steps; auto: ten per run; 0: only at the "
        "end.",
    )
    per_epoch: PositiveInt | None = Field(
        None, description="Evenly spaced checkpoints in each epoch, the last at its end; excludes every_steps."
    )
    every_minutes: PositiveFloat | None = Field(
        None, description="Also a checkpoint when so many minutes have passed since the one before."
    )
    asynchronous: bool | Auto = Field(
        "auto",
        description="Copy checkpoints to host memory and write them from another process while training continues. "
        "auto: if the host has enough memory, and not under ZeRO.",
    )
    copy_to: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://[^@\s]*$",
        description="URL of a folder to copy each checkpoint to, under the run's name, once it is complete: s3://, "
        "gs://, az://, file://, or whatever else fsspec opens. A start without a local checkpoint resumes from there.",
    )
    every_step_in_memory: bool = Field(
        False,
        description="Also keep weights and optimizer states of the last two steps in host memory, from which ranks "
        "that `manyhands train` starts again after a fault resume: the step in flight is lost and no more. Takes "
        "twice a checkpoint's size of each machine's memory, or of all machines' where weights are sharded over them. "
        "Then each node also keeps copies of another's, which takes as much again: if one is lost, the others wait "
        "until it is started again, and it gets its copies.",
    )
    keep_last: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    keep_best: bool = Field(False, description="Keep and export the checkpoint with the lowest validation loss.")


class LogSection(Section):
    """Metrics written during training."""

    every_steps: PositiveInt = Field(1, description="Steps between entries in metrics.jsonl and TensorBoard.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files to the run's folder.")
    wandb: str | None = Field(
        None, min_length=1, description="Project of Weights & Biases; account and offline mode by its own variables."
    )
    mlflow: str | None = Field(None, min_length=1, description="Experiment of MLflow, on MLFLOW_TRACKING_URI.")
    trackio: str | None = Field(None, min_length=1, description="Project of Trackio.")
