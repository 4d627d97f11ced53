"""What a run was, as plain values: settings, data, versions, dates, the course of the loss. The report and the model
card are made of it. Knows config, plan and metrics.jsonl, and no model."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from manyhands import families
from manyhands.config.schema import RunConfig, Section
from manyhands.core.files import read_rows
from manyhands.core.terms import Metric, find_metric
from manyhands.data.tokenize.summary import count_left_out
from manyhands.planner.types import Plan, method_of
from manyhands.training.types import Evaluation, figures_of

CURVE_POINTS = 60
LIBRARIES = ("manyhands", "torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "peft", "deepspeed")


def describe_settings(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """What was set or decided, by run file keys; optional ones only if they differ from their default."""
    method = method_of(plan, config)
    found: dict[str, Any] = {"task": config.task, "method.name": method.name}
    if method.trains_adapters:
        found |= {f"method.{key}": getattr(method, key) for key in ("rank", "alpha", "dropout", "target_modules")}
    found |= _changed("method", method)
    optimizer = config.optimizer
    found |= {"optimizer.name": optimizer.name, "optimizer.learning_rate": plan.learning_rate}
    found |= {f"optimizer.{key}": getattr(optimizer, key) for key in ("weight_decay", "max_grad_norm")}
    found |= _changed("optimizer", optimizer)
    found |= {"schedule.name": config.schedule.name, "schedule.warmup_steps": plan.warmup_steps}
    for name in ("schedule", "preference", "moe"):
        found |= _changed(name, getattr(config, name))
    unit = next((unit for unit in ("samples", "loss_tokens") if getattr(plan, f"batch_{unit}") is not None), "packs")
    found |= {f"batch.{unit}": getattr(plan, f"batch_{unit}")}
    found |= {"data.max_length": config.data.max_length, "data.packing": plan.packing}
    limits = {f"stop.{key}": getattr(config.stop, key) for key in ("epochs", "max_steps", "max_tokens")}
    found |= {key: value for key, value in limits.items() if key == "stop.epochs" or value is not None}
    found |= {"model.dtype": plan.layout.compute_dtype, "model.master_dtype": plan.layout.master_dtype}
    found["seed"] = config.seed
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _changed(name: str, section: Section) -> dict[str, Any]:
    """A section's keys that differ from their default; without those that are decided, and paths of this machine."""
    left_out = {"name", "adapter", "learning_rate", "warmup_ratio", "warmup_steps"}
    values = section.model_dump(exclude_defaults=True, exclude=left_out)
    return {f"{name}.{key}": value for key, value in values.items()}


def describe_data(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources of a token store, by name and number: nothing of their content, and no path of this machine."""
    found = []
    for source in meta["sources"]:
        path = str(source["path"])
        kept = ("format", "weight", "num_samples", "num_tokens", "num_validation_samples", "num_validation_tokens")
        name = path.removeprefix("hub:") if path.startswith("hub:") else source["name"]
        described = {"name": name, "hub": path.startswith("hub:"), **{key: source[key] for key in kept}}
        left_out = {key: counts[source["name"]] for key, counts in count_left_out([source]).items()}
        found.append(described | ({"left_out": left_out} if left_out else {}))
    return found


def describe_versions() -> dict[str, str]:
    """Of Python and of the libraries that a result depends on, as far as they are installed."""
    found = {name: version for name in LIBRARIES if (version := families.installed_version(name))}
    return {"python": platform.python_version()} | found


def name_time(seconds: float) -> str:
    """A moment by the clock of the world: 2026-01-31 12:00:00 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def read_evaluations(metrics: Path) -> list[Evaluation]:
    """The evaluations that metrics.jsonl holds, in order; a damaged one is left out, as a line that was cut off is."""
    found = (_read_evaluation(row) for row in read_rows(metrics, "evaluation"))
    return [evaluation for evaluation in found if evaluation is not None]


def _read_evaluation(row: Mapping[str, Any]) -> Evaluation | None:
    values: dict[str, Any] = {
        field.name: math.nan if row.get(field.name) is None else row[field.name] for field in fields(Evaluation)
    }
    figures = {name: math.nan if value is None else value for name, value in figures_of(row).items()}
    groups = {"figures": figures, "declared": ()} | {name: row.get(name) or {} for name in ("sets", "terms", "metrics")}
    try:
        samples = tuple((sample["prompt"], sample["answer"]) for sample in row.get("samples") or ())
    except (TypeError, KeyError):
        return None
    numbers = [value for name, value in values.items() if name not in {"samples", *groups}]
    if not all(isinstance(value, int | float) for value in (*numbers, *figures.values())):
        return None
    if not all(isinstance(groups[name], dict) for name in ("sets", "terms", "metrics")):
        return None
    if not all(isinstance(one, dict) for one in groups["sets"].values()):
        return None
    return Evaluation(**(values | groups | {"samples": samples}))


def metrics_of(report: Mapping[str, Any]) -> list[Metric]:
    """The metrics whose figures a report's evaluations have, in order."""
    declared = [Metric(name, name, **values) for name, values in (report.get("metrics") or {}).items()]
    names = dict.fromkeys(name for row in report.get("evaluations") or () for name in figures_of(row))
    return [find_metric(name, declared) for name in names]


def format_number(values: Mapping[str, Any], name: str, form: str) -> str:
    """A value of a report by name; "-" where there is none."""
    return format(values[name], form) if values.get(name) is not None else "-"


def make_curve(rows: Sequence[Mapping[str, Any]], num_points: int = CURVE_POINTS) -> list[dict[str, Any]]:
    """At most ``num_points`` rows of means of loss, gradient norm and speed; number and rate of the last step."""
    points = []
    num_points = min(num_points, len(rows))
    for index in range(num_points):
        part = rows[index * len(rows) // num_points : (index + 1) * len(rows) // num_points]
        means = {key: _mean(row.get(key) for row in part) for key in ("loss", "grad_norm", "tokens_per_s")}
        points.append({"step": part[-1]["step"], **means, "learning_rate": part[-1].get("learning_rate")})
    return points


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return fmean(known) if known else None
