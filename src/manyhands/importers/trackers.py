"""Trackers that other tools' files name, and their options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from manyhands.importers.translation import Translator

# Trackers that there are: what transformers calls their project where nothing else does, and the variable that may.
SINKS: Mapping[str, tuple[str, str]] = {
    "wandb": ("huggingface", "WANDB_PROJECT"),
    "mlflow": ("Default", "MLFLOW_EXPERIMENT_NAME"),
    "trackio": ("huggingface", ""),
}
NO_TRACKER = "is not available: metrics go to the run's folder, and to what log.wandb, log.mlflow and log.trackio name"
# Keys of trackers without a counterpart, in whichever tool.
TRACKER_OPTIONS: Mapping[str, str] = {
    "wandb_entity": "W&B takes it from the variable WANDB_ENTITY",
    "wandb_run_group": "W&B takes it from the variable WANDB_RUN_GROUP",
    **dict.fromkeys(("wandb_name", "wandb_run_name", "trackio_run_name"), "a tracker's run is named as the run is"),
    "wandb_run_id": "the run continues its own in the tracker",
    "wandb_watch": "gradients are not sent to trackers",
    "wandb_log_model": "no model is sent to trackers",
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "Trackio keeps its runs on this machine"
    ),
}


def map_trackers(
    t: Translator,
    asked: Mapping[str, Sequence[str]],
    project_keys: Mapping[str, str],
    projects: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Trackers that the keys of ``asked`` open. A project is that of the tracker's key of ``project_keys``, else that
    of ``projects``, of the tracker's own variable, or transformers' default; a tracker that is not available is a
    substitution.
    """
    projects = {**projects, **{tracker: t.get(key) for tracker, key in project_keys.items()}}
    for tracker, key in project_keys.items():
        if any(tracker in trackers for trackers in asked.values()):
            t.map(key, f"log.{tracker}", str(t.get(key)))
        t.no_op(key, f"only {tracker} reads it" if t.has(key) else "")
    for key, trackers in asked.items():
        native: dict[str, Any] = {}
        for one in trackers:
            if one == "tensorboard":
                native["log.tensorboard"] = True
            elif one in SINKS:
                default, variable = SINKS[one]
                native[f"log.{one}"] = str(projects.get(one) or t.context.variables.get(variable) or default)
        missing = [one for one in trackers if one not in SINKS and one != "tensorboard"]
        if missing and t.has(key):
            t.substitute(key, native, f"{' and '.join(missing)} {NO_TRACKER}")
        elif trackers:
            t.map(key, native)
        t.no_op(key)


def map_tracker_options(t: Translator, opened: Collection[str], options: Mapping[str, str] = TRACKER_OPTIONS) -> None:
    """Substitutes ``options`` of the trackers in ``opened`` with their reason, unless the environment has them."""
    for key, why in options.items():
        if key not in t.known:
            continue
        tracker = key.removeprefix("hf_").partition("_")[0]
        is_told = t.get(key) not in (None, False, "false")
        is_so = str(t.get(key)) == t.context.variables.get(key.upper())
        if is_told and not is_so and ("all" in opened or tracker in opened):
            t.substitute(key, {}, why)
        t.no_op(key, "" if tracker in opened or not is_told else f"only {tracker} reads it")
